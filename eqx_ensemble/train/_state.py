from typing import Any, Generic, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8, Key

from .._check import MemberMismatchError, array_leaves, is_key
from .._ensemble import Ensemble, M
from .._foreign import from_foreign_tree
from .._keys import member_keys
from .._marks import Each, Shared
from .._members import check_ensemble, check_model_state, split, take
from .._pytree import PyTree
from ._optimiser import Optimiser, Together, first_state
from ._status import Status, allow_nan
from ._trainable import Trainable, trained_leaves

_is_none = lambda x: x is None


class TrainState(eqx.Module, Generic[M]):
    """The training state of all members. Every array but those of shared leaves has the leading `members` axis.

    To replace a part: `equinox.tree_at(lambda state: state.hyper, state, new)`. `state[index]` is a smaller state,
    which trains on as within the whole, and [`eqx_ensemble.concatenate`][] joins states.

    **Attributes:**

    - `ensemble`: the ensemble with its current weights.
    - `opt_state`: the optimisers' states.
    - `model_state`: the stacked `equinox.nn.State` of stateful members, or `None`.
    - `keys`: one key per member, from which all its random numbers in training follow.
    - `hyper`: the hyper-parameters, or `None`.
    - `step`: the steps that each member has been trained; one that has stopped stays where it is.
    - `status`: int8, each an [`eqx_ensemble.train.Status`][].
    - `loss`: the mean training loss of the last epoch, NaN before.
    - `score`: the last validation score, NaN before.
    - `best`: the best weights and states of models by validation score, or `None`; `best_score`, `best_step` and
        `waited`, the validations since then.
    - `trained`: which leaves of the ensemble are trained.
    """

    ensemble: Ensemble[M]
    opt_state: PyTree
    model_state: PyTree
    keys: Key[Array, "*members"]
    hyper: PyTree
    step: Int[Array, "*members"]
    status: Int8[Array, "*members"]
    loss: Float[Array, "*members"]
    score: Float[Array, "*members"]
    best: PyTree
    best_score: Float[Array, "*members"]
    best_step: Int[Array, "*members"]
    waited: Int[Array, "*members"]
    together: Shared | None = None  # of `Together`: the state of its shared optimiser, and the best shared weights
    trained: tuple[bool, ...] = eqx.field(static=True, kw_only=True)

    @property
    def num_members(self) -> int:
        """The number of members."""
        return self.status.shape[0]

    @property
    def stopped_at(self) -> Int[Array, "*members"]:
        """The step at which each member stopped or diverged; -1 for members that train."""
        return jnp.where(self.status == Status.OK, -1, self.step)

    @property
    def params(self) -> M:
        """The trained weights; `None` where a leaf is not trained."""
        return weights_of(self).own

    def __getitem__(self, index: Any) -> "TrainState[M]":
        return take(self, [index] if isinstance(index, int) else index)

    def stop(self, where: Any = ...) -> "TrainState[M]":
        """The state in which the members `where` `(members,)`, or all, have stopped: for callbacks."""
        where = jnp.asarray(True if where is ... else where)  # noqa: FBT003
        stopped = jnp.where(where & (self.status == Status.OK), jnp.int8(Status.STOPPED), self.status)
        return eqx.tree_at(lambda state: state.status, self, stopped)

    def __pdoc__(self, **_: Any) -> Any:
        from wadler_lindig import TextDoc

        return TextDoc(f"TrainState[{type(self.ensemble.stacked).__name__}](num_members={self.status.shape[:1]})")


class Weights(NamedTuple):
    """The leaves of a model: trained ones of the member, trained ones that all members share, and all others."""

    own: PyTree
    common: PyTree
    fixed: PyTree


def weights_of(state: TrainState) -> Weights:
    """Splits the model of a state, of one member or of all."""
    leaves, treedef = jax.tree.flatten(state.ensemble.stacked, is_leaf=_is_none)
    rows = list(zip(leaves, state.trained, state.ensemble.axes, strict=True))
    parts = (
        [x if trained and axis == 0 else None for x, trained, axis in rows],
        [x if trained and axis is None else None for x, trained, axis in rows],
        [x if not trained else None for x, trained, _ in rows],
    )
    return Weights(*(jax.tree.unflatten(treedef, part) for part in parts))


def with_weights(state: TrainState, own: PyTree, common: PyTree) -> TrainState:
    """The state with new trained weights."""
    model = eqx.combine(own, common, weights_of(state).fixed)
    return eqx.tree_at(lambda state: state.ensemble.stacked, state, model)


