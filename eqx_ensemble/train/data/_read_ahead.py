import functools as ft
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from ..._pytree import PyTree
from ..._sharding import Layout, put
from ..compiled._chunk import Chunk
from ._rows import Piece

# The pieces of a run that are still to run, and the shape of their chunks.


class PieceQueue:
    """The pieces that are still to run, and the one shape of their chunks."""

    def __init__(self, pieces: Iterator[Piece], most_pieces: int, most_steps: int, layout: Layout | None) -> None:
        self._pieces = pieces
        self._most_pieces = most_pieces
        self._most_steps = most_steps
        self._layout = layout
        self._waiting: deque[Piece] = deque()
        self._chunk = ft.lru_cache(maxsize=64)(self._make_chunk)  # transfers take as long as a small step

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
        return self._chunk(*pieces)

    def _make_chunk(self, *pieces: Piece) -> Chunk:
        num_full = np.zeros(self._most_pieces, np.int32)
        ends = np.zeros(self._most_pieces, bool)
        num_full[: len(pieces)] = [piece.full for piece in pieces]
        ends[: len(pieces)] = [piece.ends_epoch for piece in pieces]
        arrays = (num_full, ends, np.array(len(pieces), np.int32))
        if self._layout is None:
            return Chunk(*jax.device_put(arrays), most_steps=self._most_steps)
        there = [put(x, self._layout.sharding()) for x in arrays]
        return Chunk(*there, most_steps=self._most_steps)


class ReadAhead:
    """The batches of consecutive steps, read ahead by threads.

    `begin(step)` prepares a read, and returns the function that a thread calls; `place(batch, step)` puts its result on
    the device. No read begins for steps from `last` on.
    """

    state: Any = None  # a step's rows follow from its number

    def __init__(
        self,
        begin: Callable[[int], Callable[[], PyTree]],
        place: Callable[[PyTree, int], PyTree],
        *,
        first: int,
        last: int,
        threads: int,
    ) -> None:
        self._begin, self._place, self._last, self._threads = begin, place, last, threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="eqx_ensemble-rows")
        self._reads: deque[Future[PyTree]] = deque()
        self._step = first  # of the next batch
        self._drawn: list[PyTree] = []
        self._error: Exception | None = None

    def restart(self, step: int) -> None:
        """Discards what has been read, and continues at a step."""
        for read in self._reads:
            read.cancel()
        self._reads.clear()
        self._step, self._drawn, self._error = step, [], None

    def fill(self) -> None:
        """Submits the reads of the next batches."""
        while len(self._reads) < self._threads and (step := self._step + len(self._reads)) < self._last:
            self._reads.append(self._pool.submit(self._begin(step)))

    def draw(self) -> None:
        """Waits for the next batch. An error is raised only when the batch is taken."""
        if self._drawn or self._error is not None:
            return
        self.fill()
        try:
            self._drawn = [self._place(self._reads[0].result(), self._step)]
        except Exception as error:
            self._error = error
            return
        self._reads.popleft()
        self._step += 1
        self.fill()

    @property
    def has_drawn(self) -> bool:
        """Whether the next batch is drawn."""
        return bool(self._drawn)

    def take(self) -> PyTree:
        """The next batch; raises the error of reading it."""
        self.draw()
        if self._error is not None:
            raise self._error
        return self._drawn.pop()

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
