import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .. import _axes, _check
from .._compiled import CompiledCall, ProgramKey
from .._ensemble import Ensemble
from .._foreign import empty_aligned
from .._ids import open_ids
from .._pytree import PyTree
from .._sharding import Layout, shard_data
from ..plan import AbstractPlan
from ..plan._engine import free_bytes, sharded_plan
from ._check import result_message

# Selects rows of arrays: on a CPU by NumPy, because JAX compiles its indexing anew for every number of rows.


def size_of_few(num_rows: int, batch_size: int) -> int:
    """The number of rows of the program for less than a batch: a power of two, so that few programs are compiled."""
    return min(batch_size, 1 << (num_rows - 1).bit_length())


def take_rows(x: Any, rows: np.ndarray, *, axis: int) -> Any:
    """The rows of an array along an axis, as an array of NumPy where a compiled program takes them from the host."""
    index = (slice(None),) * axis + (rows,)
    if not _is_on_host(x):
        return x[index]
    return _on_host(x, index) if x.committed else np.ascontiguousarray(np.asarray(x)[index])


def some_rows(x: PyTree, rows: np.ndarray) -> PyTree:
    """The rows of all arrays: no method of a Module, whose call takes longer."""
    own = lambda value: _axes.Each(jax.tree.map(lambda x: take_rows(x, rows, axis=1), value))
    return _axes.map_each(own, x, shared=lambda x: take_rows(x, rows, axis=0))


def first_rows(x: Any, count: int, *, axis: int) -> Any:
    """The first `count` rows of an array along an axis."""
    if isinstance(x, jax.Array) and x.shape[axis] == count:
        return x
    index = (slice(None),) * axis + (slice(0, count),)
    return _on_host(x, index) if _is_on_host(x) else x[index]


def weights_of(weights: Any, rows: np.ndarray) -> Any:
    """The weights for some rows; weights `(members,)` are the same for all."""
    return weights if weights is None or weights.ndim == 1 else weights[:, rows]


def row_of_zeros(x: Any, *, axis: int) -> jax.Array:
    """A row of zeros, of the shape and dtype of one row."""
    shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    if _check.is_key(x):
        return jnp.broadcast_to(jax.random.key(0, impl=jax.random.key_impl(x)), shape)
    return jnp.zeros_like(x, shape=shape)  # keeps a weak type


def _is_on_host(x: Any) -> bool:
    """Whether NumPy can read an array without a copy; a weak type would be lost."""
    if not isinstance(x, jax.Array) or _check.is_traced(x) or _check.is_key(x) or x.aval.weak_type:
        return False
    return x.is_fully_addressable and len(x.devices()) == 1 and all(d.platform == "cpu" for d in x.devices())


def _on_host(x: jax.Array, index: tuple) -> jax.Array:
    # A copy, so that the whole array can be freed.
    return _to_device_of(np.ascontiguousarray(np.asarray(x)[index]), x)


def _to_device_of(host: np.ndarray, x: jax.Array) -> jax.Array:
    return jax.device_put(host, x.sharding if x.committed else None)


class MemberCall(eqx.Module):
    """The static part of calling a member with a row."""

    fn: Callable[..., Any] | None = eqx.field(static=True)
    inference: bool = eqx.field(static=True)
    layout: Layout | None = eqx.field(static=True, default=None)
    program_key: ProgramKey = eqx.field(static=True, default=())


class PredictionInputs(eqx.Module):
    """The arrays of a prediction: the members, the rows, and the members' states and keys."""

    ensemble: Ensemble
    x: PyTree
    state: PyTree
    keys: _axes.Each | None

    def take_rows(self, rows: np.ndarray) -> "PredictionInputs":
        """The inputs of some of the rows."""
        return PredictionInputs(self.ensemble, some_rows(self.x, rows), self.state, self.keys)

    def one_row_of_zeros(self) -> "PredictionInputs":
        """The inputs with a single row of zeros, for the shapes of a prediction without rows."""
        own = lambda value: _axes.Each(jax.tree.map(lambda x: row_of_zeros(x, axis=1), value))
        x = _axes.map_each(own, self.x, shared=lambda x: row_of_zeros(x, axis=0))
        return PredictionInputs(self.ensemble, x, self.state, self.keys)


def predict_batch(plan: AbstractPlan, call: MemberCall, inputs: PredictionInputs, rows: Any) -> PyTree:
    """The predictions of all members for all rows of `inputs`; `rows` are their indices in the data."""
    read = (inputs.ensemble, inputs.x, inputs.state, inputs.keys)
    own, view, _ = _axes.split_members(read)

    def one(part: PyTree) -> PyTree:
        model, batch, state, key = view(part)
        model = eqx.nn.inference_mode(model) if call.inference else model
        row_keys = None if key is None else jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, rows)

        def row(x: PyTree, key: Any) -> PyTree:
            before = () if state is None else (state,)
            named = {} if key is None else {"key": key}
            if call.fn is not None:
                return call.fn(model, x, *before, **named)
            out = model(x, *before, **named)
            return out if state is None else out[0]

        return jax.vmap(row)(batch, row_keys)

    return _axes.over_leading_axis(sharded_plan(plan, call.layout).run, one, own)


