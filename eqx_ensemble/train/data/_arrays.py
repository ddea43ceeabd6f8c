import dataclasses
import functools as ft
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from ... import _check
from ...distributed import to_host
from ...sharding._layout import Layout
from ...sharding._shard import put
from .._status import Status
from ..compiled._chunk import Chunk, compiled_chunk, undonated_chunk
from ..compiled._limits import next_limit
from ..compiled._program import Carry, Inputs, cost_of_step, in_a_loop
from ..compiled._stepwise import run_stepwise
from ..host._loop import Loop
from ..resume._texts import array_text, array_texts
from ._data import shapes_of_one
from ._place import Length
from ._rows import Cut, Piece, RowOrder

_FEWEST_STEPS, _MOST_STEPS = 32, 2048
_PIECES_OF_AN_ENDLESS_CHUNK = 4  # room for the parts of one with a fault
_MOST_BYTES_OF_ROWS = 2**25


class Feed:
    """The pieces of a run that wait for their turn, and the one shape in which chunks of them are run."""

    def __init__(self, drawn: Iterator[Piece], most_pieces: int, most_steps: int):
        self._drawn = drawn
        self._most_pieces = most_pieces
        self._most_steps = most_steps
        self._waiting: deque[Piece] = deque()

    def draw(self, steps: int) -> None:
        """Has pieces of at least `steps` steps waiting, as far as a chunk holds them and the run goes."""
        while len(self._waiting) < self._most_pieces and sum(piece.num_steps for piece in self._waiting) < steps:
            piece = next(self._drawn, None)
            if piece is None:
                return
            self._waiting.append(piece)

    def take(self, steps: int) -> list[Piece]:
        """The next pieces of at least `steps` steps; none at the end of the run."""
        self.draw(steps)
        taken: list[Piece] = []
        while self._waiting and len(taken) < self._most_pieces and sum(piece.num_steps for piece in taken) < steps:
            taken.append(self._waiting.popleft())
        return taken

    def give_back(self, pieces: list[Piece]) -> None:
        """Puts pieces in front."""
        self._waiting.extendleft(reversed(pieces))

    def chunk(self, batch: list[Piece], places: np.ndarray | None, layout: Layout | None) -> Chunk:
        """Pieces padded to the one shape, of the members present; `None` where members share their batches."""
        if places is not None and len(places) != batch[0].rest.shape[0]:
            batch = [Piece(piece.full[:, places], piece.rest[places], piece.ends_epoch) for piece in batch]
        *members, batch_size = batch[0].full.shape[1:]
        full = np.zeros((self._most_pieces, *members, self._most_steps, batch_size), np.int32)
        rest = np.zeros((self._most_pieces, *batch[0].rest.shape), np.int32)
        num_full = np.zeros(self._most_pieces, np.int32)
        ends = np.zeros(self._most_pieces, bool)
        for i, piece in enumerate(batch):
            full[i, ..., : len(piece.full), :] = np.moveaxis(piece.full, 0, -2)
            rest[i] = piece.rest
            num_full[i] = len(piece.full)
            ends[i] = piece.ends_epoch
        chunk = (full, rest, num_full, ends, np.array(len(batch), np.int32))
        if layout is None:
            return Chunk(*jax.device_put(chunk))
        own = layout.replicated if places is None else layout.sharding(None, "members")
        return Chunk(*map(put, chunk, (own, own, *[layout.replicated] * 3)))


