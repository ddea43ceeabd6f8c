import functools as ft
from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ... import _axes
from ..._axes import not_finite_text
from ..._foreign import own_array
from ..._pytree import PyTree
from ..._sharding import Layout
from .._texts import array_text, array_texts
from ..compiled._order import RowOrder
from ._batches import BatchWork, begin_work
from ._check import check_last_step, check_not_exceeded, check_patience_length
from ._read_ahead import ReadAhead
from ._reader import RowReader, check_batch_read
from ._rows import Shuffle, Slots
from ._source import NOTHING, AbstractSource, AbstractWork, EpochEnd, Outcome, Setting, member_shapes

_MOST_STEPS, _MOST_ROWS = 64, 2**20


class StepRows:
    """The rows of the data that a step reads, computed on the host; the same as in a compiled step of data in memory.

    `words` are those of a [`RowOrder`][eqx_ensemble.train.compiled._order.RowOrder], `(members, 2)`, `(2,)` or `None`,
    and `rows` the members' own `(members, n)`. Orders are computed for several steps at a time.
    """

    def __init__(self, words: np.ndarray | None, rows: np.ndarray | None, *, num_rows: int, batch_size: int) -> None:
        self._words, self._rows = words, rows
        self.order = RowOrder(None, None, num_rows, batch_size)
        self._known: Any = None

    @property
    def is_own(self) -> bool:
        """Whether members see different rows."""
        return self._rows is not None or (self._words is not None and self._words.ndim == 2)

    def at(self, step: int, members: np.ndarray) -> np.ndarray:
        """The rows `(members, batch)` of some members at a step, or the rows of all members, `(batch,)`."""
        positions = self._positions(step, members)
        if self._rows is None:
            return positions
        positions = np.broadcast_to(positions, (len(members), positions.shape[-1]))
        return self._rows[members[:, None], positions]

    def _positions(self, step: int, members: np.ndarray) -> np.ndarray:
        order = self.order
        first = step % order.epoch * order.batch_size
        size = min(order.batch_size, order.num_rows - first)
        if self._words is None:
            return np.arange(first, first + size)
        words = self._words if self._words.ndim == 1 else self._words[members]
        count = max(min(_MOST_STEPS, _MOST_ROWS * 2 // (words.size * order.batch_size)), 1)
        known = (step // count, words.tobytes())
        if self._known is None or self._known[0] != known:
            steps = np.arange(count, dtype=np.int32) + np.int32(step // count * count)
            with jax.default_device(_cpu()):
                self._known = known, np.asarray(_compute(words, steps, order.num_rows, order.batch_size))
        return self._known[1][step % count][..., :size]


def _cpu() -> Any:
    """A CPU device, which does not wait for the queued steps of an accelerator."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # `jax_platforms` excludes it
        return None


@ft.partial(jax.jit, static_argnums=(2, 3))
def _compute(words: Any, steps: Int[Array, " steps"], num_rows: int, batch_size: int) -> Array:
    """Positions `(steps, members, batch)`, or `(steps, batch)` if all members share an order."""
    at = lambda words, step: RowOrder(words, None, num_rows, batch_size).batch(step, last=False)
    if words.ndim == 2:
        at = jax.vmap(at, in_axes=(0, None))
    return jax.lax.map(lambda step: at(jnp.asarray(words), step), steps)


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
            batch = check_batch_read(self._reader.read(rows), len(rows), self._like)
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
        return self._layout.of_rows(size, *members)

    def _block(self, step: int, slots: Slots) -> tuple[slice, ...]:
        """The part of `(slots, batch)` that this process needs."""
        shape = self._shape(step, slots)
        if self._layout is None:
            return tuple(slice(0, size) for size in shape)
        return _local_block(self._sharding(step, slots), shape)

    def _members(self, step: int, slots: Slots) -> np.ndarray:
        """The members whose rows this process needs."""
        return slots.index[self._block(step, slots)[0]] if self._rows.is_own else slots.index


def _local_block(sharding: Any, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The smallest block of an array that contains the parts on all devices of this process."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    bounds = [[index[i].indices(size)[:2] for index in indices] for i, size in enumerate(shape)]
    return tuple(slice(min(low for low, _ in axis), max(high for _, high in axis)) for axis in bounds)


def _on_mesh(x: np.ndarray, sharding: Any, block: tuple[slice, ...], shape: tuple[int, ...]) -> jax.Array:
    """A global array, of which `x` is the part `block`."""

    def part(index: Any) -> np.ndarray:
        bounds = [at.indices(size) for at, size in zip(index, shape, strict=False)]
        own = [slice(low - at.start, high - at.start) for (low, high, _), at in zip(bounds, block, strict=False)]
        return x[tuple(own)]

    return jax.make_array_from_callback((*shape, *x.shape[len(shape) :]), sharding, part)


@final
class ReaderSource(AbstractSource):
    """Data that a [`RowReader`][eqx_ensemble.train.RowReader] reads, in the row order of data in memory.

    `own` are the members' own rows, on the host, and `shuffle` is that of `fit`.
    """

    def __init__(
        self, reading: Reading, rows: StepRows, *, own: Any, shuffle: Shuffle, num_rows: int, threads: int
    ) -> None:
        self.rows = own
        self.fault = lambda: reading.fault
        self._reading, self._order, self._shuffle = reading, rows.order, shuffle
        self._num_rows, self._threads, self.epoch = num_rows, threads, rows.order.epoch
        self._ahead: ReadAhead | None = None

    @property
    def fingerprint(self) -> dict[str, str]:
        """Some rows of the data, the row order and the batch size."""
        order = {
            "shuffle": str(self._shuffle),
            "rows": "None" if self.rows is None else array_text(self.rows),
            "batch_size": str(self._order.batch_size),
            "number of rows": str(self._num_rows),
        }
        return array_texts(self._reading.probe(), "data") | order

    def shapes(self) -> PyTree:
        """The shapes of a batch as one member sees it."""
        return member_shapes(jax.tree.map(jnp.asarray, self._reading.probe()), rows=self._order.batch_size)

    def start(self, setting: Setting) -> None:
        """Begins at the setting's step; the cursor counts the ends of epochs since the run began."""
        begun, epochs, steps = setting.length
        self.num_steps = int(steps or 0) if epochs is None else epochs * self._order.epoch
        self.last_step = begun + self.num_steps
        check_patience_length(setting.program.patience, self.num_steps, self._order.epoch, begun)
        check_not_exceeded(setting.step, self.last_step, "steps")
        check_last_step(self.last_step)
        self.cursor, self._step, self._setting, self._slots = setting.cursor, setting.step, setting, setting.slots
        self._begun_epoch, self._is_inspected = begun // self._order.epoch, False
        self._final = min([self.last_step, *setting.limits[-1:].tolist()])
        self._work: BatchWork | None = None

    def next(self, steps: int, slots: Slots) -> BatchWork | EpochEnd | None:
        """The next batches of an epoch: about `steps` of them, or one if each is to be inspected."""
        if self._work is not None and self._work.error is not None:
            raise self._work.error
        done = self._step % self._order.epoch
        if _is_epoch_over(self):
            return EpochEnd()
        if self._step == self.last_step:
            return None
        ahead = self._reads(slots)
        first = ahead.take()
        if not self._is_inspected:
            self._setting.inspect(data=first)
            self._is_inspected = True
        final = min(self._final, self._step + self._order.epoch - done)
        self._work = begin_work(
            first, ahead, lambda batch: batch, self._setting, steps=steps, step=self._step, final=final
        )
        return self._work

    def _reads(self, slots: Slots) -> ReadAhead:
        """The reads for the members in the slots."""
        if self._ahead is None:
            self._ahead = ReadAhead(
                lambda step: self._reading.begin(step, self._slots),
                lambda batch, step: self._reading.place(batch, step, self._slots),
                first=self._step, last=self._final, threads=self._threads,
            )  # fmt: skip
        if slots is not self._slots:
            self._slots = slots
            self._ahead.restart(self._step)
        return self._ahead

    def prefetch(self) -> None:
        """Does nothing: threads read already."""

    def advance(self, work: AbstractWork | EpochEnd, outcome: Outcome = NOTHING) -> bool:
        """Counts the steps, or the end of an epoch."""
        self._step += outcome.num_steps
        if isinstance(work, EpochEnd):
            self.cursor = self.cursor._replace(epochs=self.cursor.epochs + 1)
        return _is_epoch_over(self)

    def finish(self, step: int) -> None:
        """Ends the threads."""
        if self._ahead is not None:
            self._ahead.close()


def _is_epoch_over(source: ReaderSource) -> bool:
    """Whether the steps done complete an epoch that the cursor does not count yet."""
    return source.cursor.epochs < source._step // source._order.epoch - source._begun_epoch
