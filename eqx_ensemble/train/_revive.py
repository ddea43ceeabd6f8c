import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from .. import _axes, _keys, tree
from .._build import build
from .._caller import caller
from .._check import check_key, kind_text
from .._ensemble import Ensemble, M
from .._pytree import PyTree
from ..distributed import to_host
from ..tree._engine import compare_trees
from ._check import check_optimiser_kind, check_revive
from ._check_member import check_state_arrays
from ._hyper import change_hyper, filter_hyper, follow_hyper
from ._state import MemberConstants, MemberState, TrainState, check_train_state, init_all, latest_member
from ._status import Status
from ._together import bind, split_tied
from .compiled._optimiser import Optimiser, keep_noise
from .compiled._selection import Selection


def perturb(hyper: PyTree, key: Key[Array, ""]) -> PyTree:
    """Multiplies each floating-point array of a member's hyper-parameters by 0.8 or by 1.2.

    **Arguments:**

    - `hyper`: the hyper-parameters of one member.
    - `key`: draws the factors, one per array.

    **Returns:** the new hyper-parameters.

    ```python
    ee.train.perturb({"lr": jnp.float32(0.1)}, key)  # {"lr": 0.08} or {"lr": 0.12}
    ```

    ??? cite

        Jaderberg et al., *Population Based Training of Neural Networks*, arXiv:1711.09846, 2017.
    """
    leaves, treedef = jax.tree.flatten(hyper)
    factors = jnp.where(jax.random.bernoulli(key, shape=(len(leaves),)), 1.2, 0.8)
    scaled = [x * f.astype(x.dtype) if eqx.is_inexact_array(x) else x for x, f in zip(leaves, factors, strict=True)]
    return jax.tree.unflatten(treedef, scaled)


class Revive(eqx.Module):
    """Revives members that diverge: `fit(..., on_diverge=Revive(...))`.

    A member is revived right after the step at which it diverged, with the same row order and random streams.

    **Arguments:**

    - `make`: a constructor of one member, as for [`eqx_ensemble.build`][], called with a key only, for a fresh
        initialisation; the member keeps the untrained numbers of `build(zip=...)`. By default the member becomes a copy
        of a random healthy one, with its optimiser state and hyper-parameters.
    - `perturb`: `perturb(hyper, key)` changes the hyper-parameters of one revived member; by default
        [`eqx_ensemble.train.perturb`][], `None` to keep them.
    - `most`: the maximum number of revivals of a member, after which it stays frozen.

    ```python
    how = ee.train.Revive(lambda key: eqx.nn.Linear(3, 1, key=key), most=3)  # fit(..., on_diverge=how)
    ```
    """

    make: Callable[..., Any] | None = eqx.field(static=True, default=None)
    perturb: Callable[[PyTree, Any], PyTree] | None = eqx.field(
        static=True, default_factory=lambda: perturb, kw_only=True
    )
    most: int = eqx.field(static=True, default=3, kw_only=True)

    def __check_init__(self) -> None:
        check_revive(self.make, self.perturb, self.most)


class Revival(NamedTuple):
    """A member that diverged and was revived.

    **Attributes:**

    - `member`: its id.
    - `step`: the number of steps done when it was revived.
    - `donor`: the id of the member that it became a copy of; `None` for a fresh initialisation.
    """

    member: int
    step: int
    donor: int | None


def take_revived(run: Any, positions: np.ndarray) -> list[Revival]:
    """The revivals of some members."""
    return _sort_revived(run.revived, np.asarray(run.ensemble.ids)[positions])


def join_revived(runs: Sequence[Any]) -> list[Revival]:
    """The revivals of all runs, in the order of one run of all members."""
    ids = np.concatenate([np.asarray(run.ensemble.ids) for run in runs])
    return _sort_revived([revival for run in runs for revival in run.revived], ids)


def _sort_revived(revived: list[Revival], ids: np.ndarray) -> list[Revival]:
    place = {member: i for i, member in enumerate(ids.tolist())}
    chosen = [revival for revival in revived if revival.member in place]
    return sorted(chosen, key=lambda revival: (revival.step, place[revival.member]))


def renumber_revived(run: Any, ids: Mapping[int, int]) -> list[Revival]:
    """The revivals with new ids; raises for a donor that is not in the run, and so has no new id."""
    lost = [revival for revival in run.revived if revival.donor is not None and revival.donor not in ids]
    if lost:
        raise ValueError(
            f"`{caller()}` cannot renumber member {lost[0].member}, revived as a copy of member {lost[0].donor}, which "
            "is not in its run.\nKeep the ids, or take both members."
        )
    new = lambda donor: None if donor is None else ids[donor]
    return [Revival(ids[member], step, new(donor)) for member, step, donor in run.revived]


