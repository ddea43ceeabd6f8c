import time
from collections import deque
from collections.abc import Iterator

import jax
import numpy as np
from jaxtyping import PyTree

from .. import _check
from ._apart import run_stepwise
from ._chunk import Chunk, compiled_chunk
from ._loop import Loop
from ._program import Carry, Inputs, in_a_loop
from ._rows import Cut, Piece, RowOrder
from ._state import OK

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
        while len(self._waiting) < self._most_pieces and sum(len(piece.full) for piece in self._waiting) < steps:
            piece = next(self._drawn, None)
            if piece is None:
                return
            self._waiting.append(piece)

    def take(self, steps: int) -> list[Piece]:
        """The next pieces of at least `steps` steps; none at the end of the run."""
        self.draw(steps)
        taken: list[Piece] = []
        while self._waiting and len(taken) < self._most_pieces and sum(len(piece.full) for piece in taken) < steps:
            taken.append(self._waiting.popleft())
        return taken

    def give_back(self, pieces: list[Piece]) -> None:
        """Puts pieces in front."""
        self._waiting.extendleft(reversed(pieces))

    def chunk(self, batch: list[Piece], present: np.ndarray | None) -> Chunk:
        """Pieces padded to the one shape, of the members present; `None` where members share their batches."""
        if present is not None and len(present) < batch[0].rest.shape[0]:
            batch = [Piece(piece.full[:, present], piece.rest[present], piece.ends_epoch) for piece in batch]
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
        return Chunk(*jax.device_put((full, rest, num_full, ends, np.array(len(batch), np.int32))))


def run_arrays(
    loop: Loop,
    inputs: Inputs,
    carry: Carry,
    order: RowOrder,
    *,
    batch_size: int | None,
    epochs: int | None,
    steps: int | None,
) -> Carry:
    """Runs over in-memory arrays in compiled chunks of steps."""
    batch_size = min(32, order.num_rows) if batch_size is None else batch_size
    _check.batch_fits(batch_size, order.num_rows, name="fit")
    per_epoch = -(-order.num_rows // batch_size)
    num_steps = int(steps or 0) if epochs is None else epochs * per_epoch
    _check.patience_fits(loop.program.patience, num_steps, per_epoch, loop.record.steps, name="fit")
    members = inputs.fixed.key.shape if loop.program.own_rows else ()
    rows = jax.ShapeDtypeStruct((*members, batch_size), np.int32)
    loop.look(inputs, carry, rows, steps_inside=True)
    looped = in_a_loop(loop.program, inputs, carry, rows)
    most, compiled = (_most_steps(rows, num_steps), compiled_chunk) if looped else (1, run_stepwise)
    endless = loop.program.score is None and order.num_rows % batch_size == 0
    if endless:
        most_pieces = min(most, _PIECES_OF_AN_ENDLESS_CHUNK)
        most_steps = most // most_pieces
    else:
        most_pieces = max(1, most // per_epoch)
        most_steps = min(order.num_rows // batch_size, most)
    first_step, last_step = loop.record.steps, loop.record.steps + num_steps
    limits = np.unique([] if inputs.limits.steps is None else inputs.limits.steps)
    most_now, present = lambda: min(most_steps, loop.steps_per_chunk), lambda: loop.roster.present
    cut = Cut(order, batch_size, first_step, last_step, limits, most_now, present)
    feed = Feed(cut.endless() if endless else cut.epochs(), most_pieces, most_steps)
    own_rows = loop.program.own_rows
    loop.line.total = num_steps
    while batch := feed.take(loop.steps_per_chunk):
        start, before = time.perf_counter(), loop.record.steps
        chunk = feed.chunk(batch, loop.roster.present if own_rows else None)
        carry, (done, again, outputs) = loop.call(compiled, inputs, chunk, carry=carry)
        feed.draw(loop.steps_per_chunk)  # while the device works
        done, outputs = int(done), jax.tree.map(np.asarray, outputs)
        _record(loop, batch[:done], outputs)
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
        if loop.over(carry):
            break
        inputs, carry = loop.without_those_who_left(inputs, carry, last_step - loop.record.steps)
    return loop.last_validation(inputs, carry)


def _most_steps(rows: jax.ShapeDtypeStruct, num_steps: int) -> int:
    """How many steps a chunk may hold, so that their rows take little memory.

    They are a power of two, so that runs of similar lengths have one program.
    """
    wanted = min(max(2 ** (num_steps - 1).bit_length(), _FEWEST_STEPS), _MOST_STEPS)
    return max(min(_MOST_BYTES_OF_ROWS // (4 * rows.size), wanted), 1)


def _first_fault(losses: np.ndarray, carry: Carry) -> int:
    """The first of the steps `(members, steps)` whose loss shows that a member failed; their number if none does."""
    training = np.asarray(carry.moving.status) == OK
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
