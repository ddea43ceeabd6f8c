import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import numpy as np

from .. import _keys, _streams
from ._limits import next_limit

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

    def around(self, step: int) -> "list[Piece]":
        """The piece in parts, so that a fault that shows at `step` will lie in a part of one step.

        The weights may have gone wrong one step before the loss that shows it. Parts grow after the fault, because
        where one member fails, others often follow. If no loss shows the fault, `step` is the number of steps: it lies
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


def pieces(
    order: RowOrder,
    *,
    batch_size: int,
    num_steps: int,
    limits: np.ndarray,
    most: Callable[[], int],
    present: Callable[[], np.ndarray],
) -> Iterator[Piece]:
    """The whole run in pieces of at most `most()` full batches, asked for each piece; none goes beyond a limit.

    Rows are drawn for the members `present()`, asked for each epoch.

    `full` has shape `(steps, ..., batch_size)` and `rest` `(..., remainder)`, where `...` is `members` unless members
    share their batches. A run that ends in the middle of an epoch has an empty `rest` and does not end the epoch.
    """
    whole, remainder = divmod(order.num_rows, batch_size)
    done, epoch = 0, 0
    while done < num_steps:
        rows = order.epoch(epoch, present())
        full = rows[..., : whole * batch_size].reshape(*rows.shape[:-1], whole, batch_size)
        full = np.moveaxis(full, -2, 0)[: num_steps - done]
        rest = rows[..., whole * batch_size :]
        after = done + len(full)
        ends = len(full) == whole and (remainder == 0 or after < num_steps)
        after += ends and remainder > 0
        start, last = 0, False
        while not last:
            stop = start + max(most(), 1)
            limit = next_limit(limits, done + start)
            stop = stop if limit is None else min(stop, limit - done)
            last = stop >= len(full)
            yield Piece(full[start:stop], rest, ends and last)
            start = stop
        done = after
        epoch += 1


def endless_pieces(
    order: RowOrder,
    *,
    batch_size: int,
    num_steps: int,
    limits: np.ndarray,
    most: Callable[[], int],
    present: Callable[[], np.ndarray],
) -> Iterator[Piece]:
    """The same for a run in which nothing happens at the end of an epoch, not even a smaller batch.

    A piece then goes on into the next epoch, so that there are fewer of them.
    """
    whole = order.num_rows // batch_size
    epochs = (order.epoch(epoch, present()) for epoch in itertools.count())
    batches = (np.moveaxis(rows.reshape(*rows.shape[:-1], whole, batch_size), -2, 0) for rows in epochs)
    waiting, done = next(batches), 0
    nothing = waiting[0, ..., :0]
    while done < num_steps:
        steps = min(max(most(), 1), num_steps - done)
        limit = next_limit(limits, done)
        steps = steps if limit is None else min(steps, limit - done)
        parts, count = [waiting], len(waiting)
        while count < steps:
            parts.append(next(batches))
            count += len(parts[-1])
        waiting = parts[0] if len(parts) == 1 else np.concatenate(parts)
        yield Piece(waiting[:steps], nothing, ends_epoch=False)
        waiting = waiting[steps:]
        done += steps
