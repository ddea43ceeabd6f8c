import contextlib
import dataclasses
import enum
from collections.abc import Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int8, Key

from .._brief import known_values
from .._ensemble import Ensemble, M, split_own, take
from .._marks import Shared
from .._pytree import PyTree
from ..tree._engine import check_index


class Status(enum.IntEnum):
    """The status of a member. Arrays of statuses are int8.

    - `OK`: the member is training, or trained to the end.
    - `STOPPED`: `patience`, `stop` or a callback stopped it.
    - `DIVERGED`: its loss or weights were not finite at the end of an epoch. It keeps those of the epoch's start.
    """

    OK = 0
    STOPPED = 1
    DIVERGED = 2

    def __str__(self) -> str:
        return self.name.lower()


@contextlib.contextmanager
def allow_nan() -> Iterator[None]:
    """Disables `jax_debug_nans` and `jax_debug_infs`: a NaN affects one member only, and others report NaN."""
    if not (jax.config.jax_debug_nans or jax.config.jax_debug_infs):
        yield
        return
    with jax.debug_nans(False), jax.debug_infs(False):  # noqa: FBT003 (their one argument)
        yield


class DivergedError(ArithmeticError):
    """Raised by [`eqx_ensemble.fit`][] with `on_diverge="raise"` when members diverge; `run` is the run so far."""

    def __init__(self, message: str, run: Any = None) -> None:
        super().__init__(message)
        self.run = run


T = TypeVar("T")

Trainable = Any
"""A prefix of a member's tree with booleans and functions of a leaf, as in `equinox.partition`."""


