"""The pieces of a run that are still to run, and the shape of their chunks."""

from collections import deque
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from ...sharding._layout import Layout
from ...sharding._shard import put
from ..compiled._chunk import Chunk
from ._rows import Piece


class PieceQueue:
    """The pieces that are still to run, and the one shape of their chunks."""

    def __init__(self, pieces: Iterator[Piece], most_pieces: int, most_steps: int, layout: Layout | None) -> None:
        self._pieces = pieces
        self._most_pieces = most_pieces
        self._most_steps = most_steps
        self._layout = layout
        self._waiting: deque[Piece] = deque()

    def take(self, steps: int) -> list[Piece]:
        """The next pieces of at least `steps` steps, as far as a chunk holds them; none at the end of the run."""
        taken: list[Piece] = []
        while len(taken) < self._most_pieces and sum(piece.num_steps for piece in taken) < steps:
            piece = self._waiting.popleft() if self._waiting else next(self._pieces, None)
            if piece is None:
                break
            taken.append(piece)
        return taken

    def put_back(self, pieces: Sequence[Piece]) -> None:
        """Puts pieces back at the front."""
        self._waiting.extendleft(reversed(pieces))

    def chunk(self, pieces: list[Piece]) -> Chunk:
        """Pads pieces to the one shape."""
        num_full = np.zeros(self._most_pieces, np.int32)
        ends = np.zeros(self._most_pieces, bool)
        num_full[: len(pieces)] = [piece.full for piece in pieces]
        ends[: len(pieces)] = [piece.ends_epoch for piece in pieces]
        arrays = (num_full, ends, np.array(len(pieces), np.int32))
        if self._layout is None:
            return Chunk(*jax.device_put(arrays), most_steps=self._most_steps)
        there = [put(x, self._layout.replication) for x in arrays]
        return Chunk(*there, most_steps=self._most_steps)
