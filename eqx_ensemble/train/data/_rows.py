import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import numpy as np

from ... import _keys, _streams

Order = Literal["each", "shared", "given"]
ORDERS = ("each", "shared", "given")


@dataclasses.dataclass(frozen=True)
class RowOrder:
    """Which rows of the data a member sees at which step.

    Every epoch is a fresh permutation, drawn on the host by NumPy's Philox generator keyed by the member's stream
    and the epoch: it depends on the root key and the member's id only, costs microseconds, and can be recomputed
    for any epoch.
    """

    key_data: np.ndarray
    order: Order
    num_rows: int
    rows: np.ndarray | None
    stream: _streams.HostStream

    def epoch(self, epoch: int, present: np.ndarray) -> np.ndarray:
        """The rows of one epoch in order: `(members, rows)`, or `(rows,)` when members share their batches.

        They are drawn for the members at the positions `present`, and zeros for the others.
        """
        if self.order == "given":
            positions = np.arange(self.num_rows, dtype=np.int32)
        elif self.order == "shared":
            positions = self.stream.permutation(self.key_data[0], epoch, self.num_rows).astype(np.int32)
        else:
            positions = np.zeros((len(self.key_data), self.num_rows), np.int32)
            for member in present:
                positions[member] = self.stream.permutation(self.key_data[member], epoch, self.num_rows)
        if self.rows is None:
            return positions
        positions = np.broadcast_to(positions, self.rows.shape)
        return np.take_along_axis(self.rows, positions, axis=1).astype(np.int32)


def row_order(key: Any, ids: jax.Array, order: Order, num_rows: int, rows: np.ndarray | None) -> RowOrder:
    """The row order of a run: `num_rows` rows of data, or the members' own `rows` `(members, n)` of it."""
    if order == "each":
        keys = _keys.member_keys(key, ids, purpose="rows")
    else:
        keys = _keys.member_keys(key, 1, purpose="shared rows")
    per_epoch = num_rows if rows is None else rows.shape[1]
    return RowOrder(np.asarray(jax.random.key_data(keys)), order, per_epoch, rows, _streams.HostStream())


@dataclasses.dataclass(frozen=True)
class Piece:
    """Steps of one epoch that are run in one go: `full` batches, then, at an epoch's end, a smaller last one."""

    full: np.ndarray
    rest: np.ndarray
    ends_epoch: bool

    @property
    def num_steps(self) -> int:
        """The number of its steps."""
        return len(self.full) + (self.ends_epoch and self.rest.size > 0)

    def split(self, most: int) -> "list[Piece]":
        """The piece in parts of at most `most` steps each, at least one."""
        bounds = [*range(0, len(self.full), most), len(self.full)]
        parts = [
            Piece(self.full[start:stop], self.rest, ends_epoch=False) for start, stop in itertools.pairwise(bounds)
        ]
        last = dataclasses.replace(parts.pop() if parts else self, ends_epoch=self.ends_epoch)
        if last.num_steps <= most or len(last.full) == 0:
            return [*parts, last]
        nothing, whole = last.full[:0], dataclasses.replace(last, ends_epoch=False)
        return [*parts, whole, dataclasses.replace(last, full=nothing)]

    def bisect_fault(self, step: int) -> "list[Piece]":
        """The piece in parts, so that a fault that shows at `step` is in a part of one step.

        The weights may have gone wrong one step before the loss that shows it. Parts grow after the fault, because
        where one member fails, others often follow. If no loss shows the fault, `step` is the number of steps: it is
        in the last step or anywhere before.
        """
        length = len(self.full)
        powers = 2 ** np.arange(length.bit_length())
        cuts = {step - 1, step, *(step + powers).tolist()} if step < length else {length // 2, length - 1}
        bounds = [0, *sorted(cut for cut in cuts if 0 < cut < length), length]
        return [
            Piece(self.full[start:stop], self.rest, self.ends_epoch and stop == length)
            for start, stop in itertools.pairwise(bounds)
        ]


@dataclasses.dataclass(frozen=True)
class PieceIterator:
    """A run's rows in pieces that hold at most `most()` full batches, asked for each piece; none goes beyond a limit.

    The run goes from `first_step` to before `last_step`, both counted from the first epoch on; `limit_after` gives the
    next limit after a step. Rows are drawn for the members `present()`, asked for each epoch.

    A piece's `full` has shape `(steps, ..., batch_size)` and its `rest` `(..., remainder)`, where `...` is `members`
    unless members share their batches.
    """

    order: RowOrder
    batch_size: int
    first_step: int
    last_step: int
    limit_after: Callable[[int], int | None]
    most: Callable[[], int]
    present: Callable[[], np.ndarray]

    def epochs(self) -> Iterator[Piece]:
        """Pieces of one epoch each. The last epoch of a run that ends within it has no `rest` and no end."""
        whole, remainder = divmod(self.order.num_rows, self.batch_size)
        per_epoch = whole + (remainder > 0)
        step = self.first_step
        while step < self.last_step:
            epoch, done = divmod(step, per_epoch)
            rows = self.order.epoch(epoch, self.present())
            batches, rest = self._batches(rows), rows[..., whole * self.batch_size :]
            last = min(whole, done + self.last_step - step)
            ends = last == whole and (epoch + 1) * per_epoch <= self.last_step
            while True:
                stop = min(done + self._end(step) - step, last)
                yield Piece(batches[done:stop], rest, ends and stop == last)
                step, done = step + stop - done, stop
                if stop == last:
                    break
            step += ends and remainder > 0

    def endless(self) -> Iterator[Piece]:
        """The same where nothing happens at the end of an epoch, not even a smaller batch.

        A piece then continues into the next epoch, so that there are fewer of them.
        """
        epoch, done = divmod(self.first_step, self.order.num_rows // self.batch_size)
        batches = (self._batches(self.order.epoch(epoch, self.present())) for epoch in itertools.count(epoch))
        waiting, step = next(batches)[done:], self.first_step
        nothing = waiting[0, ..., :0]
        while step < self.last_step:
            steps = self._end(step) - step
            parts, count = [waiting], len(waiting)
            while count < steps:
                parts.append(next(batches))
                count += len(parts[-1])
            waiting = parts[0] if len(parts) == 1 else np.concatenate(parts)
            yield Piece(waiting[:steps], nothing, ends_epoch=False)
            waiting = waiting[steps:]
            step += steps

    def _batches(self, rows: np.ndarray) -> np.ndarray:
        whole = rows.shape[-1] // self.batch_size
        full = rows[..., : whole * self.batch_size].reshape(*rows.shape[:-1], whole, self.batch_size)
        return np.moveaxis(full, -2, 0)

    def _end(self, step: int) -> int:
        """The step before which a piece that begins at `step` ends at the latest."""
        end, limit = min(step + max(self.most(), 1), self.last_step), self.limit_after(step)
        return end if limit is None else min(end, limit)