def revive(
    state: TrainState[M], optimiser: Optimiser, how: Revive | None = None, *, key: Any
) -> tuple[TrainState[M], list[Revival]]:
    """Revives the diverged members of a training state, as `fit` does; for a loop of your own.

    **Arguments:**

    - `state`: the training state.
    - `optimiser`: the optimiser passed to [`eqx_ensemble.train.init`][].
    - `how`: how members are revived, by default `Revive()`; `how.most` has no effect here.
    - `key`: draws donors, factors and fresh initialisations.

    **Returns:** the new training state, and the revived members; none if no healthy donor remains.

    ```python
    make = lambda key: eqx.nn.Linear(3, 1, key=key)
    optimiser = optax.adam(1e-2)
    state = ee.train.init(ee.build(make, 4, key=key), optimiser, key=key)
    state, revived = ee.train.revive(state, optimiser, ee.train.Revive(make), key=key)
    revived  # [], because no member diverged
    ```
    """
    check_train_state(state)
    check_state_arrays(state)
    check_optimiser_kind(optimiser, together=True)
    check_key(key)
    if not isinstance(how, Revive | None):
        raise TypeError(f"`train.revive` needs `how` to be a `Revive`, got {kind_text(how)}.")
    lost = np.flatnonzero(to_host(state.moving.status) == Status.DIVERGED)
    if len(lost) == 0:
        return state, []
    how, times = Revive() if how is None else how, np.full(len(lost), int(state.step))
    moving, fixed, revived = revive_members(state, optimiser, how, lost, times, key=key)
    return TrainState(moving, fixed, state.shared, state.ids, state.step), revived


def revive_members(
    state: TrainState, optimiser: Optimiser, how: Revive, lost: np.ndarray, times: np.ndarray, *, key: Any
) -> tuple[MemberState, MemberConstants, list[Revival]]:
    """Revives the members at the indices `lost`; `times` makes the random keys of a member's revivals distinct."""
    ids = to_host(state.ids)
    keys = _own_keys(_keys.root(key), ids[lost], times)
    optimiser = bind(optimiser, state.fixed.tied)
    names, step = ids.tolist(), int(state.step)
    if how.make is not None:
        moving, fixed = _from_scratch(state, optimiser, how, how.make, lost, keys)
        return *_follow(state, moving, fixed, optimiser), [Revival(names[i], step, None) for i in lost.tolist()]
    healthy = np.flatnonzero(to_host(state.moving.status) == Status.OK)
    if len(healthy) == 0:
        return state.moving, state.fixed, []
    donors = healthy[np.asarray(jax.vmap(lambda key: jax.random.randint(key, (), 0, len(healthy)))(keys))]
    moving, fixed = _from_donors(state, how, lost, donors, keys)
    revived = [Revival(names[i], step, names[j]) for i, j in zip(lost.tolist(), donors, strict=True)]
    return *_follow(state, moving, fixed, optimiser), revived


def _follow(
    state: TrainState, moving: MemberState, fixed: MemberConstants, optimiser: Optimiser
) -> tuple[MemberState, MemberConstants]:
    after = follow_hyper(TrainState(moving, fixed, state.shared, state.ids, state.step), optimiser)
    return after.moving, after.fixed


def _from_donors(
    state: TrainState, how: Revive, lost: np.ndarray, donors: np.ndarray, keys: Key[Array, " lost"]
) -> tuple[MemberState, MemberConstants]:
    sources = np.arange(state.num_members)
    sources[lost] = donors
    moving, fixed = copy_donors(state.moving, state.fixed, sources)
    return moving, dataclasses.replace(fixed, hyper=_perturb(fixed.hyper, how, lost, keys))


def restart(
    moving: MemberState, selection: Selection | None, tied: tuple[bool, ...]
) -> tuple[MemberState, Selection | None]:
    """Forgets why members stopped whose status was set to `OK`, for example by `equinox.tree_at`."""
    status, stopped_at, fault = to_host((moving.status, moving.stopped_at, moving.fault))
    members = np.flatnonzero((status == Status.OK) & ((stopped_at >= 0) | (fault >= 0)))
    if len(members) == 0:
        return moving, selection
    if selection is not None:
        selection = dataclasses.replace(selection, waited=selection.waited.at[members].set(0))
    params, opt_state = _with_shared(moving, moving.params, moving.opt_state, members, tied)
    return _mark_training(moving, (params, opt_state, moving.model_state), members), selection


def _with_shared(
    moving: MemberState, params: PyTree, opt_state: PyTree, members: np.ndarray, tied: tuple[bool, ...]
) -> tuple[PyTree, PyTree]:
    """Parameters and optimiser states in which `members` have what is trained together as it is now."""
    if not tied:
        return params, opt_state
    source = latest_member(moving)
    own, copies = split_tied(params, tied)
    copies, of_shared = jax.tree.map(lambda x: x.at[members].set(x[source]), (copies, opt_state.shared))
    return eqx.combine(own, copies), opt_state._replace(shared=of_shared)


