"""Dispatches the jobs of an asynchronous search to workers."""

import abc
from collections.abc import Callable
from typing import Any

import numpy as np

from ..train._run import Run
from ._job_log import JobLog
from ._ladder import Job
from ._shard import Shard


class AbstractSearch(abc.ABC):
    """Chooses the jobs of a search from the results so far."""

    @abc.abstractmethod
    def next_job(self) -> tuple[Job, Callable[[], dict[str, Any]]] | None:
        """The next job and a function that makes its arguments; `None` while it depends on running jobs."""

    @abc.abstractmethod
    def finish(self, job: Job, run: Run[Any]) -> None:
        """Adds the result of a job."""

    @abc.abstractmethod
    def abandon(self, job: Job) -> None:
        """Marks a job as failed after all retries."""


class Dispatcher:
    """Sends a job to each idle worker, and passes results to the search in the order of the log."""

    def __init__(self, search: AbstractSearch, order: JobLog, ids: np.ndarray, *, workers: int) -> None:
        self._search, self._order, self._ids, self._idle = search, order, ids, workers
        self._running: dict[int, Job] = {}
        self._count = 0

    def shards(self) -> list[Shard]:
        """The next shards, at most one per idle worker."""
        found = []
        while self._idle and (pair := self._search.next_job()) is not None:
            job, own = pair
            positions = np.array(job.members)
            found.append(Shard(self._count, positions, self._ids[positions], own))
            self._running[self._count] = job
            self._count += 1
            self._idle -= 1
        return found

    def end(self, shard: Shard, run: Run[Any] | None) -> list[Shard]:
        """Records the result of a shard, `None` if it failed after all retries. Returns the next shards."""
        self._order.end(self._running.pop(shard.number), run)
        found = []
        while (turn := self._order.next()) is not None:
            if turn.run is None:
                self._search.abandon(turn.job)
            else:
                self._search.finish(turn.job, turn.run)
            self._idle += not turn.is_late
            found += self.shards()
        return found