class Arrays(NamedTuple):
    """Data in memory, on the device, the order in which members see its rows, and how steps run (`scan` of `fit`)."""

    data: PyTree
    order: RowOrder
    batch_size: int
    scan: bool | None = None

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches in an epoch."""
        return -(-self.order.num_rows // self.batch_size)

    @property
    def rows(self) -> np.ndarray | None:
        """The rows `(members, n)` that members see; `None` where each sees all."""
        return self.order.rows

    @property
    def texts(self) -> dict[str, str]:
        """What the data are, in short texts."""
        order = {
            "order": self.order.order,
            "rows": "None" if self.rows is None else array_text(self.rows),
            "batch_size": str(self.batch_size),
        }
        return array_texts(self.data, "data") | order

    def batch(self) -> PyTree:
        """The shapes of a batch as one member sees it."""
        return shapes_of_one(self.data, rows=self.batch_size)

    def run(self, loop: Loop, inputs: Inputs, carry: Carry, length: Length) -> Carry:
        """Runs in compiled chunks of steps."""
        num_steps = int(length.steps or 0) if length.epochs is None else length.epochs * self.steps_per_epoch
        _check.patience_fits(loop.program.patience, num_steps, self.steps_per_epoch, length.begun, name="fit")
        inputs, carry = loop.begin(dataclasses.replace(inputs, data=self.data), carry)
        first_step, last_step = loop.record.steps, length.begun + num_steps
        _check.not_beyond(first_step, last_step, "steps")
        _check.countable(last_step, name="fit")
        feed, compiled = self._feed(loop, inputs, carry, num_steps, last_step)
        own_rows = loop.program.own_rows
        loop.line.total, loop.line.n = num_steps, first_step - length.begun
        while not loop.over(carry) and (batch := feed.take(steps := loop.steps_in_a_row())):
            start, before = time.perf_counter(), loop.record.steps
            chunk = feed.chunk(batch, loop.roster.places if own_rows else None, loop.program.layout)
            try:
                after, results = loop.call(compiled, inputs, chunk, carry=carry)
                feed.draw(steps)  # while the device works
                done, again, outputs = to_host(results)
            except RuntimeError:
                if not loop.can_halve(batch):
                    raise
                feed.give_back([part for piece in batch for part in piece.split(loop.steps_per_chunk)])
                continue
            carry, done = after, int(done)
            _record(loop, batch[:done], outputs)
            loop.carry = carry
            if again:
                (losses, _), _, _ = outputs
                fault = _first_fault(losses[done, :, : len(batch[done].full)], carry)
                feed.give_back([*batch[done].around(fault), *batch[done + 1 :]])
            elif done < len(batch):
                feed.give_back(batch[done:])
            else:
                steps_done = loop.record.steps - before
                loop.pace(steps_done, time.perf_counter() - start, last_step - loop.record.steps)
            if done > 0:
                loop.report(loop.record.steps - before, carry)
            inputs, carry = loop.care_for(inputs, carry)
            loop.save(carry, if_due=True)
            if not loop.over(carry):
                inputs, carry = loop.without_those_who_left(inputs, carry, last_step - loop.record.steps)
        loop.save(carry, if_due=False)
        return loop.last_validation(inputs, carry)

    def _feed(
        self, loop: Loop, inputs: Inputs, carry: Carry, num_steps: int, last_step: int
    ) -> tuple[Feed, Callable[..., tuple[Carry, PyTree]]]:
        """The pieces of the run in the shape of its chunks, and what runs one; both follow from the whole length."""
        members = inputs.fixed.key.shape if loop.program.own_rows else ()
        rows = jax.ShapeDtypeStruct((*members, self.batch_size), np.int32)
        loop.look(inputs, carry, rows, steps_inside=True, scan=self.scan)
        cost = cost_of_step(loop.program, inputs, carry, rows)
        loop.may_raise = cost.callbacks > 0
        layout = loop.program.layout
        devices = 1 if layout is None else layout.members
        if in_a_loop(cost, scan=self.scan):
            most, compiled = (
                _most_steps(rows, num_steps, devices),
                undonated_chunk if loop.may_raise else compiled_chunk,
            )
        else:
            most, compiled = 1, ft.partial(run_stepwise, donate=not loop.may_raise)
        num_rows = self.order.num_rows
        endless = loop.program.score is None and num_rows % self.batch_size == 0
        if endless:
            most_pieces = min(most, _PIECES_OF_AN_ENDLESS_CHUNK)
            most_steps = most // most_pieces
        else:
            most_pieces = max(1, most // self.steps_per_epoch)
            most_steps = min(num_rows // self.batch_size, most)
        limits = np.unique(np.asarray([] if inputs.limits.steps is None else to_host(inputs.limits.steps), np.int64))
        most_now, present = lambda: min(most_steps, loop.steps_per_chunk), lambda: loop.roster.present
        limit_after = ft.partial(next_limit, limits, loop.save_every)
        cut = Cut(self.order, self.batch_size, loop.record.steps, last_step, limit_after, most_now, present)
        return Feed(cut.endless() if endless else cut.epochs(), most_pieces, most_steps), compiled


def arrays_of(data: PyTree, order: RowOrder, *, batch_size: int | None, scan: bool | None) -> Arrays:
    """Data that are on the device already, in batches of a given size, 32 or as many as there are."""
    batch_size = min(32, order.num_rows) if batch_size is None else batch_size
    _check.batch_fits(batch_size, order.num_rows, name="fit")
    return Arrays(data, order, batch_size, scan)


def _most_steps(rows: jax.ShapeDtypeStruct, num_steps: int, devices: int) -> int:
    """How many steps a chunk may hold, so that their rows take little memory of each device.

    They are a power of two, so that runs of similar lengths have one program.
    """
    wanted = min(max(2 ** (num_steps - 1).bit_length(), _FEWEST_STEPS), _MOST_STEPS)
    return max(min(_MOST_BYTES_OF_ROWS * devices // (4 * rows.size), wanted), 1)


def _first_fault(losses: np.ndarray, carry: Carry) -> int:
    """The first of the steps `(members, steps)` whose loss shows that a member failed; their number if none does."""
    training = to_host(carry.moving.status) == Status.OK
    faulty = ~np.isfinite(losses[training]).all(axis=0)
    return int(np.argmax(faulty)) if faulty.any() else losses.shape[1]


def _record(loop: Loop, batch: list[Piece], outputs: PyTree) -> None:
    full, last, scores = outputs
    for i, piece in enumerate(batch):
        if len(piece.full):
            loop.add_steps(jax.tree.map(lambda x: np.moveaxis(x[i, :, : len(piece.full)], 1, 0), full))  # noqa: B023
        if piece.ends_epoch and last is not None:
            loop.add_steps(jax.tree.map(lambda x: x[i : i + 1], last))  # noqa: B023
        if piece.ends_epoch and scores is not None:
            loop.add_scores(scores[i])
