"""Priors over functions and weights, and noise in targets, by which members approximate draws from a posterior."""

from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float

from .._caller import caller
from .._check import MemberMismatchError
from .._ensemble import Ensemble, check_ensemble
from .._foreign import from_foreign
from .._keys import member_keys
from .._marks import Each
from .._pytree import PyTree
from ..train import Frozen
from ..train._state import Trainable, trained_leaves

__all__ = ["Anchor", "RandomisedPrior", "draw_anchors", "gaussian_penalty", "noisy_targets"]

M = TypeVar("M")

_is_none = lambda x: x is None


def noisy_targets(targets: Any, num_members: int, *, std: Any, key: Any) -> Each:
    """Adds Gaussian noise to the targets, drawn once per member and row.

    A member gets the same noisy target for a row in every epoch; noise that is redrawn in every step would average out.

    **Arguments:**

    - `targets`: `(rows, ...)`, floating-point, shared by all members.
    - `num_members`: the number of members.
    - `std`: one number, or an array of the shape of `targets`. For posterior draws it is that of the noise in the
        targets.
    - `key`: one key, or one per member `(members,)`.

    **Returns:** an [`eqx_ensemble.Each`][] `(members, rows, ...)` for the data of [`eqx_ensemble.fit`][].

    ```python
    x, y = jnp.ones((100, 3)), jnp.zeros((100, 1))
    targets = ee.methods.priors.noisy_targets(y, 4, std=0.1, key=key)
    targets.value.shape  # (4, 100, 1)
    # for `fit(ensemble, loss, optimiser, (x, targets), ...)`
    ```

    ??? cite
        [Osband et al. 2018](https://arxiv.org/abs/1806.03335), section 3
    """
    targets = jnp.asarray(from_foreign(targets, "targets"))
    keys = member_keys(key, num_members, purpose="noise in targets")
    std = jnp.broadcast_to(jnp.asarray(std, targets.dtype), targets.shape)
    return Each(_add_noise(targets, std, keys))


@jax.jit
def _add_noise(targets: Array, std: Array, keys: Array) -> Array:
    # By row, so that more rows leave the noise of the first ones as it is.
    draw = lambda key, row: jax.random.normal(jax.random.fold_in(key, row), targets.shape[1:], targets.dtype)
    rows = jnp.arange(len(targets))
    of_member = lambda key: targets + std * jax.vmap(draw, in_axes=(None, 0))(key, rows)
    return jax.vmap(of_member)(keys)


def gaussian_penalty(model: PyTree, std: Any = 1.0, *, num_rows: Any) -> Float[Array, ""]:
    r"""The negative log-density of a Gaussian prior over one member's weights, per row: the prior term of a mean loss.

    $\frac{1}{N} \sum_j w_j^2 / (2 \sigma_j^2)$ over all floating-point leaves that are not
    [`eqx_ensemble.train.Frozen`][], up to a constant, in nats. Add it to a **mean** over rows of negative
    log-likelihoods. AdamW's weight decay is not this prior.

    **Arguments:**

    - `model`: the model of one member, as the loss receives it.
    - `std`: $\sigma$, one number, or a function of a leaf that returns one.
    - `num_rows`: $N$, the number of all training rows of the member, not of a batch.

    **Returns:** a scalar, at least float32.

    ```python
    model = eqx.nn.Linear(3, 1, key=key)
    prior = ee.methods.priors.gaussian_penalty
    prior(model, lambda leaf: 1 / np.sqrt(leaf.shape[-1]), num_rows=100)
    ```
    """
    if isinstance(model, Ensemble):
        raise TypeError(f"`{caller()}` needs the model of one member, got an `Ensemble`.\nCall it inside the loss.")
    found = jax.tree.leaves(model, is_leaf=lambda node: isinstance(node, Frozen))
    weights = [x for x in found if eqx.is_inexact_array(x)]
    return _penalty([(x, std(x) if callable(std) else std) for x in weights], num_rows)


