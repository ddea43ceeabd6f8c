import os
import threading
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import NamedTuple

from ._fingerprint import fingerprints

_WORTH_A_THREAD = 2**22
_JOB = 2**22
_MOST_THREADS = 3


class Pending(NamedTuple):
    """Checksums that are being computed: `found` is complete when `done` has a token for each job."""

    found: list[bytes]
    num_jobs: int
    done: SimpleQueue[BaseException | None]


class _Job(NamedTuple):
    data: memoryview
    first: int
    count: int
    of: Pending

    def run(self) -> None:
        error = None
        try:
            self.of.found[self.first : self.first + self.count] = fingerprints(self.data, self.count)
        except BaseException as failure:
            error = failure
        self.of.done.put(error)


class Digests:
    """Checksums of pieces of memory, computed in other threads while this one reads or writes.

    Hashing, reading and writing all release Python's lock. `result` computes the jobs that no thread has started: for
    small sizes, and if the system has no more threads, all of them.
    """

    def __init__(self, num_bytes: int) -> None:
        """**Arguments:** `num_bytes`, the number of bytes that will be hashed."""
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        if num_bytes >= _WORTH_A_THREAD:
            for _ in range(min(_MOST_THREADS, max(1, (os.cpu_count() or 1) - 1))):
                # Not a pool, which accepts no work while Python exits, when a last save may still be written.
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
            while True:
                self._jobs.get_nowait()
        except Empty:
            pass
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def add(self, data: memoryview, count: int) -> Pending:
        """Starts the checksums of `count` equal pieces of `data`, which must not change until `result` returns."""
        size = len(data) // max(1, count)
        step = max(1, _JOB // max(1, size))
        starts = range(0, count, step)
        pending = Pending([b""] * count, len(starts), SimpleQueue())
        for start in starts:
            pieces = min(step, count - start)
            self._jobs.put(_Job(data[start * size : (start + pieces) * size], start, pieces, pending))
        return pending

    def result(self, pending: Pending) -> list[bytes]:
        """The checksums, once they are complete. This thread helps to compute them."""
        for _ in range(pending.num_jobs):
            while pending.done.empty():
                try:
                    job = self._jobs.get_nowait()
                except Empty:
                    break
                if job is not None:
                    job.run()
            error = pending.done.get()
            if error is not None:
                raise error
        return pending.found

    def _work(self) -> None:
        while job := self._jobs.get():
            job.run()