compiled_batch = eqx.filter_jit(predict_batch)

FlatInputs = tuple[AbstractPlan, MemberCall, Ensemble, PyTree, PyTree, "_axes.Each | None", Any]
"""Plan, call, ensemble, state, rows of `x`, keys and, if there are keys, the indices of the rows in the data."""


def _predict_rows(read: FlatInputs, _: None) -> tuple[None, PyTree]:
    plan, call, ensemble, state, x, keys, rows = read
    return None, predict_batch(plan, call, PredictionInputs(ensemble, x, state, keys), rows)


# The same program, found in a tenth of the time, for concrete arrays without a layout.
compiled_rows = CompiledCall(_predict_rows)


def batch_arguments(
    call: MemberCall, inputs: PredictionInputs, rows: np.ndarray
) -> tuple[MemberCall, PredictionInputs, jax.Array]:
    """The arguments of `predict_batch`, except for the plan, for some rows."""
    some = inputs.take_rows(rows)
    some = dataclasses.replace(some, ensemble=open_ids(some.ensemble))  # one program for all members
    if call.layout is None or any(map(_check.is_traced, jax.tree.leaves(some.x))):
        return call, some, jnp.asarray(rows)
    return call, dataclasses.replace(some, x=shard_data(some.x, call.layout)), shard_data(rows, call.layout)


def combine_members(predictions: PyTree, combine: Any, weights: Any) -> PyTree:
    """Combines the predictions of all members."""
    if combine is None:
        return predictions
    return combine(predictions) if weights is None else combine(predictions, weights=weights)


class OutputBuffer:
    """A result that is written in place, some rows at a time, without a second copy."""

    def __init__(self, num_rows: int, *, axis: int) -> None:
        self._num_rows, self._axis = num_rows, axis
        self._value: Any = None
        self._host: list[np.ndarray] = []  # of a CPU, whose arrays NumPy writes sooner than a program
        self._late: tuple[PyTree, int] | None = None  # a part that is still being computed

    @property
    def value(self) -> PyTree:
        """The result; `None` before the first rows are written."""
        if not self._host:
            return self._value
        self._write_late()
        first, structure = jax.tree.flatten(self._value)
        return structure.unflatten([_to_device_of(x, own) for own, x in zip(first, self._host, strict=True)])

    def write(self, part: PyTree, start: int) -> None:
        """Writes a part of the result at the row `start`; the first part must start at row 0."""
        leaves = jax.tree.leaves(part)
        if self._value is None:
            rows = leaves[0].shape[self._axis]
            self._check_room(part, rows)
            if rows == self._num_rows:
                self._value = part
            elif all(map(_is_on_host, leaves)):
                whole = lambda x: (*x.shape[: self._axis], self._num_rows, *x.shape[self._axis + 1 :])
                self._host = [empty_aligned(whole(x), x.dtype) for x in leaves]
                self._value, self._late = part, (part, start)
            else:  # made from the first part, the result is on the same devices
                self._value = _pad_rows(part, self._num_rows, self._axis)
        elif self._host:
            self._write_late()
            self._late = part, start
            if all(x.is_ready() for x in leaves):
                self._write_late()
        else:
            traced = any(map(_check.is_traced, jax.tree.leaves((self._value, part))))
            self._value = (_write_copy if traced else _write_in_place)(self._value, part, start, self._axis)

    def _write_late(self) -> None:
        if self._late is not None:
            part, start = self._late
            for whole, x in zip(self._host, jax.tree.leaves(part), strict=True):
                rows = slice(start, start + x.shape[self._axis])
                whole[(slice(None),) * self._axis + (rows,)] = np.asarray(x)
            self._late = None

    def _check_room(self, part: PyTree, rows: int) -> None:
        leaves, free = jax.tree.leaves(part), free_bytes()
        if free is None or any(map(_check.is_traced, leaves)):
            return
        need = sum(leaf.nbytes for leaf in leaves) // rows * self._num_rows
        if need > free:
            whole = lambda x: (*x.shape[: self._axis], self._num_rows, *x.shape[self._axis + 1 :])
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(whole(x), x.dtype), part)
            raise MemoryError(result_message(need, free, shapes, combined=self._axis == 0))


def _extend(part: PyTree, num_rows: int, axis: int) -> PyTree:
    def extend(x: jax.Array) -> jax.Array:
        padding = [(0, num_rows - size if i == axis else 0, 0) for i, size in enumerate(x.shape)]
        return jax.lax.pad(x, jax.numpy.zeros((), x.dtype), padding)

    return jax.tree.map(extend, part)


def _write(whole: PyTree, part: PyTree, start: Any, axis: int) -> PyTree:
    return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, start, axis), whole, part)


_pad_rows = jax.jit(_extend, static_argnums=(1, 2))
_write_copy = jax.jit(_write, static_argnums=3)
_write_in_place = jax.jit(_write, static_argnums=3, donate_argnums=0)
