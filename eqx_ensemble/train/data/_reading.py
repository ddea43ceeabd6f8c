from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ... import _axes
from ..._axes._check_rows import not_finite_text
from ..._foreign import own_array
from ..._pytree import PyTree
from ...sharding._layout import Layout
from ...sharding._shard import local_block, rows_sharding
from ._check_reader import check_batch_read
from ._reader import RowReader
from ._slots import Slots
from ._step_rows import StepRows

_PROBE = 8  # rows


class Reading:
    """Reads the batches of steps for the members in some slots, and puts them on their devices.

    On a mesh a process reads the rows of its own devices only.
    """

    def __init__(self, reader: RowReader, rows: StepRows, layout: Layout | None) -> None:
        self._reader, self._rows, self._layout = reader, rows, layout
        self._x64: bool = getattr(jax.config, "jax_enable_x64")  # noqa: B009 (of this thread, where others read)
        self._like: PyTree = None  # a row that was read before
        self._probe: PyTree = None
        self.fault = ""  # what was read and is not finite, in words

    def probe(self) -> PyTree:
        """A few rows of the data, from the first to the last, as its fingerprint."""
        if self._probe is None:
            last = self._reader.num_rows - 1
            rows = np.unique(np.linspace(0, last, _PROBE).astype(np.int64))
            note = f"It read some rows from 0 to {last}, by which the data are recognised."
            self._probe = jax.tree.map(own_array, self._read(rows, note=note))
        return self._probe

    def begin(self, step: int, slots: Slots) -> Callable[[], PyTree]:
        """Prepares the read of a step's batch. Returns the read, for a thread, of arrays `(slots, batch, ...)`.

        They are `(batch, ...)` if all members see the same rows.
        """
        rows = self._rows.at(step, self._members(step, slots))
        rows = rows[..., self._block(step, slots)[-1]]
        unique, inverse = np.unique(rows, return_inverse=True)
        inverse, order = inverse.reshape(rows.shape), self._rows.order
        note = (
            f"It read the batch of step {step + 1}, batch {step % order.epoch + 1} of epoch {step // order.epoch + 1}: "
            f"{len(unique)} rows between {unique[0]} and {unique[-1]}."
        )

        def read() -> PyTree:
            batch = self._read(unique, note=note)
            own = own_array if np.array_equal(rows, unique) else lambda x: x[inverse]
            return jax.tree.map(own, batch)

        return read

    def place(self, batch: PyTree, step: int, slots: Slots) -> PyTree:
        """A step's batch for the training loop, on its devices or transferred on first use."""
        if self._layout is not None:
            sharding, block = self._sharding(step, slots), self._block(step, slots)
            batch = jax.tree.map(lambda x: _on_mesh(x, sharding, block, self._shape(step, slots)), batch)
        return _axes.Each(batch) if self._rows.is_own else batch

    def _read(self, rows: np.ndarray, *, note: str) -> PyTree:
        """Some rows, in memory that the next read may overwrite."""
        try:
            batch = check_batch_read(self._reader.read(rows), len(rows), self._like, name="train.RowReader")
        except Exception as error:
            error.add_note(note)
            raise
        if not self.fault and (text := not_finite_text(batch, argument="batch")):
            at = f", of rows {rows[:8].tolist()}..." if len(rows) > 8 else f", of rows {rows.tolist()}"
            self.fault = f"in a batch{at}, {text}"
        if self._like is None:
            self._like = jax.tree.map(lambda x: x[:1].copy(), batch)
        with jax.enable_x64(self._x64):
            return jax.tree.map(lambda x: x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False), batch)

    def _shape(self, step: int, slots: Slots) -> tuple[int, ...]:
        order = self._rows.order
        size = min(order.batch_size, order.num_rows - step % order.epoch * order.batch_size)
        return (len(slots.index), size) if self._rows.is_own else (size,)

    def _sharding(self, step: int, slots: Slots) -> Any:
        *members, size = self._shape(step, slots)
        assert self._layout is not None
        return rows_sharding(self._layout, size, *members)

    def _block(self, step: int, slots: Slots) -> tuple[slice, ...]:
        """The part of `(slots, batch)` that this process needs."""
        shape = self._shape(step, slots)
        if self._layout is None:
            return tuple(slice(0, size) for size in shape)
        return local_block(self._sharding(step, slots), shape)

    def _members(self, step: int, slots: Slots) -> np.ndarray:
        """The members whose rows this process needs."""
        return slots.index[self._block(step, slots)[0]] if self._rows.is_own else slots.index


def _on_mesh(x: np.ndarray, sharding: Any, block: tuple[slice, ...], shape: tuple[int, ...]) -> jax.Array:
    """A global array, of which `x` is the part `block`."""

    def part(index: Any) -> np.ndarray:
        bounds = [at.indices(size) for at, size in zip(index, shape, strict=False)]
        own = [slice(low - at.start, high - at.start) for (low, high, _), at in zip(bounds, block, strict=False)]
        return x[tuple(own)]

    return jax.make_array_from_callback((*shape, *x.shape[len(shape) :]), sharding, part)
