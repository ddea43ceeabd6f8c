"""Training steps as compiled functions of flat lists: flattening Modules takes as long as a small step."""

import functools as ft
import operator
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax

from .._axes import ProgramKey, program_key
from .._check import is_traced
from .._jaxpr import has_callbacks, plain_jit
from .._pytree import PyTree
from ._state import TrainState
from .compiled._flat import ARRAYS, constants_of


class FlatState(NamedTuple):
    """A state as a list of arrays.

    `constants` are its other leaves. `treedef` is its structure, `top` that of its fields, `moving` that of the first
    field; `is_frozen`: whether all nodes are immutable. `calls` caches the compiled steps of such states, by structure
    and shapes of the batch; `None` if a step must be called with the state itself.
    """

    arrays: list[Any]
    constants: list[Any]
    treedef: Any
    top: Any
    moving: Any
    is_frozen: bool
    calls: dict[Any, Callable[..., Any] | None]

    def update(self, state: TrainState[Any]) -> "FlatState | None":
        """Updates the arrays to those of `state`; `None` if anything else has changed."""
        arrays, constants, treedef = _partition(state)
        unchanged = len(constants) == len(self.constants) and all(map(operator.is_, constants, self.constants))
        return self._replace(arrays=arrays) if treedef == self.treedef and unchanged else None


class LastState:
    """A cache of the arrays of the state that a step returned last, while that state is alive.

    All instances are equal, so that equal steps share their programs. A copy starts empty.
    """

    def __init__(self) -> None:
        self._known: tuple[weakref.ref[Any], weakref.ref[Any], FlatState] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return LastState, ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LastState)

    def __hash__(self) -> int:
        return 0

    def find(self, step: PyTree, state: TrainState[Any]) -> FlatState | None:
        """The arrays of `state`, if it is the last state that `step` returned."""
        known = self._known
        if known is None or known[0]() is not state or known[1]() is not step:
            return None
        return known[2] if known[2].is_frozen else known[2].update(state)

    def remember(self, step: PyTree, state: TrainState[Any], flat: FlatState) -> None:
        """Caches the arrays of a state."""
        self._known = (weakref.ref(state, self._forget), weakref.ref(step), flat)

    def _forget(self, ref: weakref.ref) -> None:
        known = self._known  # another thread may replace it
        if known is not None and known[0] is ref:
            self._known = None


def flatten_state(state: TrainState[Any]) -> FlatState:
    """A state as a list of arrays."""
    arrays, constants, treedef = _partition(state)
    top = jax.tree.structure(state, is_leaf=lambda x: x is not state)
    return FlatState(arrays, constants, treedef, top, jax.tree.structure(state.moving), _is_frozen(treedef), {})


def _partition(state: TrainState[Any]) -> tuple[list[Any], list[Any], Any]:
    leaves, treedef = jax.tree.flatten(state)
    arrays, constants = [], []
    for leaf in leaves:
        (arrays if isinstance(leaf, ARRAYS) else constants).append(leaf)
    return arrays, constants, treedef


@ft.lru_cache(maxsize=64)
def _is_frozen(treedef: Any) -> bool:
    """Whether all nodes are tuples or Modules: a dict or a list could be changed in place."""
    node = treedef.node_data()
    if node is None:
        return True
    kind = node[0]
    if kind is not type(None) and not issubclass(kind, tuple | eqx.Module):
        return False
    return all(map(_is_frozen, treedef.children()))


def call_flat(
    fn: Callable[..., Any], step: PyTree, state: TrainState[Any], batch: PyTree, last: LastState
) -> tuple[TrainState[Any], PyTree] | None:
    """The new state and the metrics of `fn(step, state, batch)`; `None` if it cannot be called on flat lists."""
    flat = last.find(step, state) or flatten_state(state)
    own, treedef = jax.tree.flatten(batch)
    if not all(isinstance(x, ARRAYS) for x in own):
        return None
    key = (treedef, *((x.shape, x.dtype) for x in own))
    if key not in flat.calls:
        flat.calls[key] = _compile(fn, step, state, own, treedef)
    call = flat.calls[key]
    if call is None:
        return None
    moving, count, metrics = call(flat.arrays, own)
    fields = (jax.tree.unflatten(flat.moving, moving), state.fixed, state.shared, state.ids, count)
    new = jax.tree.unflatten(flat.top, fields)  # a constructor takes as long as a small step, too
    last.remember(step, new, flat._replace(arrays=[*moving, *flat.arrays[len(moving) : -1], count]))
    return new, metrics


def _compile(
    fn: Callable[..., Any], step: PyTree, state: TrainState[Any], batch: list[Any], treedef: Any
) -> Callable[..., Any] | None:
    """The compiled step; `None` if it needs `equinox.filter_jit`, which explains the errors of calls of Python."""
    leaves, structure = jax.tree.flatten(state)
    settings, step_treedef = jax.tree.flatten(step)
    others = constants_of(leaves)
    if settings or is_traced(state.step) or not all(isinstance(x, ARRAYS) for x in jax.tree.leaves(state.moving)):
        return None
    try:
        hash((structure, others))
    except TypeError:  # a field or a constant is not hashable
        return None
    call, calls_python = _jit(fn, step_treedef, structure, others, program_key((step, state)), treedef)
    arrays = [x for x in leaves if isinstance(x, ARRAYS)]
    shapes = tuple((x.shape, x.dtype) for x in (*arrays, *batch))
    if shapes not in calls_python:
        calls_python[shapes] = has_callbacks(call.trace(arrays, batch).jaxpr.jaxpr)
    return None if calls_python[shapes] else call


@ft.lru_cache(maxsize=64)
def _jit(
    fn: Callable[..., Any], step_treedef: Any, structure: Any, others: tuple, key: ProgramKey, batch_treedef: Any
) -> tuple[Any, dict[Any, bool]]:
    """The step, and whether it calls Python by shapes, for states that differ only in their arrays."""
    del key

    def flat_step(arrays: list[Any], batch: list[Any]) -> tuple[list[Any], Any, PyTree]:
        left = iter(arrays)
        state = jax.tree.unflatten(structure, [next(left) if x is None else x for x in others])
        step = jax.tree.unflatten(step_treedef, ())
        moving, count, metrics = fn(step, state, jax.tree.unflatten(batch_treedef, batch))
        return jax.tree.leaves(moving), count, metrics

    return plain_jit(flat_step), {}
