import math
from collections.abc import Callable
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, ArrayLike, Float

from ... import _keys
from ..._caller import caller
from ..._check import (
    check_floating_arrays,
    check_function,
    check_number,
    check_positive_int,
    check_variance,
    check_word,
    is_traced,
    kind_text,
)
from ..._data import take_data
from ..._ensemble import Ensemble, check_ensemble, check_model_state
from ..._leaf_text import leaf_text
from ..._map import over_members
from ..._pytree import PyTree
from ...train import Frozen

_MODEL = "methods.sngp.SNGP"


def check_positive_number(value: Any, argument: str) -> float:
    """Raises unless `value` is a finite number above zero. Returns it."""
    number = check_number(value, argument)
    if number <= 0:
        raise ValueError(f"`{caller()}` needs `{argument}` to be above 0, got {value!r}.")
    return number


def check_outputs(out_size: Any, likelihood: str) -> int:
    """Raises unless the likelihood supports this number of outputs. Returns it."""
    size = check_positive_int(out_size, "out_size")
    if likelihood == "bernoulli" and size != 1:
        raise ValueError(f"`{_MODEL}` needs `out_size=1` for `likelihood='bernoulli'`, got {size}: it has one logit.")
    if likelihood == "categorical" and size < 2:
        raise ValueError(
            f"`{_MODEL}` needs `out_size` of at least two classes for `likelihood='categorical'`, got {size}."
        )
    return size


def check_bound(bound: Any) -> None:
    """Raises unless `bound` is a number above zero; a traced one is not checked."""
    if is_traced(bound):
        if bound.ndim:
            raise TypeError(f"`{caller()}` needs one number `bound` per member, got {leaf_text(bound)}.")
        return
    check_positive_number(bound.item() if isinstance(bound, jax.Array) and bound.ndim == 0 else bound, "bound")


def check_matrices(select: Callable[[Any], Any], positions: Any, leaves: list[Any]) -> list[int]:
    """Raises unless an array of two or more axes is selected. Returns the positions of all such arrays."""
    fix = "Say which parts are bounded: `where=lambda model: model.layers[:-1]`."
    try:
        selected = jax.tree.leaves(select(positions))
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(
            f"`{caller()}` needs `where` to select parts of a member; it raised an error.\n{fix}"
        ) from error
    found = [i for i in selected if isinstance(i, int) and not isinstance(i, bool) and leaves[i].ndim >= 2]
    if not found:
        raise ValueError(f"`{caller()}` needs `where` to select trained arrays of two or more axes, got none.\n{fix}")
    complex_ones = [leaves[i] for i in found if jnp.iscomplexobj(leaves[i])]
    if complex_ones:
        raise TypeError(f"`{caller()}` needs real weights, got {leaf_text(complex_ones[0])}.")
    return found


def mean_field(
    mean: Float[ArrayLike, "*batch"], variance: Float[ArrayLike, "*batch"], *, factor: float | int = math.pi / 8
) -> Float[Array, "*batch"]:
    r"""Logits whose softmax or sigmoid approximates the mean probability under Gaussian logits.

    $\mu / \sqrt{1 + \lambda \sigma^2}$ for each logit. With $\lambda = \pi / 8$ the sigmoid is accurate to about 0.01;
    for a softmax it is a heuristic. The authors of SNGP tune $\lambda$, for example 20 on CIFAR-100.

    **Arguments:**

    - `mean`, `variance`: of the logits, of equal shapes, with or without `members`.
    - `factor`: $\lambda$, zero or more.

    **Returns:** logits of the shape of `mean`.

    ```python
    # The mean probability is 0.697, not sigmoid(1) = 0.731
    jax.nn.sigmoid(ee.methods.sngp.mean_field(jnp.array([1.0]), jnp.array([1.0])))  # 0.700
    ```

    ??? cite
        [Lu et al. 2020](https://arxiv.org/abs/2006.07584)
    """
    centre, variances = check_floating_arrays(mean=mean, variance=variance)
    check_variance(variance, positive=False)
    return centre / jnp.sqrt(1 + check_number(factor, "factor", least=0) * variances)