def copy_donors(moving: MemberState, fixed: MemberConstants, donors: np.ndarray) -> tuple[MemberState, MemberConstants]:
    """Copies every member from its donor `(members,)`, itself or another, but keeps its noise keys and random stream.

    Members copied from another are marked as training.
    """
    params, opt_state, model_state = tree.take((moving.params, moving.opt_state, moving.model_state), donors)
    opt_state, copied = keep_noise(opt_state, moving.opt_state), np.flatnonzero(donors != np.arange(len(donors)))
    fixed = dataclasses.replace(tree.take(fixed, donors), key=fixed.key)
    return _mark_training(moving, (params, opt_state, model_state), copied), fixed


def _from_scratch(
    state: TrainState,
    optimiser: Optimiser,
    how: Revive,
    make: Callable[..., Any],
    lost: np.ndarray,
    keys: Key[Array, " lost"],
) -> tuple[MemberState, MemberConstants]:
    moving, fixed = state.moving, state.fixed
    made = build(make, keys=keys)
    new, model_state = made if isinstance(made, tuple) else (made, None)
    before = state.ensemble[lost]
    own = _with_numbers_of(before, new)
    compare_trees([before[0], own[0]])
    params = _as_in(moving.params, new, len(lost))
    frozen = _as_in(fixed.frozen, own, len(lost))
    hyper = _perturb(fixed.hyper, how, lost, keys)
    opt_state, is_used = init_all(optimiser, params, jax.tree.map(lambda x: x[lost], hyper), state.ids[lost])
    put = lambda old, new: jnp.asarray(old).at[lost].set(new) if _axes.is_array(old) else old
    opt_hyper = jax.tree.map(lambda x: x[lost], filter_hyper(hyper, is_used))
    params, opt_state, model_state, frozen, opt_hyper = jax.tree.map(
        put,
        (moving.params, moving.opt_state, moving.model_state, fixed.frozen, fixed.opt_hyper),
        (params, opt_state, model_state, frozen, opt_hyper),
    )
    fixed = MemberConstants(frozen, fixed.key, hyper, opt_hyper, fixed.tied)
    params, opt_state = _with_shared(moving, params, opt_state, lost, fixed.tied)
    return _mark_training(moving, (params, opt_state, model_state), lost), fixed


def _with_numbers_of(before: Ensemble, new: Ensemble) -> Ensemble:
    """New members with the numbers of `build(zip=...)` from the members `before`, since `make` gets only a key.

    Models of another structure are returned unchanged.
    """
    is_none = lambda x: x is None
    if jax.tree.structure(before.stacked, is_leaf=is_none) != jax.tree.structure(new.stacked, is_leaf=is_none):
        return new

    def own(x: Any, mark: Any, y: Any, number: Any) -> Any:
        return x if x is not None and type(mark) is float and y is None and type(number) is float else y

    stacked = jax.tree.map(own, before.stacked, before.shared, new.stacked, new.shared, is_leaf=is_none)
    return Ensemble(stacked, new.shared, new.ids)


def _as_in(kept: PyTree, members: Ensemble, count: int) -> PyTree:
    """The leaves of `members` where `kept` has one; a Python float is broadcast to all `count` members."""

    def of_all(x: Any, y: Any) -> Any:
        return None if x is None else jnp.full(count, y, x.dtype) if type(y) is float and _axes.is_array(x) else y

    whole = eqx.combine(members.stacked, members.shared)
    return jax.tree.map(of_all, kept, whole, is_leaf=lambda x: x is None)


def _mark_training(moving: MemberState, trained: tuple[PyTree, PyTree, PyTree], members: np.ndarray) -> MemberState:
    """The members with new weights and states, those of `members` as if they had never stopped or diverged."""
    status = moving.status.at[members].set(jnp.int8(Status.OK))
    return MemberState(*trained, status, moving.stopped_at.at[members].set(-1), moving.fault.at[members].set(-1))


def _perturb(hyper: PyTree, how: Revive, lost: np.ndarray, keys: Key[Array, " lost"]) -> PyTree:
    if hyper is None or how.perturb is None:
        return hyper
    keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, 1)
    return change_hyper(hyper, how.perturb, lost, keys)


def _own_keys(key: Key[Array, ""], ids: np.ndarray, times: np.ndarray) -> Key[Array, " lost"]:
    own = lambda i, n: jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, _keys.tag("revive")), i), n)
    return jax.vmap(own)(jnp.asarray(ids), jnp.asarray(times))