class Frozen(eqx.Module, Generic[T]):
    """A part of a member that is never trained, regardless of `trainable`.

    Its arrays have no gradient, no optimiser state and no weight decay. Calling it calls the value, with gradients
    through its inputs.

    **Arguments:**

    - `value`: any PyTree, such as a pretrained Module.

    ```python
    class Model(eqx.Module):
        trunk: ee.train.Frozen
        head: eqx.nn.Linear

        def __call__(self, x):
            return self.head(jax.nn.relu(self.trunk(x)))


    def make(key):
        trunk = ee.train.Frozen(eqx.nn.Linear(3, 8, key=key))  # or pretrained
        return Model(trunk, eqx.nn.Linear(8, 1, key=key))


    state = ee.train.init(ee.build(make, 4, key=key), optax.adamw(1e-3), key=key)
    state.params.trunk.value.weight, state.params.head.weight.shape  # (None, (4, 1, 8))
    ```
    """

    value: T

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the value with its arrays as constants."""
        stop = lambda x: jax.lax.stop_gradient(x) if eqx.is_inexact_array(x) else x
        fn: Any = jax.tree.map(stop, self.value)
        return fn(*args, **kwargs)


def trained_leaves(
    ensemble: Ensemble, trainable: Trainable = eqx.is_inexact_array, *, together: bool = False
) -> tuple[bool, ...]:
    """Whether each leaf of an ensemble is trained, `None` included; shared ones only if they are trained together.

    `trainable` is called with the leaves of one member.
    """
    if isinstance(trainable, eqx.Module) and callable(trainable) and not jax.tree.leaves(trainable):
        trainable = lambda x, test=trainable: test(x)  # a Module without leaves would be an empty tree
    is_none = lambda x: x is None
    leaves, treedef = jax.tree.flatten(ensemble.stacked, is_leaf=is_none)
    one = leaves
    if trainable is not eqx.is_inexact_array:  # which sees dtypes alone; a slice of each shape would compile
        one = [x[0] if axis == 0 and eqx.is_array(x) else x for x, axis in zip(leaves, ensemble.axes, strict=True)]
    # Whether a leaf is inside a `Frozen`, by the path of nodes.
    nodes = jax.tree.leaves(ensemble.stacked, is_leaf=lambda x: x is None or _is_frozen(x))
    frozen = [_is_frozen(node) for node in nodes for _ in jax.tree.leaves(node, is_leaf=is_none)]
    chosen = jax.tree.leaves(eqx.filter(jax.tree.unflatten(treedef, one), trainable), is_leaf=is_none)
    trained = tuple(
        eqx.is_array(x) and not is_frozen and (axis == 0 or (together and eqx.is_inexact_array(x)))
        for x, is_frozen, axis in zip(chosen, frozen, ensemble.axes, strict=True)
    )
    if not any(trained):
        raise ValueError("`trainable` selects no array of the members that can be trained.")
    rows = zip(trained, ensemble.axes, strict=True)
    if together and not any(chosen and axis is None for chosen, axis in rows):
        raise ValueError(
            "`train.Together` trains floating-point arrays that members share, and this ensemble has none.\n"
            "Select them where it is made: `build(make, n, shared=lambda model: model.bounds)`."
        )
    return trained


def _is_frozen(node: Any) -> bool:
    return isinstance(node, Frozen)


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
    - `hyper`: the hyperparameters, or `None`.
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
        return take(self, jnp.atleast_1d(check_index(index, self.num_members)))

    def stop(self, where: Any = ...) -> "TrainState[M]":
        """The state with the members at `where`, a mask or an index, or all of them stopped: for callbacks."""
        where = jnp.asarray(True if where is ... else where)  # noqa: FBT003
        if where.dtype != bool:
            where = jnp.zeros(self.status.shape, bool).at[where].set(True)
        stopped = jnp.where(where & (self.status == Status.OK), jnp.int8(Status.STOPPED), self.status)
        return eqx.tree_at(lambda state: state.status, self, stopped)

    def __pdoc__(self, **_: Any) -> Any:
        from wadler_lindig import TextDoc

        status, text = known_values(self.status), f"num_members={np.shape(self.status)[:1]}"
        if status is not None and status.ndim == 1:
            text = f"num_members={len(status)}, step={np.max(self.step)}, status={status_text(status)}"
        return TextDoc(f"TrainState[{type(self.ensemble.stacked).__name__}]({text})")


def status_text(status: np.ndarray) -> str:
    """The number of members of each status, and which they are: `6 ok, 1 stopped (2), 1 diverged (5)`."""
    found = [(one, np.flatnonzero(status == one)) for one in Status]
    names = lambda one, here: "" if one is Status.OK else f" ({members_text(here)})"
    return ", ".join(f"{len(here)} {one!s}{names(one, here)}" for one, here in found if len(here))


def members_text(members: np.ndarray) -> str:
    """The first members of some: `0, 3, 5`."""
    return ", ".join(map(str, members[:8])) + (", ..." if len(members) > 8 else "")


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


class Trained(NamedTuple):
    """What a step of training changes: of the member, and of what all members train together."""

    own: PyTree
    opt_state: PyTree
    model_state: PyTree
    common: PyTree = None
    common_state: PyTree = None


def trained_of(state: TrainState) -> Trained:
    """What a step changes, out of the state of one member."""
    weights = weights_of(state)
    common_state = None if state.together is None else state.together.value[0]
    return Trained(weights.own, state.opt_state, state.model_state, weights.common, common_state)


def with_trained(state: TrainState, new: Trained) -> TrainState:
    """The state with what a step has changed."""
    state = with_weights(state, new.own, new.common)
    state = dataclasses.replace(state, opt_state=new.opt_state, model_state=new.model_state)
    if state.together is not None:
        shared = Shared((new.common_state, state.together.value[1]))
        state = dataclasses.replace(state, together=shared)
    return state


def all_finite(tree: PyTree) -> Bool[Array, ""]:
    """Whether all floating-point arrays of a tree are finite."""
    found = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))]
    return jnp.all(jnp.asarray(found))


def with_best(state: TrainState, mode: str) -> TrainState:
    """The state with its current weights as the best ones, of no score, unless it has some."""
    if state.best is not None:
        return state
    weights = weights_of(state)
    score = state.best_score
    worst = np.full(score.shape, np.inf if mode == "min" else -np.inf, score.dtype)
    worst = jax.device_put(worst, score.sharding)  # not computed: `jax_debug_infs` would raise
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
    moving, other = split_own(state)
    common = jax.tree.map(lambda _: None, state)
    if state.together is None:
        return Pieces(moving, common, other)
    where = lambda s: (s.ensemble.stacked, s.together)
    common = eqx.tree_at(where, common, (weights_of(state).common, state.together), is_leaf=_is_none)
    rest = jax.tree.map(lambda x, y: x if y is None else None, other, common, is_leaf=_is_none)
    return Pieces(moving, common, rest)
