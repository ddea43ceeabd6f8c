"""SNGP: members whose uncertainty grows with the distance from the training data.

A network with bounded spectral norms, and a Gaussian process in random features as its last layer.
"""

import math
from collections.abc import Callable
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float, Inexact

from .. import _keys
from .._boundary import array_function, kinds
from .._brief import brief_repr
from .._caller import caller
from .._check import check_word
from .._data import take_data
from .._ensemble import Ensemble, check_ensemble, check_model_state
from .._map import over_members
from .._pytree import PyTree
from ..train import Frozen
from ..train._optimiser import only_supported

__all__ = ["SNGP", "SNGPOutput", "bound_spectral_norm", "mean_field", "update_covariance"]

M = TypeVar("M")


@array_function
def mean_field(
    mean: kinds.Points, variance: kinds.VarianceOrZero, *, factor: kinds.Factor = math.pi / 8
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
    return mean / jnp.sqrt(1 + factor * variance)


class SNGPOutput(NamedTuple):
    """The prediction of an [`eqx_ensemble.methods.sngp.SNGP`][] for one row.

    **Attributes:**

    - `mean`: `(out,)`, logits of classes or means of targets.
    - `variance`: `(out,)`, the variance under the Gaussian process of the last layer, without noise; NaN before
        [`eqx_ensemble.methods.sngp.update_covariance`][].
    """

    mean: Float[Array, "*batch out"]
    variance: Float[Array, "*batch out"]

    def __repr__(self) -> str:
        return brief_repr(self)


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
    - `num_features`: $D$; the covariance takes $D^2$ numbers, for classes per logit.
    - `length_scale`: $l$, in the unit of the hidden units, which an `equinox.nn.LayerNorm` at the end fixes.
    - `ridge`: the prior precision of $\beta$.
    - `likelihood`, `noise_variance`: `"gaussian"`, which the authors also use for classes; `"bernoulli"`, of which each
        output is the logit of a label of its own; `"categorical"`.
    - `key`: the member's key, for $W$ and $b$.

    **Returns** (when called): [`eqx_ensemble.methods.sngp.SNGPOutput`][]; with a state among the inputs, also the new
    state.

    ```python
    def make(key):
        own, head = jax.random.split(key)
        network = eqx.nn.MLP(3, 16, 16, 2, key=own)
        return ee.methods.sngp.SNGP(network, 16, 2, num_features=64, key=head)


    ensemble = ee.build(make, 4, key=key)
    ensemble(jnp.ones(3)).mean.shape  # (4, 2)
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
    likelihood: str = eqx.field(static=True)
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
        likelihood: Literal["gaussian", "bernoulli", "categorical"] = "gaussian",
        noise_variance: float | int = 1.0,
        key: Any,
    ) -> None:
        check_word(likelihood, "likelihood", ("gaussian", "bernoulli", "categorical"))
        own, first, second = jax.random.split(_keys.root(key), 3)
        self.network = network
        self.weight = jax.random.normal(own, (out_size, num_features)) / num_features**0.5
        self.frequencies = Frozen(jax.random.normal(first, (num_features, in_size)) / length_scale)
        self.phases = Frozen(jax.random.uniform(second, (num_features,), maxval=2 * jnp.pi))
        self.root = Frozen(jnp.zeros((1 if likelihood == "gaussian" else out_size, num_features, num_features)))
        self.ridge, self.likelihood, self.noise_variance = float(ridge), likelihood, float(noise_variance)

    def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
        """Mean and variance of the outputs for one row; if a state is among the inputs, also the new state."""
        is_stateful = any(isinstance(x, eqx.nn.State) for x in args)
        out = self.network(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        hidden, *state = out if is_stateful else (out,)
        phi = self.features(hidden)
        root = jax.lax.stop_gradient(self.root.value).astype(phi.dtype)
        variance = jnp.where(root[:, 0, 0] == 0, jnp.nan, jnp.sum((root @ phi) ** 2, axis=-1))  # 0: not yet computed
        mean = self.weight.astype(phi.dtype) @ phi
        found = SNGPOutput(mean, jnp.broadcast_to(variance, mean.shape))
        return (found, *state) if is_stateful else found

    def features(self, hidden: Float[Array, " hidden"]) -> Float[Array, " features"]:
        """The random features of one row's hidden units."""
        dtype = hidden.dtype if jnp.issubdtype(hidden.dtype, jnp.floating) else self.weight.dtype
        frequencies, phases = (jax.lax.stop_gradient(x.value).astype(dtype) for x in (self.frequencies, self.phases))
        return (2 / phases.shape[0]) ** 0.5 * jnp.cos(frequencies @ hidden.astype(dtype) + phases)


def update_covariance(
    ensemble: Ensemble[Any], x: PyTree, *, batch_size: int | None = None, state: eqx.nn.State | None = None
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
    check_model_state(ensemble, state)
    x, num_rows = take_data(x, ensemble.num_members, argument="x")
    size = min(batch_size or ensemble.stacked.root.value.shape[-1], num_rows)
    root = _roots(ensemble, state, x, num_rows, size)
    stacked = eqx.tree_at(lambda model: model.root.value, ensemble.stacked, root)
    leaves = jax.tree.leaves(stacked, is_leaf=lambda x: x is None)
    # The initial zeros may be shared.
    axes = tuple(0 if x is root else axis for x, axis in zip(leaves, ensemble.axes, strict=True))
    return Ensemble(stacked, axes)


@eqx.filter_jit
def _roots(ensemble: Ensemble[Any], state: eqx.nn.State | None, x: PyTree, num_rows: int, size: int) -> Array:
    """The inverses of the transposed triangular factors of each member's precisions."""

    def one(model: SNGP[Any], state: eqx.nn.State | None, x: PyTree) -> Array:
        model = eqx.nn.inference_mode(model)
        hidden = model.network if state is None else lambda row: model.network(row, state)[0]
        old = model.root.value

        def update(factors: Array, rows: Array) -> tuple[Array, None]:
            batch = jax.tree.map(lambda x: x[jnp.minimum(rows, num_rows - 1)], x)
            phi = jax.vmap(lambda row: model.features(hidden(row)))(batch)
            # The last batch is padded by repeating the last row with weight zero.
            root = jnp.where((rows < num_rows)[:, None], _root_curvature(model, phi), 0)
            scaled = (root.T[:, :, None] * phi[None]).astype(old.dtype)
            return jnp.linalg.qr(jnp.concatenate([factors, scaled], axis=-2), mode="r"), None

        identity = jnp.eye(old.shape[-1], dtype=old.dtype)
        start = jnp.broadcast_to(model.ridge**0.5 * identity, old.shape)
        factors, _ = jax.lax.scan(update, start, jnp.arange(-(-num_rows // size) * size).reshape(-1, size))
        return jax.vmap(lambda factor: solve_triangular(factor, identity, trans="T"))(factors)

    return over_members(one)(ensemble, state, x)


def _root_curvature(model: SNGP[Any], phi: Float[Array, "rows features"]) -> Float[Array, "rows roots"]:
    """The root of the second derivative of the negative log-likelihood with respect to each output."""
    if model.likelihood == "gaussian":
        return jnp.full((len(phi), 1), model.noise_variance**-0.5, phi.dtype)
    logits = phi @ model.weight.astype(phi.dtype).T
    if model.likelihood == "bernoulli":
        return jnp.sqrt(jax.nn.sigmoid(logits) * jax.nn.sigmoid(-logits))
    p = jax.nn.softmax(logits)
    return jnp.sqrt(p * (1 - p))


class SpectralState(NamedTuple):
    """The state of an optimiser that bounds spectral norms: estimates of a left singular vector of each weight."""

    inner_state: PyTree
    vectors: tuple[Array, ...]


def bound_spectral_norm(
    optimiser: optax.GradientTransformation,
    bound: Any,
    *,
    where: Callable[[Any], Any] = lambda model: model.network,
    num_iterations: int = 1,
) -> optax.GradientTransformationExtraArgs:
    r"""Bounds the spectral norms of weights: after each step, $W$ becomes $W / \max(1, \sigma(W) / c)$.

    $\sigma$ is estimated from below by power iteration, so norms may exceed the bound while weights change fast. A
    kernel of a convolution is a matrix `(out, in * kernel)`. Exclude layers stacked in one array for `jax.lax.scan`
    with `where`.

    **Arguments:**

    - `optimiser`: the whole optax optimiser.
    - `bound`: $c$, above zero; the authors use 0.95 for dense layers and 6 for convolutions. It may be a
        hyperparameter.
    - `where`: selects the parts of a model whose arrays of two or more axes are bounded; by default its `network`.
    - `num_iterations`: power iterations per step.

    **Returns:** an optax optimiser.

    ```python
    optimiser = ee.methods.sngp.bound_spectral_norm(
        optax.adam(1e-3), 0.95, where=lambda model: model.layers[:-1]
    )
    ```

    ??? cite
        [Liu et al. 2020](https://arxiv.org/abs/2006.10108)
    """
    inner = optax.with_extra_args_support(optimiser)

    def matrices(params: PyTree) -> list[tuple[int, Array]]:
        """The selected weights, with their positions among the leaves."""
        leaves, treedef = jax.tree.flatten(params)
        chosen = jax.tree.leaves(where(jax.tree.unflatten(treedef, range(len(leaves)))))
        found = [(i, leaves[i]) for i in chosen if type(i) is int and leaves[i].ndim >= 2]
        if not found:
            raise ValueError(f"`{caller()}` needs `where` to select trained arrays of two or more axes, got none.")
        return found

    def init(params: PyTree) -> SpectralState:
        vectors = (_first_vector(x, number) for number, (_, x) in enumerate(matrices(params)))
        return SpectralState(inner.init(params), tuple(vectors))

    def update(updates: PyTree, state: Any, params: Any = None, **extra: Any) -> tuple[PyTree, SpectralState]:
        updates, inner_state = inner.update(updates, state.inner_state, params, **only_supported(inner.update, extra))
        changes, treedef = jax.tree.flatten(updates)
        vectors = []
        for (i, weight), u in zip(matrices(params), state.vectors, strict=True):
            new = weight + jnp.asarray(changes[i], weight.dtype)
            norm, u = _norm(new, u, num_iterations)
            ratio = jnp.maximum(1, norm / jnp.asarray(bound, norm.dtype))
            bounded = (new / ratio.astype(new.dtype)) - weight
            changes[i] = jnp.where(ratio > 1, bounded.astype(changes[i].dtype), changes[i])
            vectors.append(u)
        return jax.tree.unflatten(treedef, changes), SpectralState(inner_state, tuple(vectors))

    return optax.GradientTransformationExtraArgs(init, update)


def _first_vector(weight: Array, number: int) -> Inexact[Array, " out"]:
    """An initial vector for the power iteration: 15 iterations from a random vector."""
    dtype = jnp.float32 if jnp.finfo(weight.dtype).bits < 32 else weight.dtype
    u = jax.random.normal(jax.random.fold_in(_keys.own_key(), number), weight.shape[:1], dtype)
    return _norm(weight, u, 15)[1]


def _norm(weight: Array, u: Inexact[Array, " out"], num_iterations: int) -> tuple[Array, Inexact[Array, " out"]]:
    """The largest singular value by power iteration, and its left singular vector."""
    matrix = weight.reshape(weight.shape[0], -1).astype(u.dtype)
    unit = lambda x: x / jnp.maximum(jnp.linalg.norm(x), jnp.finfo(x.dtype).tiny)
    for _ in range(num_iterations):
        new = matrix @ unit(matrix.conj().T @ u)
        u = jnp.where(jnp.any(new != 0), unit(new), u)  # a zero vector, from zero weights, would remain zero
    return jnp.linalg.norm(matrix.conj().T @ u), u
