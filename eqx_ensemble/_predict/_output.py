from typing import Any

import jax

from .. import _check
from .._pytree import PyTree
from ..plan._memory import free_bytes
from ._check import result_message


class OutputBuffer:
    """A result that is written in place, some rows at a time, without a second copy.

    **Attributes:**

    - `value`: the result; `None` before the first rows are written.
    """

    def __init__(self, num_rows: int, *, axis: int) -> None:
        self.value: Any = None
        self._num_rows, self._axis = num_rows, axis

    def write(self, part: PyTree, start: int) -> None:
        """Writes a part of the result at the row `start`; the first part must start at row 0."""
        if self.value is not None:
            traced = any(map(_check.is_traced, jax.tree.leaves((self.value, part))))
            self.value = (_write_copy if traced else _write_in_place)(self.value, part, start, self._axis)
            return
        rows = jax.tree.leaves(part)[0].shape[self._axis]
        self._check_room(part, rows)
        # Made from the first part, the result is on the same devices.
        self.value = part if rows == self._num_rows else _pad_rows(part, self._num_rows, self._axis)

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