def _penalty(deviations: list[tuple[Array, Any]], num_rows: Any) -> Float[Array, ""]:
    """Half the sum of squared deviations in units of their standard deviations, over the number of rows."""
    terms = []
    for x, std in deviations:
        x = x.astype(_at_least_single(x.dtype))
        terms.append(jnp.sum((x / jnp.asarray(std, x.dtype)) ** 2) / 2)
    widest = max((term.dtype for term in terms), key=lambda dtype: dtype.itemsize)
    total = jnp.sum(jnp.stack([term.astype(widest) for term in terms]))
    return total / jnp.asarray(num_rows).astype(widest)


def _at_least_single(dtype: Any) -> Any:
    """The dtype to compute in, at least float32; explicit, because dtype promotion may be strict."""
    return dtype if dtype.itemsize >= 4 else jnp.dtype(jnp.float32)


class RandomisedPrior(eqx.Module, Generic[M]):
    r"""A member with a randomised prior function: a trained network plus a fixed random network.

    The output is $f(x) + \beta p(x)$. Near the data $f$ compensates for $p$; far from them members differ like their
    priors. Prior and scale are [`eqx_ensemble.train.Frozen`][]. Near the data it matters only with weight decay or
    early stopping.

    **Arguments:**

    - `network`: the trained network.
    - `prior`: a network whose outputs have the same shapes. It is called in inference mode with positional inputs only.
    - `scale`: $\beta$, one number, or an array of one member: `build(zip={"scale": ...})` gives each its own.

    ```python
    def make(key):
        network, prior = (
            eqx.nn.MLP(3, 1, 16, 2, key=key) for key in jax.random.split(key)
        )
        return ee.methods.priors.RandomisedPrior(network, prior, scale=3.0)


    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)


    ensemble = ee.build(make, 4, key=key)
    data = (jnp.ones((100, 3)), jnp.zeros((100, 1)))
    run = ee.fit(ensemble, loss, optax.adamw(1e-3), data, epochs=2, key=key)
    ```

    ??? cite
        [Osband et al. 2018](https://arxiv.org/abs/1806.03335)
    """

    network: M
    prior: Frozen[Any]
    scale: Frozen[Any]

    def __init__(self, network: M, prior: Any, *, scale: Any = 1.0) -> None:
        self.network = network
        self.prior = prior if isinstance(prior, Frozen) else Frozen(prior)
        self.scale = Frozen(jnp.asarray(scale, jnp.result_type(float)))

    def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
        """The network's output plus the scaled prior; if a state is among the inputs, also the new state."""
        is_state = lambda x: isinstance(x, eqx.nn.State)
        out = self.network(*args, **kwargs)  # pyright: ignore[reportCallIssue]
        out, *state = out if any(map(is_state, args)) else (out,)
        prior = eqx.nn.inference_mode(self.prior)(*(x for x in args if not is_state(x)))
        scale = jax.lax.stop_gradient(self.scale.value)

        add = lambda f, p: f + (scale.astype(p.dtype) * p).astype(f.dtype)
        total = jax.tree.map(add, out, prior)
        return (total, *state) if state else total


class Anchor(eqx.Module):
    r"""A draw from the prior over a member's weights, towards which its weights are regularised.

    Pass the anchors of [`eqx_ensemble.methods.priors.draw_anchors`][] as hyperparameters to [`eqx_ensemble.fit`][]; a
    loss with a parameter `hyper` receives the anchor of its member.

    **Attributes:**

    - `weights`: the draw $w_0$ for each trained leaf; `None` for other leaves.
    - `std`: the standard deviation $\sigma$ of the prior, one number per trained leaf.
    """

    weights: PyTree
    std: PyTree

    def penalty(self, model: PyTree, *, num_rows: Any) -> Float[Array, ""]:
        r"""The penalty $\frac{1}{N} \sum_j (w_j - w_{0j})^2 / (2 \sigma_j^2)$ of one member, in nats per row.

        Add it to a **mean** over rows of negative log-likelihoods. A mean squared error lacks the factor $1 / (2 s^2)$
        of the noise: multiply the penalty by $2 s^2$.

        **Arguments:**

        - `model`: the model of one member, as the loss receives it.
        - `num_rows`: $N$, the number of all training rows of the member, not of a batch.

        **Returns:** a scalar, at least float32.
        """
        anchors = jax.tree.leaves(self.weights, is_leaf=_is_none)
        kept = [(w, a) for w, a in zip(jax.tree.leaves(model, is_leaf=_is_none), anchors, strict=True) if a is not None]
        for w, a in kept:
            if w.shape != a.shape:
                raise MemberMismatchError(
                    f"`methods.priors.Anchor.penalty` needs one member's model and anchor; got {w.shape} and "
                    f"{a.shape}.\nPass the model and the `hyper` that the loss receives."
                )
        wide = lambda x: x.astype(_at_least_single(x.dtype))
        return _penalty(
            [(wide(w) - wide(a), std) for (w, a), std in zip(kept, jax.tree.leaves(self.std), strict=True)], num_rows
        )


