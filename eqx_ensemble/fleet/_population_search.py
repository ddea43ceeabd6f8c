"""Asynchronous population-based training in the caller's process: finished rounds and the next round of each shard."""

import functools as ft
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .._ensemble import Ensemble
from ..distributed import to_host
from ..methods._evolve import Evolution
from ..methods._scores import last_scores
from ..train._check_fit import check_history
from ..train._run import Run
from ..train._status import Status
from ._dispatch import AbstractSearch
from ._divide import divide
from ._fitting import Fitting
from ._ladder import Job
from ._shard_rounds import Round, ShardRounds, choose_donors, copy_donors
from ._stop_members import stop_members_of


class PopulationSearch(AbstractSearch):
    """Trains shards round by round; before a round, a shard's worst members become copies of the best of all.

    Members are ranked by their last finished rounds, as the workers of the paper rank by the latest checkpoints.

    **Attributes:**

    - `past`: the finished rounds of all shards.
    """

    def __init__(
        self,
        ensemble: Ensemble[Any],
        fitting: Fitting,
        evolution: Evolution,
        *,
        first: dict[str, Any],
        folder: Path | None,
        size: int,
        key: Any,
    ) -> None:
        self._ensemble, self._fitting, self._evolution = ensemble, fitting, evolution
        self._first, self._folder, self._key = first, folder, key
        self._windows = check_history(fitting.common.get("history", "all"))
        members = divide(len(ensemble), size)
        self.past = ShardRounds(np.asarray(ensemble.ids), members, [[] for _ in members], set())
        self._waiting = deque(range(len(members)))
        self._donors: dict[int, np.ndarray] = {}  # of running shards, after their last finished round

    def next_job(self) -> tuple[Job, Callable[[], dict[str, Any]]] | None:
        for _ in range(len(self._waiting)):
            index = self._waiting.popleft()
            start = self._start(index)
            if start is not None:
                number = len(self.past.rounds[index])
                job = Job(tuple(self.past.members[index].tolist()), number)
                return job, ft.partial(self._part, start, index, number)
            self._waiting.append(index)
        return None

    def finish(self, job: Job, run: Run[Any]) -> None:
        index = self._shard_of(job)
        self.past.abandoned.discard(index)
        rounds, members = self.past.rounds[index], self.past.members[index]
        finished = Round(run, last_scores(run), to_host(run.train_state.hyper), members)
        rounds[-1:] = [*(one._replace(run=None, donors=self._donors[index]) for one in rounds[-1:]), finished]
        if len(rounds) < len(self._evolution.keys):
            self._waiting.append(index)

    def abandon(self, job: Job) -> None:
        self.past.abandoned.add(self._shard_of(job))

    def stop_incomplete_shards(self) -> None:
        """Stops the members of shards with unfinished rounds, at the end of their last finished round."""
        for rounds in self.past.rounds:
            if 0 < len(rounds) < len(self._evolution.keys):
                run = rounds[-1].run
                rounds[-1] = rounds[-1]._replace(run=stop_members_of(run, np.flatnonzero(run.status == Status.OK)))

    def _shard_of(self, job: Job) -> int:
        return next(i for i, members in enumerate(self.past.members) if members[0] == job.members[0])

    def _start(self, index: int) -> Any:
        """The run from which the next round starts; `None` if all its members diverged and there are no donors yet."""
        if not self.past.rounds[index]:
            return self._ensemble[self.past.members[index]]
        donors = choose_donors(self.past, index, self._evolution)
        run = copy_donors(self.past, index, donors, self._evolution.explore, windows=self._windows, key=self._key)
        if not (to_host(run.train_state.status) == Status.OK).any():
            return None
        self._donors[index] = donors
        return run

    def _part(self, start: Any, index: int, number: int) -> dict[str, Any]:
        positions = self.past.members[index]
        folder = None if self._folder is None else self._folder / f"round-{number:02d}" / f"shard-{index:05d}"
        fitting, more = (self._fitting.for_runs, {}) if number else (self._fitting, self._first)
        return fitting.part(start, positions, self.past.ids[positions], folder, **self._evolution.length, **more)
