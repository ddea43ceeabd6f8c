import itertools
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from tqdm.std import tqdm

from .. import _check
from ._data import on_device
from ._interrupt import Interruption
from ._program import (
    Carry,
    Chunk,
    Inputs,
    Program,
    compiled_batch,
    compiled_chunk,
    compiled_validation,
    slow_in_loops,
)
from ._rows import Piece, RowOrder, pieces
from ._run import Record
from ._state import DIVERGED, OK, STOPPED

_SECONDS_PER_CHUNK = 0.5
_FIRST_STEPS = 32
_MOST_STEPS = 2048
_MOST_BYTES_OF_ROWS = 2**25


class Loop:
    """The host's side of a run: what to do with a chunk's results, when to stop, how long the next chunk may be."""

    def __init__(self, program: Program, interruption: Interruption, record: Record, line: tqdm):
        self.program = program
        self.record = record
        self.line = line
        self._interruption = interruption
        self._measured = 0
        self.steps_per_chunk = _FIRST_STEPS

    def over(self, carry: Carry) -> bool:
        """Whether the run ends here: interrupted, or no member trains any more."""
        return self._interruption.requested or not (np.asarray(carry.moving.status) == OK).any()

    def last_validation(self, inputs: Inputs, carry: Carry) -> Carry:
        """Validates where a run ends within an epoch, so that no member's last weights go unjudged."""
        if self.program.score is None or self.record.validated or self.over(carry):
            return carry
        carry, scores = compiled_validation((self.program, inputs), carry)
        self.record.add_scores(scores)
        return carry

    def report(self, steps: int, carry: Carry) -> None:
        """Moves the progress line on by `steps`."""
        losses, scores = self.record.latest
        status = np.asarray(carry.moving.status)
        shown = {"loss": f"{_mean(losses):.4g}"}
        if scores is not None:
            shown["best validation"] = f"{_mean(scores):.4g}"
        for name, code in (("stopped", STOPPED), ("diverged", DIVERGED)):
            if (status == code).any():
                shown[name] = str(int((status == code).sum()))
        self.line.set_postfix(shown, refresh=False)
        self.line.update(steps)

    def pace(self, steps: int, seconds: float) -> None:
        """Sets the next chunk's length from the last one's time; the first one's time is the compiler's."""
        self._measured += 1
        if self._measured > 1:
            wanted = steps * _SECONDS_PER_CHUNK / max(seconds, 1e-6)
            self.steps_per_chunk = int(np.clip(wanted, 1, 4 * self.steps_per_chunk))


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
    _check.patience_fits(loop.program.patience, num_steps, per_epoch, name="fit")
    num_members = inputs.fixed.key.shape[0]
    row_bytes = 4 * batch_size * (num_members if loop.program.own_rows else 1)
    most = int(np.clip(min(_MOST_BYTES_OF_ROWS // row_bytes, num_steps), 1, _MOST_STEPS))
    some_rows = jax.ShapeDtypeStruct((*([num_members] if loop.program.own_rows else []), batch_size), jnp.int32)
    if slow_in_loops(loop.program, inputs, carry, some_rows):
        most = 1
    steps_shape = min(order.num_rows // batch_size, most)
    pieces_shape = max(1, min(most // per_epoch, -(-num_steps // per_epoch)))

    feed = pieces(
        order,
        batch_size=batch_size,
        num_steps=num_steps,
        most=lambda: min(steps_shape, loop.steps_per_chunk),
    )
    chunks = _chunks(feed, loop, pieces_shape, steps_shape)
    loop.line.total = num_steps
    upcoming = next(chunks, None)
    while upcoming is not None:
        batch, chunk = upcoming
        start = time.perf_counter()
        carry, outputs = compiled_chunk((loop.program, inputs, chunk), carry)
        upcoming = next(chunks, None)  # drawn while the device works
        before = loop.record.steps
        _record(loop.record, batch, outputs)
        done = loop.record.steps - before
        loop.pace(done, time.perf_counter() - start)
        loop.report(done, carry)
        if loop.over(carry):
            break
    return loop.last_validation(inputs, carry)


def _chunks(
    feed: Iterator[Piece], loop: Loop, pieces_shape: int, steps_shape: int
) -> Iterator[tuple[list[Piece], Chunk]]:
    """Pieces gathered into chunks of one shape, as many as the pace asks for."""
    waiting = next(feed, None)
    while waiting is not None:
        batch, steps = [], 0
        while waiting is not None and len(batch) < pieces_shape and (not batch or steps < loop.steps_per_chunk):
            batch.append(waiting)
            steps += len(waiting.full)
            waiting = next(feed, None)
        yield batch, _padded(batch, pieces_shape, steps_shape)


def _padded(batch: list[Piece], pieces_shape: int, steps_shape: int) -> Chunk:
    full = np.zeros((pieces_shape, steps_shape, *batch[0].full.shape[1:]), np.int32)
    rest = np.zeros((pieces_shape, *batch[0].rest.shape), np.int32)
    num_full = np.zeros(pieces_shape, np.int32)
    ends = np.zeros(pieces_shape, bool)
    for i, piece in enumerate(batch):
        full[i, : len(piece.full)] = piece.full
        rest[i] = piece.rest
        num_full[i] = len(piece.full)
        ends[i] = piece.ends_epoch
    return Chunk(*jax.tree.map(jnp.asarray, (full, rest, num_full, ends, np.int32(len(batch)))))


def _record(record: Record, batch: list[Piece], outputs: PyTree) -> None:
    full, last, scores = jax.tree.map(np.asarray, outputs)
    for i, piece in enumerate(batch):
        record.add_steps(_part(full, (i, slice(len(piece.full)))))
        if piece.ends_epoch and last is not None:
            record.add_steps(_part(last, slice(i, i + 1)))
        if piece.ends_epoch and scores is not None:
            record.add_scores(scores[i])


def _part(tree: PyTree, index: Any) -> PyTree:
    return jax.tree.map(lambda x: x[index], tree)


def run_batches(
    loop: Loop, inputs: Inputs, carry: Carry, batches: Iterable[PyTree], *, epochs: int | None, steps: int | None
) -> Carry:
    """Runs over an iterable of batches, one compiled step per batch."""
    num_members = inputs.fixed.key.shape[0]
    loop.line.total = steps
    for epoch in itertools.count() if epochs is None else range(epochs):
        before = loop.record.steps
        for batch in batches:
            batch, _ = on_device(batch, num_members, argument="batch", name="fit")
            carry, outputs = compiled_batch((loop.program, inputs, batch), carry)
            loop.record.add_steps(jax.tree.map(lambda x: x[None], outputs))
            loop.report(1, carry)
            if loop.over(carry) or loop.record.steps == steps:
                if epoch == 0 and loop.program.patience is not None:
                    warnings.warn(_check.IDLE_PATIENCE, stacklevel=3)
                return loop.last_validation(inputs, carry)
        _check.some_batches(loop.record.steps - before, epoch, name="fit")
        if loop.program.score is not None:
            carry, scores = compiled_validation((loop.program, inputs), carry)
            loop.record.add_scores(scores)
        if loop.over(carry):
            break
    return carry


def _mean(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else float("nan")
