import functools as ft
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import jax
import numpy as np

from ..._axes import not_finite_text
from ..._pytree import PyTree
from ..._sharding import Layout, check_same_in_processes
from ..._warnings import warn
from ...distributed import to_host
from .._check import check_no_array_options, check_one_pass
from .._state import TrainState
from .._texts import array_text, array_texts
from ..compiled._chunk import Chunk, compiled_chunk, undonated_chunk
from ..compiled._health import Carry
from ..compiled._order import RowOrder
from ..compiled._program import in_a_loop
from ..compiled._selection import next_limit
from ..compiled._stepwise import BlockCalls, run_stepwise
from ..compiled._windows import Windows
from ._batches import IterableSource
from ._check import check_batch_size, check_last_step, check_not_exceeded, check_patience_length, integers_text
from ._read_ahead import PieceQueue
from ._reader import RowReader, check_no_scan
from ._reader_source import ReaderSource, Reading, StepRows
from ._rows import Piece, PieceIterator, Shuffle, Slots, order_words, row_order
from ._source import (
    NOTHING,
    AbstractSource,
    AbstractWork,
    EpochEnd,
    Outcome,
    Outputs,
    Setting,
    as_row_indices,
    is_batches,
    member_shapes,
    on_device,
)

_FEWEST_STEPS, _MOST_STEPS = 32, 2048
_PIECES_OF_AN_ENDLESS_CHUNK = 4  # room for the parts of one with a fault
_MOST_BYTES_OF_LOSSES = 2**25


@final
class ChunkWork(AbstractWork):
    """Pieces of a run, padded to one shape and run by one compiled call."""

    def __init__(
        self,
        compiled: Callable,
        chunk: Chunk,
        pieces: list[Piece],
        *,
        first_step: int,
        windows: Windows,
        may_raise: bool,
    ) -> None:
        self.compiled, self.batch, self.pieces, self.may_raise = compiled, chunk, pieces, may_raise
        self.num_steps = sum(piece.num_steps for piece in pieces)
        self._first_step, self._windows = first_step, windows

    def unpack(self, results: PyTree, carry: Carry) -> Outcome:
        """The outputs of the good pieces; if a member failed at an unknown step, the parts around its fault remain."""
        good, again, fault, recorded, scores = results
        good = int(good)
        num_steps = sum(piece.num_steps for piece in self.pieces[:good])
        rest = self.pieces[good:]
        if again:
            rest = [*rest[0].bisect_fault(min(int(fault), rest[0].full)), *rest[1:]]
        return Outcome([*self._outputs(good, recorded, scores)], num_steps, rest)

    def _outputs(self, good: int, recorded: PyTree, scores: PyTree) -> Iterator[Outputs]:
        """The outputs of the good pieces."""
        step = self._first_step
        for i, piece in enumerate(self.pieces[:good]):
            here = self._windows.part(self._first_step, step, piece.num_steps)
            yield Outputs(
                piece.num_steps,
                jax.tree.map(lambda x: x[:, here].swapaxes(0, 1), recorded),  # noqa: B023
                scores[i] if piece.ends_epoch and scores is not None else None,
            )
            step += piece.num_steps

    def split(self, most: int) -> list[Piece]:
        """The pieces, split into parts of at most `most` steps."""
        return [part for piece in self.pieces for part in piece.split(most)]