@allow_nan()
def init(
    ensemble: Ensemble[M],
    optimiser: Optimiser,
    *,
    state: eqx.nn.State | None = None,
    hyper: PyTree = None,
    trainable: Trainable = eqx.is_inexact_array,
    key: Any,
) -> TrainState[M]:
    """The first training state of an ensemble, for [`eqx_ensemble.train.make_step`][].

    **Arguments:**

    - `ensemble`: the ensemble.
    - `optimiser`: an optax optimiser of one member; with `hyper` a function of a member's hyper-parameters that returns
        one; or [`eqx_ensemble.train.Together`][].
    - `state`: the stacked `equinox.nn.State` of stateful members.
    - `hyper`: hyper-parameters, a PyTree of arrays `(members, ...)`.
    - `trainable`: which leaves are trained: a function of a leaf, or a prefix tree of booleans and functions, as in
        `equinox.partition`. Shared leaves and those in [`eqx_ensemble.train.Frozen`][] never are.
    - `key`: one key, or one per member `(members,)`.

    **Returns:** the training state.

    **Raises:** `TypeError` or `MemberMismatchError` for arguments that do not fit the ensemble.
    """
    check_ensemble(ensemble)
    num_members = ensemble.num_members
    check_model_state(ensemble, state)
    trained = trained_leaves(ensemble, trainable, together=isinstance(optimiser, Together))
    keys = member_keys(key, num_members, purpose="fit")
    return begin((ensemble, state, hyper_arrays(hyper, num_members), keys), optimiser, trained)


@eqx.filter_jit
def begin(start: tuple, optimiser: Optimiser, trained: tuple[bool, ...]) -> TrainState:
    """The first training state, in one program."""
    ensemble, model_state, hyper, keys = start
    num_members = ensemble.num_members
    full = lambda value, dtype: jnp.full((num_members,), value, dtype)
    number = jnp.result_type(float)
    state = TrainState(
        ensemble, None, model_state, keys, hyper, full(0, jnp.int32), full(Status.OK, jnp.int8),
        full(jnp.nan, number), full(jnp.nan, number), None, full(jnp.nan, number), full(-1, jnp.int32),
        full(0, jnp.int32), trained=trained,
    )  # fmt: skip
    own, common, _ = weights_of(state)
    alone = optimiser.optimiser if isinstance(optimiser, Together) else optimiser
    opt_state = eqx.filter_vmap(lambda *args: first_state(alone, *args))(own, hyper, keys)
    state = eqx.tree_at(lambda state: state.opt_state, state, opt_state, is_leaf=_is_none)
    if isinstance(optimiser, Together):
        shared = Shared((first_state(optimiser.shared, common, None, None), None))
        state = eqx.tree_at(lambda state: state.together, state, shared, is_leaf=_is_none)
    return jax.tree.map(lambda x: jnp.asarray(x, x.dtype) if eqx.is_array(x) and not is_key(x) else x, state)


def with_best(state: TrainState, mode: str) -> TrainState:
    """The state with its current weights as the best ones, of no score, unless it has some."""
    if state.best is not None:
        return state
    weights = weights_of(state)
    worst = jnp.full_like(state.best_score, jnp.inf if mode == "min" else -jnp.inf)
    # Copies: an array can be donated only once.
    best = jax.tree.map(jnp.copy, (weights.own, state.model_state))
    state = eqx.tree_at(lambda s: (s.best, s.best_score), state, (best, worst), is_leaf=_is_none)
    if state.together is None:
        return state
    shared = Shared((state.together.value[0], jax.tree.map(jnp.copy, weights.common)))
    return eqx.tree_at(lambda s: s.together, state, shared)


class Pieces(NamedTuple):
    """A training state in its arrays of members, those that they train together, and everything else."""

    moving: PyTree
    common: PyTree
    rest: PyTree


def pieces_of(state: TrainState) -> Pieces:
    """Splits a training state of all members."""
    moving, other = split(state)
    common = jax.tree.map(lambda _: None, state)
    if state.together is None:
        return Pieces(moving, common, other)
    where = lambda s: (s.ensemble.stacked, s.together)
    common = eqx.tree_at(where, common, (weights_of(state).common, state.together), is_leaf=_is_none)
    rest = jax.tree.map(lambda x, y: x if y is None else None, other, common, is_leaf=_is_none)
    return Pieces(moving, common, rest)


def hyper_arrays(hyper: PyTree, num_members: int) -> PyTree:
    """Hyper-parameters as arrays `(members, ...)`; raises for another number of members."""
    hyper = from_foreign_tree(hyper, "hyper")
    if isinstance(hyper, Each):
        hyper = hyper.value
    is_values = lambda x: isinstance(x, list | tuple) and all(isinstance(v, int | float) for v in x)
    as_array = lambda x: jnp.asarray(jnp.asarray(x), jnp.asarray(x).dtype)
    hyper = jax.tree.map(as_array, hyper, is_leaf=is_values)
    for path, x in array_leaves(hyper):
        if x.shape[:1] != (num_members,):
            raise MemberMismatchError(
                f"`hyper` needs one value per member at `{path}`: expected ({num_members}, ...), got {x.shape}.\n"
                "A value for all members is an ordinary argument of the optimiser or a constant of the loss."
            )
    return hyper