def draw_anchors(
    ensemble: Ensemble[Any], std: PyTree = 1.0, *, trainable: Trainable = eqx.is_inexact_array, key: Any
) -> Anchor:
    """Draws an anchor for each member from a Gaussian prior over the weights, with mean 0.

    With [`eqx_ensemble.methods.priors.Anchor.penalty`][] and [noisy
    targets][eqx_ensemble.methods.priors.noisy_targets], members of a linear model are exact draws from the posterior,
    networks approximate ones.

    **Arguments:**

    - `ensemble`: the ensemble to be trained.
    - `std`: the standard deviation of the prior: a number, a function of a leaf of one member (a
        `jax.ShapeDtypeStruct`), or a tree of either that is a prefix of a member's tree.
    - `trainable`: the leaves with an anchor; the same as for [`eqx_ensemble.fit`][].
    - `key`: one key, or one per member `(members,)`.

    **Returns:** the anchors of all members, each leaf `(members, ...)`.

    ```python
    x, y, noise = jnp.ones((100, 3)), jnp.zeros((100, 1)), 0.1
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 16, 2, key=key), 4, key=key)
    anchors = ee.methods.priors.draw_anchors(
        ensemble, lambda leaf: 1 / np.sqrt(leaf.shape[-1]), key=key
    )
    targets = ee.methods.priors.noisy_targets(y, 4, std=noise, key=key)


    def loss(model, batch, key, hyper):
        x, y = batch
        nll = jnp.mean((jax.vmap(model)(x) - y) ** 2) / (2 * noise**2)
        return nll + hyper["anchor"].penalty(model, num_rows=100)


    run = ee.fit(
        ensemble,
        loss,
        optax.adam(1e-3),
        (x, targets),
        hyper={"anchor": anchors},
        epochs=2,
        key=key,
    )
    ```

    ??? cite
        [Pearce et al. 2020](https://arxiv.org/abs/1810.05546)
    """
    check_ensemble(ensemble)
    keys = member_keys(key, ensemble.num_members, purpose="anchor")
    trained = trained_leaves(ensemble, trainable, together=False)
    leaves, treedef = jax.tree.flatten(ensemble.stacked, is_leaf=_is_none)
    params = jax.tree.unflatten(treedef, [x if own else None for x, own in zip(leaves, trained, strict=True)])
    stds = _std_of_leaves(std, params)
    leaves, treedef = jax.tree.flatten(params)
    drawn, widths = [], []
    for i, (leaf, scale) in enumerate(zip(leaves, stds, strict=True)):
        one = lambda key, i=i, leaf=leaf: jax.random.normal(jax.random.fold_in(key, i), leaf.shape[1:], leaf.dtype)
        drawn.append(jnp.asarray(scale, leaf.dtype) * jax.vmap(one)(keys))
        widths.append(jnp.full(len(ensemble), scale, _at_least_single(leaf.dtype)))
    return Anchor(jax.tree.unflatten(treedef, drawn), jax.tree.unflatten(treedef, widths))


def _std_of_leaves(std: PyTree, params: PyTree) -> list[Any]:
    """The standard deviation of every trained leaf, from a prefix of a member's tree."""
    given: list[Any] = []
    jtu.tree_map(lambda own, part: given.extend([own] * len(jax.tree.leaves(part))), std, params)
    one = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    return [own(one(x)) if callable(own) else own for own, x in zip(given, jax.tree.leaves(params), strict=True)]