M = TypeVar("M")

Likelihood = Literal["gaussian", "bernoulli", "categorical"]


class SNGPOutput(NamedTuple):
    """The prediction of an [`eqx_ensemble.methods.sngp.SNGP`][] for one row.

    **Attributes:**

    - `mean`: `(out,)`, logits of classes or means of targets.
    - `variance`: `(out,)`, the variance under the Gaussian process of the last layer, without noise; NaN before
        [`eqx_ensemble.methods.sngp.update_covariance`][].
    """

    mean: Float[Array, "*batch out"]
    variance: Float[Array, "*batch out"]


class SNGP(eqx.Module, Generic[M]):
    r"""A member whose last layer is a Gaussian process, approximated by random Fourier features.

    For hidden units $h$ of `network`, the features are $\phi = \sqrt{2 / D} \cos(W h + b)$ with fixed random $W \sim
    \mathcal{N}(0, 1 / l^2)$ and $b \sim \mathcal{U}(0, 2 \pi)$. Outputs have the mean $\beta^\top \phi$ and the
    variance $\phi^\top \Sigma \phi$, which is NaN until [`eqx_ensemble.methods.sngp.update_covariance`][] computes
    $\Sigma$ after training. Train the network with [`eqx_ensemble.methods.sngp.bound_spectral_norm`][] and residual
    connections, so that distances in $h$ reflect those between inputs.

    The prior of $\beta$ is `ridge / (2 * N) * jnp.sum(model.weight**2)` in a mean loss over $N$ rows.

    **Arguments:**

    - `network`: a function of a row to hidden units `(in_size,)`; it may be stateful.
    - `in_size`, `out_size`: the numbers of hidden units and of outputs.
    - `num_features`: $D$; the covariance takes $D^2$ numbers, per class for `"categorical"`.
    - `length_scale`: $l$, in the unit of the hidden units, which an `equinox.nn.LayerNorm` at the end fixes.
    - `ridge`: the prior precision of $\beta$.
    - `likelihood`, `noise_variance`: `"gaussian"`, which the authors also use for classes; `"bernoulli"` for one logit;
        `"categorical"`.
    - `key`: the member's key, for $W$ and $b$.

    **Returns** (when called): [`eqx_ensemble.methods.sngp.SNGPOutput`][]; with a state among the inputs, also the new
    state.

    ```python
    def make(key):
        own, head = jax.random.split(key)
        network = eqx.nn.MLP(3, 16, 16, 2, key=own)
        return ee.methods.sngp.SNGP(network, 16, 2, num_features=64, key=head)


    def loss(model, batch, key):
        x, labels = batch
        logits = jax.vmap(model)(x).mean
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


    ensemble = ee.build(make, 4, key=key)
    x = jax.random.normal(key, (100, 3))
    optimiser = ee.methods.sngp.bound_spectral_norm(optax.adam(1e-2), 0.95)
    data = (x, (x[:, 0] > 0).astype(int))
    run = ee.fit(ensemble, loss, optimiser, data, epochs=2, key=key)
    ensemble = ee.methods.sngp.update_covariance(run.ensemble, x)
    out = ee.predict(ensemble, x)
    ee.combine.mixture(ee.methods.sngp.mean_field(out.mean, out.variance))
    ```

    ??? cite
        [Liu et al. 2020](https://arxiv.org/abs/2006.10108)
    """

    network: M
    weight: Float[Array, "out features"]
    frequencies: Frozen[Any]
    phases: Frozen[Any]
    root: Frozen[Any]
    ridge: float = eqx.field(static=True)
    likelihood: Likelihood = eqx.field(static=True)
    noise_variance: float = eqx.field(static=True)

    def __init__(
        self,
        network: M,
        in_size: int,
        out_size: int,
        *,
        num_features: int = 1024,
        length_scale: float | int = 1.0,
        ridge: float | int = 1.0,
        likelihood: Likelihood = "gaussian",
        noise_variance: float | int = 1.0,
        key: Any,
    ) -> None:
        check_function(network, "network", example="eqx.nn.MLP(3, 16, 16, 2, key=key)")
        width = check_positive_int(in_size, "in_size")
        count = check_positive_int(num_features, "num_features")
        scale = check_positive_number(length_scale, "length_scale")
        check_word(likelihood, "likelihood", ("gaussian", "bernoulli", "categorical"))
        outputs = check_outputs(out_size, likelihood)
        own, first, second = jax.random.split(_keys.root(key), 3)
        self.network = network
        self.weight = jax.random.normal(own, (outputs, count)) / count**0.5
        self.frequencies = Frozen(jax.random.normal(first, (count, width)) / scale)
        self.phases = Frozen(jax.random.uniform(second, (count,), maxval=2 * jnp.pi))
        self.ridge = check_positive_number(ridge, "ridge")
        shape = (outputs, count, count) if likelihood == "categorical" else (count, count)
        self.root = Frozen(jnp.zeros(shape))
        self.likelihood = likelihood
        self.noise_variance = check_positive_number(noise_variance, "noise_variance")

    def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
        """Mean and variance of the outputs for one row; if a state is among the inputs, also the new state."""
        is_stateful = any(isinstance(x, eqx.nn.State) for x in args)
        out = self.network(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        hidden, *state = out if is_stateful else (out,)
        phi = self.features(hidden)
        root = jax.lax.stop_gradient(self.root.value).astype(phi.dtype)
        variance = jnp.where(root[..., 0, 0] == 0, jnp.nan, jnp.sum((root @ phi) ** 2, axis=-1))  # 0: not yet computed
        mean = self.weight.astype(phi.dtype) @ phi
        found = SNGPOutput(mean, jnp.broadcast_to(variance, mean.shape))
        return (found, *state) if is_stateful else found

    def features(self, hidden: Float[Array, " hidden"]) -> Float[Array, " features"]:
        """The random features of one row's hidden units."""
        frequencies, phases = (jax.lax.stop_gradient(x.value) for x in (self.frequencies, self.phases))
        in_size = frequencies.shape[1]
        if not isinstance(hidden, jax.Array) or hidden.shape != (in_size,):
            got = leaf_text(hidden) if isinstance(hidden, jax.Array) else kind_text(hidden)
            raise ValueError(
                f"`{_MODEL}` needs a network that gives `in_size` hidden units of one row, ({in_size},), got {got}.\n"
                "A batch of rows? Map the model: `jax.vmap(model)(x)`."
            )
        if not jnp.issubdtype(hidden.dtype, jnp.floating):
            raise TypeError(f"`{_MODEL}` needs floating-point hidden units, got {leaf_text(hidden)}.")
        cosines = jnp.cos(frequencies.astype(hidden.dtype) @ hidden + phases.astype(hidden.dtype))
        return (2 / phases.shape[0]) ** 0.5 * cosines


def update_covariance(
    ensemble: Ensemble[Any],
    x: PyTree,
    *,
    batch_size: int | None = None,
    state: eqx.nn.State | None = None,
) -> Ensemble[Any]:
    r"""Computes the covariances of the last layers in one pass over the training data, after training.

    The precision is $\text{ridge}\, I + \sum_i v_i \phi_i \phi_i^\top$ over the rows, with $v_i = 1 / \text{noise
    variance}$ for a Gaussian likelihood, else $p_i (1 - p_i)$ for each logit.

    **Arguments:**

    - `ensemble`: members that are [`eqx_ensemble.methods.sngp.SNGP`][].
    - `x`: the inputs of the training data, arrays `(rows, ...)`, or `(members, rows, ...)` in parts marked
        [`eqx_ensemble.Each`][].
    - `batch_size`: rows per update; by default the number of features.
    - `state`: the stacked `equinox.nn.State` of stateful members.

    **Returns:** the ensemble with the new covariances.

    ```python
    make = lambda key: ee.methods.sngp.SNGP(eqx.nn.Identity(), 3, 1, num_features=64, key=key)
    ensemble = ee.methods.sngp.update_covariance(ee.build(make, 4, key=key), jnp.zeros((50, 3)))
    near, far = ee.predict(ensemble, jnp.array([[0.1, 0, 0], [9, 0, 0]])).variance[0, :, 0]  # 0.03, 1.06
    ```

    ??? cite
        [Liu et al. 2020](https://arxiv.org/abs/2006.10108)
    """
    check_ensemble(ensemble)
    if not isinstance(ensemble.stacked, SNGP):
        raise TypeError(
            f"`methods.sngp.update_covariance` needs members that are `SNGP`, got {kind_text(ensemble.stacked)}.\n"
            "Make them so: `methods.sngp.SNGP(network, in_size, out_size, key=key)`."
        )
    check_model_state(ensemble, state)
    x, num_rows = take_data(x, ensemble.num_members, argument="x")
    size = ensemble.stacked.weight.shape[-1] if batch_size is None else check_positive_int(batch_size, "batch_size")
    root = _roots(ensemble, state, x, num_rows, min(size, num_rows))
    stacked = eqx.tree_at(lambda model: model.root.value, ensemble.stacked, root)
    leaves = jax.tree.leaves(stacked, is_leaf=lambda x: x is None)
    # The initial zeros may be shared.
    axes = tuple(0 if x is root else axis for x, axis in zip(leaves, ensemble.axes, strict=True))
    return Ensemble(stacked, axes)


@eqx.filter_jit
def _roots(ensemble: Ensemble[Any], state: eqx.nn.State | None, x: PyTree, num_rows: int, size: int) -> Array:
    def one(model: SNGP[Any], state: eqx.nn.State | None, x: PyTree) -> Array:
        return _root(eqx.nn.inference_mode(model), state, x, num_rows, size)

    return over_members(one)(ensemble, state, x)


def _root(model: SNGP[Any], state: eqx.nn.State | None, x: PyTree, num_rows: int, size: int) -> Array:
    """The inverse of the transposed triangular factor of one member's precision."""
    network: Any = model.network
    hidden = network if state is None else lambda row: network(row, state)[0]
    old = model.root.value
    start = jnp.broadcast_to(model.ridge**0.5 * jnp.eye(old.shape[-1], dtype=old.dtype), old.shape)

    def update(factor: Array, number: Array) -> tuple[Array, None]:
        rows = number * size + jnp.arange(size)
        phi = jax.vmap(lambda row: model.features(hidden(row)))(
            jax.tree.map(lambda x: x[jnp.minimum(rows, num_rows - 1)], x)
        )
        # The last batch is padded by repeating the last row with weight zero.
        curvature = jnp.where((rows < num_rows)[:, None], _curvature(model, phi), 0)
        scaled = jnp.sqrt(curvature).T[:, :, None] * phi[None]
        scaled = (scaled if old.ndim == 3 else scaled[0]).astype(old.dtype)
        return jnp.linalg.qr(jnp.concatenate([factor, scaled], axis=-2), mode="r"), None

    factor, _ = jax.lax.scan(update, start, jnp.arange(-(-num_rows // size)))
    invert = lambda r: solve_triangular(r, jnp.eye(r.shape[0], dtype=r.dtype), trans="T")
    return jax.vmap(invert)(factor) if old.ndim == 3 else invert(factor)


def _curvature(model: SNGP[Any], phi: Float[Array, "rows features"]) -> Float[Array, "rows out"]:
    """Second derivatives of the negative log-likelihood with respect to each logit; one column for Gaussian outputs."""
    if model.likelihood == "gaussian":
        return jnp.full((phi.shape[0], 1), 1 / model.noise_variance, phi.dtype)
    logits = phi @ model.weight.T.astype(phi.dtype)
    if model.likelihood == "bernoulli":
        return jax.nn.sigmoid(logits) * jax.nn.sigmoid(-logits)
    probabilities = jax.nn.softmax(logits, axis=-1)
    return probabilities * (1 - probabilities)
