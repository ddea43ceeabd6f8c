import atexit
import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

_unseen: set[Future] = set()
"""Jobs in progress, and failed jobs whose error was not raised yet."""


_workers: "weakref.WeakSet[Worker]" = weakref.WeakSet()


class Worker:
    """A thread that runs one job at a time, and keeps the error of a failed job until it is raised."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._job: Future | None = None
        _workers.add(self)

    def start(self, job: Callable[[], None]) -> None:
        """Runs the job in the thread. `wait` must have been called for the one before."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="eqx_ensemble.checkpoint")
        self._job = self._pool.submit(job)
        _unseen.add(self._job)
        self._job.add_done_callback(_forget_if_done)

    @property
    def has_job(self) -> bool:
        """Whether there is a job for which `wait` was not called."""
        return self._job is not None

    def finish(self) -> None:
        """Waits for the job. Its error is left to `wait`, or to the end of the program."""
        if self._job is not None:
            wait([self._job])

    def forget(self) -> None:
        """Forgets the job, in a process that does not have the thread."""
        self._pool = self._job = None

    def wait(self) -> None:
        """Waits for the job; raises its error, once."""
        job, self._job = self._job, None
        if job is not None:
            try:
                job.result()
            finally:
                _unseen.discard(job)


def _forget_if_done(job: Future) -> None:
    if job.exception() is None:
        _unseen.discard(job)


@atexit.register
def _raise_unseen() -> None:
    """Raises when all threads have ended, so that Python prints the error as it exits."""
    for job in list(_unseen):
        _unseen.discard(job)
        job.result()


def _forget_in_child() -> None:
    """Forgets the jobs of the parent, whose threads a forked child does not have."""
    _unseen.clear()
    for worker in list(_workers):
        worker.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