@final
class ArraySource(AbstractSource):
    """Data in memory on the device, with the row order of the members and the `scan` of `fit`.

    `rows` are the members' own rows, on the host, and `shuffle` is that of `fit`.
    """

    def __init__(
        self, data: PyTree, order: RowOrder, *, rows: np.ndarray | None, shuffle: Shuffle, scan: bool | None
    ) -> None:
        self.data, self.order, self.rows = data, order, rows
        self.fault = lambda: not_finite_text(data, argument="data")
        self.integers = lambda: integers_text(data)
        self._order, self._shuffle, self._scan = order, shuffle, scan
        self.epoch = order.epoch

    @property
    def fingerprint(self) -> dict[str, str]:
        """The arrays, the row order and the batch size."""
        order = {
            "shuffle": str(self._shuffle),
            "rows": "None" if self.rows is None else array_text(self.rows),
            "batch_size": str(self._order.batch_size),
        }
        return array_texts(self.data, "data") | order

    def shapes(self) -> PyTree:
        """The shapes of a batch as one member sees it."""
        return member_shapes(self.data, rows=self._order.batch_size)

    def start(self, setting: Setting) -> None:
        """Fixes the one shape of the chunks, which follows from the length of the whole run."""
        begun, epochs, steps = setting.length
        self.cursor, self._periods, self._step = setting.cursor, setting.periods, setting.step
        num_steps = int(steps or 0) if epochs is None else epochs * self._order.epoch
        self.num_steps, self.last_step = num_steps, begun + num_steps
        check_patience_length(setting.program.patience, num_steps, self._order.epoch, begun)
        check_not_exceeded(setting.step, self.last_step, "steps")
        check_last_step(self.last_step)
        self._windows = setting.program.windows
        steps = min([num_steps, *self._periods])
        program, cost = setting.inspect(steps_inside=True, scan=self._scan, steps=steps), setting.cost()
        self._may_raise = cost.callbacks > 0
        if in_a_loop(cost, scan=self._scan):
            devices = 1 if program.layout is None else program.layout.members
            most = _most_steps(len(setting.slots.index), num_steps, devices, self._windows)
            self._compiled = undonated_chunk if self._may_raise else compiled_chunk
        else:
            most, self._compiled = 1, ft.partial(run_stepwise, donate=not self._may_raise)
        if program.layout is None:
            self._compiled = BlockCalls(self._compiled)
        self._queue = self._queue_of(setting, self.last_step, most)

    def _queue_of(self, setting: Setting, last_step: int, most: int) -> PieceQueue:
        order, program = self._order, setting.program
        endless = program.score is None and order.remainder == 0
        if endless:
            most_pieces = min(most, _PIECES_OF_AN_ENDLESS_CHUNK)
            most_steps = most // most_pieces
        else:
            # One piece if each step is a call of its own: members that are called one after another halt in the same.
            most_pieces = 1 if most == 1 else max(1, most // order.epoch) * (2 if order.remainder else 1)
            most_steps = min(order.num_rows // order.batch_size, most)
        pieces = PieceIterator(
            order,
            setting.step,
            last_step,
            limit_after=ft.partial(next_limit, setting.limits, setting.periods),
            most=lambda: min(most_steps, self._steps),
        )
        return PieceQueue(pieces.endless() if endless else pieces.epochs(), most_pieces, most_steps, program.layout)

    def next(self, steps: int, slots: Slots) -> ChunkWork | None:
        """Pieces of at least `steps` steps, or as many as a chunk holds; they end at multiples of `periods`."""
        self._steps = steps
        pieces = self._queue.take(min([steps, *(period - self._step % period for period in self._periods)]))
        if not pieces:
            return None
        options = {"first_step": self._step, "windows": self._windows, "may_raise": self._may_raise}
        return ChunkWork(self._compiled, self._queue.chunk(pieces), pieces, **options)

    def prefetch(self) -> None:
        """Does nothing: the program computes a step's rows from its number."""

    def advance(self, work: AbstractWork | EpochEnd, outcome: Outcome = NOTHING) -> bool:
        """Counts the steps, and puts back the pieces that did not run."""
        self._step += outcome.num_steps
        self.put_back(outcome.rest)
        return False  # chunks validate

    def put_back(self, parts: Sequence[Piece]) -> None:
        """Puts pieces back at the front of the queue."""
        self._queue.put_back(parts)


def _most_steps(num_members: int, num_steps: int, devices: int, windows: Windows) -> int:
    """The maximum number of steps of a chunk, for which its recorded losses take little memory of each device.

    Unless memory limits it, it is a power of two, so that runs of similar lengths share a program.
    """
    wanted = min(max(2 ** (num_steps - 1).bit_length(), _FEWEST_STEPS), _MOST_STEPS)
    most = _MOST_BYTES_OF_LOSSES * devices // (4 * num_members)
    return max(min(wanted if windows.every is None else most * windows.every, wanted), 1)


def make_source(
    data: PyTree | Iterable[PyTree],
    state: TrainState,
    *,
    epochs: int | None,
    rows: Any,
    shuffle: Shuffle,
    batch_size: int | None,
    scan: bool | None,
    layout: Layout | None,
    key: Any,
) -> ArraySource | IterableSource | ReaderSource:
    """The source of a run's batches, by the kind of the data."""
    num_members = state.num_members
    if is_batches(data):
        check_one_pass(data, epochs)
        check_no_array_options(batch_size=batch_size, rows=rows, shuffle=shuffle, scan=scan)
        return IterableSource(data, num_members, layout)
    if isinstance(data, RowReader):
        check_no_scan(scan)
        return _reader_source(data, state, rows=rows, shuffle=shuffle, batch_size=batch_size, layout=layout, key=key)
    data, num_rows = on_device(data, num_members, argument="data", layout=layout, whole=True)
    rows = as_row_indices(rows, num_members, num_rows)
    size = _batch_size(batch_size, num_rows if rows is None else rows.shape[1], layout)
    drawn = row_order(key, state.ids, shuffle, num_rows=num_rows, rows=rows, batch_size=size, layout=layout)
    return ArraySource(data, drawn, rows=rows, shuffle=shuffle, scan=scan)


def _reader_source(
    reader: RowReader,
    state: TrainState,
    *,
    rows: Any,
    shuffle: Shuffle,
    batch_size: int | None,
    layout: Layout | None,
    key: Any,
) -> ReaderSource:
    own = as_row_indices(rows, state.num_members, reader.num_rows)
    check_same_in_processes([np.zeros(0, np.int32) if own is None else own])
    per_epoch = reader.num_rows if own is None else own.shape[1]
    size = _batch_size(batch_size, per_epoch, layout)
    words = order_words(key, to_host(state.ids), shuffle)
    step_rows = StepRows(None if words is None else np.asarray(words), own, num_rows=per_epoch, batch_size=size)
    reading = Reading(reader, step_rows, layout)
    return ReaderSource(reading, step_rows, own=own, shuffle=shuffle, num_rows=reader.num_rows, threads=reader.threads)


def _batch_size(batch_size: int | None, per_epoch: int, layout: Layout | None) -> int:
    size = check_batch_size(batch_size, per_epoch)
    if layout is not None:
        if size % layout.row_parts:
            warn(
                f"Batches of {size} rows do not divide over {layout.row_parts} devices, each of which "
                f"computes all of them.\nA multiple of {layout.row_parts} rows would share the work."
            )
    return size
