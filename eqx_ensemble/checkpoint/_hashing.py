import hashlib
import os
import threading
from queue import Empty, SimpleQueue
from types import TracebackType

_WORTH_A_THREAD = 2**22
_JOB = 2**20
_MOST_THREADS = 3


class Digests:
    """SHA-256 of pieces of memory, computed in other threads while this one reads or writes.

    Hashing, reading and writing all release Python's lock. Every digest is complete when the `with` block ends. Small
    sizes start no threads; the end of the block then computes the digests, as where the system has no more threads.
    """

    def __init__(self, num_bytes: int):
        """**Arguments:** `num_bytes`, the number of bytes that will be hashed."""
        self._jobs: SimpleQueue[tuple[list[bytes], memoryview, int, range] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        if num_bytes >= _WORTH_A_THREAD:
            for _ in range(min(_MOST_THREADS, max(1, (os.cpu_count() or 1) - 1))):
                # Not a pool: those take no work any more while Python exits, when a last save may still be written.
                thread = threading.Thread(target=self._work, name="eqx_ensemble.digests", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the system has no more threads
                    break
                self._threads.append(thread)

    def __enter__(self) -> "Digests":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            while job := self._jobs.get_nowait():
                if kind is None:
                    _hash(*job)
        except Empty:
            pass
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def add(self, data: memoryview, count: int) -> list[bytes]:
        """The digests of `count` equal pieces of `data`: a list that is complete when the block ends."""
        found = [b""] * count
        size = len(data) // max(1, count)
        step = max(1, _JOB // max(1, size))
        for start in range(0, count, step):
            self._jobs.put((found, data, size, range(start, min(start + step, count))))
        return found

    def _work(self) -> None:
        while job := self._jobs.get():
            _hash(*job)


def _hash(found: list[bytes], data: memoryview, size: int, pieces: range) -> None:
    for i in pieces:
        found[i] = hashlib.sha256(data[i * size : (i + 1) * size]).digest()
