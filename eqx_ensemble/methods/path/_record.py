from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int

from ..._ensemble import Ensemble
from ..._pytree import PyTree
from ...train import Progress, TrainState
from ...train._run import Run
from ...train.compiled._optimiser import supported_arguments
from ._check import check_record, check_same_leaves, check_source, params_message


class RecordState(NamedTuple):
    """The state of an optimiser that records weights: the numbers of steps and snapshots, and the record."""

    inner_state: PyTree
    step: Int[Array, "*members"]
    count: Int[Array, "*members"]
    record: PyTree


class Mean(NamedTuple):
    """The record of `ema` and `swa`."""

    mean: PyTree


class Moments(NamedTuple):
    """The record of `swag`: `squares` are sums of squared deviations, `columns` the last deviations `(rank, ...)`."""

    mean: PyTree
    squares: PyTree
    columns: PyTree


class Weights(NamedTuple):
    """The record of `snapshots`, each array `(size, ...)`."""

    weights: PyTree


Update = Callable[[PyTree, PyTree, Int[Array, ""], Bool[Array, ""]], PyTree]
"""`(record, weights, count, due) -> record`: takes the `count`-th snapshot if it is `due`."""


def record_path(
    optimiser: optax.GradientTransformation,
    *,
    start: Any,
    every: Any,
    period: Any = None,
    init: Callable[[PyTree], PyTree],
    update: Update,
    name: str,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimiser to record the weights after steps `start`, `start + every`, `start + 2 * every` ...

    With a `period`, these are the steps of each period.
    """
    inner = optax.with_extra_args_support(optimiser)

    def init_all(params: PyTree) -> RecordState:
        return RecordState(inner.init(params), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), init(params))

    def update_all(updates: PyTree, state: Any, params: Any = None, **extra: Any) -> tuple[PyTree, RecordState]:
        if params is None:
            raise ValueError(params_message(name))
        updates, inner_state = inner.update(
            updates, state.inner_state, params, **supported_arguments(inner.update, extra)
        )
        weights = optax.apply_updates(params, updates)
        step = jnp.asarray(optax.safe_increment(state.step))
        within = step if period is None else (step - 1) % period + 1
        due = (within >= start) & ((within - start) % every == 0)
        count = state.count + due.astype(state.count.dtype)
        return updates, RecordState(inner_state, step, count, update(state.record, weights, count, due))

    return optax.GradientTransformationExtraArgs(init_all, update_all)


def zeros_like(params: PyTree, *axes: int) -> PyTree:
    """Zeros `(*axes, ...)` for sums, with at least 32 bits."""

    def zeros(x: Any) -> Array:
        x = jnp.asarray(x)
        return jnp.zeros((*axes, *x.shape), jnp.float32 if jnp.finfo(x.dtype).bits < 32 else x.dtype)

    return jax.tree.map(zeros, params)


def move_mean(mean: PyTree, weights: PyTree, rate: Any, due: Bool[Array, ""]) -> PyTree:
    """Moves the mean towards the weights by `rate` if a snapshot is `due`."""

    def move(old: Array, new: Array) -> Array:
        return jnp.where(due, old + jnp.asarray(rate).astype(old.dtype) * (new.astype(old.dtype) - old), old)

    return jax.tree.map(move, mean, weights)


def reciprocal(count: Int[Array, ""]) -> Array:
    """One over the number of snapshots; unlike the quotient of integers, in double precision if enabled."""
    return 1 / jnp.maximum(count, 1).astype(jnp.result_type(float))


def find_record(source: Any, kinds: tuple[type, ...], *, name: str) -> tuple[TrainState, RecordState]:
    """The training state of a run, and the record of its optimiser."""
    check_source(source, (Run, TrainState, Progress), name=name)
    state = source if isinstance(source, TrainState) else source.train_state
    found = [(x, is_last) for x, is_last in _records(state.opt_state) if isinstance(x.record, kinds)]
    check_record([is_last for _, is_last in found], name=name)
    ((record, _),) = found
    check_same_leaves(state.params, record.record[0], name=name)
    return state, record


def _records(node: PyTree, *, is_last: bool = True) -> Iterator[tuple[RecordState, bool]]:
    """Yields all records of an optimiser state, and whether each wrapper is the last transformation."""
    if isinstance(node, RecordState):
        yield node, is_last
        yield from _records(node.inner_state, is_last=is_last)
        return
    children, treedef = jax.tree.flatten(node, is_leaf=lambda x: x is not node)
    if treedef == jax.tree.structure(0):
        return
    for i, child in enumerate(children):
        ends = type(node) is not tuple or i == len(children) - 1  # a tuple is a chain, whose last part is applied last
        yield from _records(child, is_last=is_last and ends)


@eqx.filter_jit
def weights_or_current(found: PyTree, params: PyTree, count: Int[Array, " members"], repeats: int = 1) -> PyTree:
    """The recorded weights in the dtypes of the current ones, which replace them for members without a snapshot."""

    def choose(x: Array, current: Array) -> Array:
        current = jnp.repeat(current, repeats, axis=0)
        has_any = jnp.repeat(count > 0, repeats).reshape(-1, *[1] * (current.ndim - 1))
        return jnp.where(has_any, x.astype(current.dtype), current)

    return jax.tree.map(choose, found, params)


def as_ensemble(state: TrainState, params: PyTree, frozen: PyTree, ids: Any) -> Ensemble[Any]:
    """The ensemble of `state`, with other trained arrays."""
    return Ensemble(eqx.combine(params, frozen), state.shared, ids)
