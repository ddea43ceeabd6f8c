"""Pieces of rows that are still to run, and the shape in which they run."""

from collections import deque
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from ...sharding._shard import put
from ..compiled._chunk import Chunk
from ..compiled._program import Program
from ._rows import Piece
from ._slots import Slots


class PieceQueue:
    """The pieces that are still to run, and the one shape in which chunks of them run."""

    def __init__(self, drawn: Iterator[Piece], most_pieces: int, most_steps: int, program: Program):
        self._drawn = drawn
        self._most_pieces = most_pieces
        self._most_steps = most_steps
        self._own_rows, self._layout = program.own_rows, program.layout
        self._waiting: deque[Piece] = deque()

    def draw(self, steps: int) -> None:
        """Draws until pieces of at least `steps` steps wait, as far as a chunk holds them and the run goes."""
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

    def put_back(self, pieces: Sequence[Piece]) -> None:
        """Puts pieces in front."""
        self._waiting.extendleft(reversed(pieces))

    def chunk(self, pieces: list[Piece], slots: Slots) -> Chunk:
        """Pieces padded to the one shape, of the members in `slots` unless members share their batches."""
        if self._own_rows and len(slots.index) != pieces[0].rest.shape[0]:
            index = slots.index
            pieces = [Piece(piece.full[:, index], piece.rest[index], piece.ends_epoch) for piece in pieces]
        *members, batch_size = pieces[0].full.shape[1:]
        full = np.zeros((self._most_pieces, *members, self._most_steps, batch_size), np.int32)
        rest = np.zeros((self._most_pieces, *pieces[0].rest.shape), np.int32)
        num_full = np.zeros(self._most_pieces, np.int32)
        ends = np.zeros(self._most_pieces, bool)
        for i, piece in enumerate(pieces):
            full[i, ..., : len(piece.full), :] = np.moveaxis(piece.full, 0, -2)
            rest[i] = piece.rest
            num_full[i] = len(piece.full)
            ends[i] = piece.ends_epoch
        chunk = (full, rest, num_full, ends, np.array(len(pieces), np.int32))
        layout = self._layout
        if layout is None:
            return Chunk(*jax.device_put(chunk))
        own = layout.sharding(None, "members") if self._own_rows else layout.replication
        return Chunk(*map(put, chunk, (own, own, *[layout.replication] * 3)))
