"""The caller's side of a population whose shards do not wait for each other."""

import functools as ft
from collections import deque
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
from ._cut import divide
from ._fitting import Fitting
from ._ladder import Job
from ._order import Order
from ._rung import stop_members_of
from ._shard import Shard
from ._shard_rounds import Round, ShardRounds, choose_donors, copy_donors

_FIRST = ("hyper", "state", "trainable")  # what `fit` takes with an ensemble, and not with a run


class Exchange:
    """Shards that go from round to round. When one begins a round, its worst members become copies of the best.

    The best and the worst are those of the last round that each member has ended: what workers of the paper read of
    each other's files.

    **Attributes:**

    - `past`: the rounds that all shards have ended, and the shards that were given up.
    """

    def __init__(
        self,
        ensemble: Ensemble[Any],
        fitting: Fitting,
        evolution: Evolution,
        order: Order,
        *,
        first: dict[str, Any],
        folder: Path | None,
        size: int,
        workers: int,
        key: Any,
    ) -> None:
        self._ensemble, self._fitting, self._evolution, self._order = ensemble, fitting, evolution, order
        self._first, self._folder, self._idle, self._key = first, folder, workers, key
        self._later = fitting._replace(own={word: x for word, x in fitting.own.items() if word not in _FIRST})
        self._windows = check_history(fitting.common.get("history", "all"))
        self._ids = np.asarray(ensemble.ids)
        members = divide(len(self._ids), size)
        self.past = ShardRounds(self._ids, members, [[] for _ in members], set())
        self._ready, self._count = deque(range(len(members))), 0
        self._open: dict[int, Job] = {}
        self._donors: dict[int, np.ndarray] = {}  # of the shards that are in a later round than the first

    def shards(self) -> list[Shard]:
        """The shards of all workers that have none."""
        found = []
        for _ in range(len(self._ready)):
            if not self._idle:
                break
            index = self._ready.popleft()
            start = self._start(index)
            if start is None:  # all its members have diverged, and there is nobody to copy yet
                self._ready.append(index)
                continue
            positions, number = self.past.members[index], len(self.past.rounds[index])
            self._open[self._count] = Job(tuple(positions.tolist()), number)
            part = ft.partial(self._part, start, index, number)
            found.append(Shard(self._count, positions, self._ids[positions], part))
            self._count, self._idle = self._count + 1, self._idle - 1
        return found

    def follow(self, shard: Shard, run: Run[Any] | None) -> list[Shard]:
        """Notes what a shard came to, `None` if it was given up. Returns the shards of workers that are free then."""
        self._order.end(self._open.pop(shard.number), run)
        found = []
        while (turn := self._order.next()) is not None:
            index = next(i for i, one in enumerate(self.past.members) if one[0] == turn.job.members[0])
            if turn.run is None:
                self.past.given_up.add(index)
            else:
                self._finish(index, turn.run)
            self._idle += not turn.is_late
            found += self.shards()
        return found

    def _finish(self, index: int, run: Run[Any]) -> None:
        self.past.given_up.discard(index)
        rounds, members = self.past.rounds[index], self.past.members[index]
        ended = Round(run, last_scores(run), to_host(run.train_state.hyper), members)
        rounds[-1:] = [*(one._replace(run=None, donors=self._donors[index]) for one in rounds[-1:]), ended]
        if len(rounds) < len(self._evolution.keys):
            self._ready.append(index)

    def stop_rest(self) -> None:
        """Stops the members that have not ended all rounds where their last one ended."""
        for rounds in self.past.rounds:
            if 0 < len(rounds) < len(self._evolution.keys):
                run = rounds[-1].run
                rounds[-1] = rounds[-1]._replace(run=stop_members_of(run, np.flatnonzero(run.status == Status.OK)))

    def _start(self, index: int) -> Any:
        """What a shard begins its next round with; `None` if nobody in it trains."""
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
        fitting, more = (self._later, {}) if number else (self._fitting, self._first)
        return fitting.part(start, positions, self._ids[positions], folder, **self._evolution.length, **more)
