"""Shared parameters that all members train together."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from .._caller import caller
from .._check import array_leaves
from .._ensemble import Ensemble, M
from .._pytree import PyTree
from ._trainable import Trainable, partition_trainable


@dataclasses.dataclass(frozen=True)
class Together:
    """An optimiser that also trains shared parameters, by the mean of the members' losses.

    In place of an optimiser in [`eqx_ensemble.fit`][], [`eqx_ensemble.train.init`][] and
    [`eqx_ensemble.train.make_step`][]. A step descends each member's own loss over its own parameters, and the mean
    loss of all members over the floating-point arrays that they share, such as a trunk with a head for each member. A
    penalty of shared parameters in the loss counts once.

    Members are then NOT independent: what one of them sees changes the others. A member whose loss or gradient is not
    finite has no part in the mean. Best weights, `patience` and a target follow the mean of the validation scores, so
    that all members stop together; `run.best_score` is each member's own. If a member stops for another reason, the
    shared parameters move on without it.

    `state.params` and checkpoints hold an equal copy of the shared parameters for every member; `state.ensemble` and
    `run.ensemble` have them once. All members must run at once: with [`eqx_ensemble.plan.Vmap`][], on one device or a
    mesh.

    **Arguments:**

    - `optimiser`: the optimiser of each member's own parameters, or a function of its hyper-parameters that returns
        one.
    - `shared`: the optax optimiser of the shared parameters. It cannot evaluate the loss, as line searches do.

    **Raises:** where it is used, `ValueError` if the ensemble shares no floating-point array or for another plan.

    ```python
    class Bounded(eqx.Module):
        mlp: eqx.nn.MLP
        lower: jax.Array

        def __call__(self, x):
            mean, log_var = self.mlp(x)
            return mean, self.lower + jax.nn.softplus(log_var - self.lower)

    def nll(model, batch, key):
        mean, log_var = jax.vmap(model)(batch[0])
        return jnp.mean((mean - batch[1]) ** 2 * jnp.exp(-log_var) + log_var) - 0.01 * model.lower

    make = lambda key: Bounded(eqx.nn.MLP(3, 2, 8, 1, key=key), jnp.array(-5.0))
    ensemble = ee.build(make, 4, shared=lambda model: model.lower, key=key)
    optimiser = ee.train.Together(optax.adam(1e-3), shared=optax.adam(1e-2))
    run = ee.fit(ensemble, nll, optimiser, (jnp.ones((64, 3)), jnp.ones(64)), epochs=2, key=key)
    run.ensemble.shared.lower.shape  # ()
    ```

    ??? cite

        Chua, Calandra, McAllister and Levine, "Deep Reinforcement Learning in a Handful of Trials using Probabilistic
        Dynamics Models" (NeurIPS 2018), whose bounds of log-variances are trained in this way.
    """

    optimiser: optax.GradientTransformation | Callable[[Any], optax.GradientTransformation]
    shared: optax.GradientTransformation = dataclasses.field(kw_only=True)
    # Which trained leaves of a member are shared; known once a training state is.
    tied: tuple[bool, ...] = dataclasses.field(default=(), init=False, repr=False)


class TogetherState(NamedTuple):
    """The optimiser states of a member's own and of the shared parameters."""

    own: Any
    shared: Any


def split_tied(params: PyTree, tied: tuple[bool, ...]) -> tuple[PyTree, PyTree]:
    """The members' own and the shared leaves of a tree like the trained parameters."""
    return eqx.partition(params, jax.tree.unflatten(jax.tree.structure(params), [not is_tied for is_tied in tied]))


def bind(optimiser: Any, tied: tuple[bool, ...]) -> Any:
    """An optimiser that knows which trained leaves are shared."""
    if isinstance(optimiser, Together) != bool(tied):
        with_it, without = "shared parameters that are trained together", "members that are trained alone"
        raise TypeError(
            f"`{caller()}` got a training state of {with_it if tied else without}, and an optimiser of "
            f"{without if tied else with_it}.\nPass the optimiser of `train.init`."
        )
    if not tied:
        return optimiser
    bound = copy.copy(optimiser)
    object.__setattr__(bound, "tied", tied)  # which is no argument of users
    return bound


def spread(ensemble: Ensemble[M], trainable: Trainable) -> tuple[PyTree, PyTree, PyTree, tuple[bool, ...]]:
    """Splits an ensemble into trained, frozen and shared leaves, the trained ones with a copy of each shared one.

    **Returns:** those, and which trained leaves are copies.
    """
    is_none = lambda x: x is None
    floats, rest = eqx.partition(ensemble.shared, eqx.is_inexact_array)
    copies = jax.tree.map(lambda x: jnp.broadcast_to(x, (ensemble.num_members, *x.shape)), floats)
    wide = Ensemble(eqx.combine(ensemble.stacked, copies), rest, ensemble.ids)
    params, frozen = partition_trainable(wide, trainable)
    put_back = lambda x, kept: None if x is None or kept is not None else x
    shared = eqx.combine(rest, jax.tree.map(put_back, floats, params, is_leaf=is_none))
    frozen = jax.tree.map(lambda x, shared: None if shared is not None else x, frozen, floats, is_leaf=is_none)
    pairs = zip(jax.tree.leaves(params, is_leaf=is_none), jax.tree.leaves(floats, is_leaf=is_none), strict=True)
    tied = tuple(shared is not None for x, shared in pairs if x is not None)
    if not any(tied):
        arrays = [path for path, _ in array_leaves(ensemble.shared)]
        got = f"none of its shared arrays is: {', '.join(f'`{path}`' for path in arrays)}" if arrays else "it has none"
        raise ValueError(
            f"`{caller()}` needs shared floating-point arrays that `trainable` selects, because of `train.Together`; "
            f"{got}.\nSelect them where the ensemble is made: `build(make, n, shared=lambda model: model.bounds)`."
        )
    return params, frozen, shared, tied


def mean_of_members(tree: PyTree, chosen: Bool[Array, ""], axes: tuple[str, ...]) -> PyTree:
    """The mean over the chosen members on the mapped `axes`, the same for all; zeros if there is none."""
    count = jax.lax.psum(chosen.astype(jnp.int32), axes)
    mean = lambda x: jax.lax.psum(jnp.where(chosen, x, 0), axes) / jnp.maximum(count, 1).astype(x.real.dtype)
    return jax.tree.map(mean, tree)


def of_first_member(tree: PyTree, chosen: Bool[Array, ""], axes: tuple[str, ...]) -> PyTree:
    """The values of the first chosen member for all; compilers may round those of each member differently."""
    index = jax.lax.axis_index(axes)
    first = jax.lax.pmin(jnp.where(chosen, index, jnp.iinfo(index.dtype).max), axes)
    return jax.tree.map(lambda x: jax.lax.psum(jnp.where(index == first, x, 0), axes), tree)
