"""The caller's side of a population whose shards do not wait for each other."""

import dataclasses
import functools as ft
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from .._ensemble import Ensemble
from ..distributed import to_host
from ..methods import population
from ..methods._evolve import Evolution, replace_members
from ..methods._population import Population
from ..methods._scores import last_scores
from ..train._run import Run
from ..train._state import TrainState
from ..train._status import Status
from ._cut import cut_start, divide
from ._fitting import Fitting
from ._join import join_runs
from ._ladder import Job
from ._order import Order
from ._rung import in_order, stop_members_of, with_status
from ._shard import Shard

_FIRST = ("hyper", "state", "trainable")  # what `fit` takes with an ensemble, and not with a run


class _Round(NamedTuple):
    """A round that a shard has ended: its run, the scores of its members, and their donors after it, by position."""

    run: Run[Any]
    scores: np.ndarray
    donors: np.ndarray


class Exchange:
    """Shards that go from round to round. When one begins a round, its worst members become copies of the best.

    The best and the worst are those of the last round that each member has ended: what workers of the paper read of
    each other's files.

    **Attributes:**

    - `members`: the positions of the members of each shard.
    - `rounds`: of each shard, the rounds that it has ended.
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
        self._ids = np.asarray(ensemble.ids)
        self.members = divide(len(self._ids), size)
        self.rounds: list[list[_Round]] = [[] for _ in self.members]
        self._ready, self._open, self._count = deque(range(len(self.members))), {}, 0
        self._done: dict[Job, Run[Any]] = {}

    def position(self, member: int) -> int:
        """The position of a member, by its id."""
        return int(np.flatnonzero(self._ids == member)[0])

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
            positions, self._open[self._count] = self.members[index], index
            part = ft.partial(self._part, start, index, len(self.rounds[index]))
            found.append(Shard(self._count, positions, self._ids[positions], part))
            self._count, self._idle = self._count + 1, self._idle - 1
        return found

    def follow(self, shard: Shard, run: Run[Any] | None) -> list[Shard]:
        """Notes what a shard came to, `None` if it was given up. Returns the shards of workers that are free then."""
        index = self._open.pop(shard.number)
        job = Job(tuple(self.members[index].tolist()), len(self.rounds[index]))
        found = []
        if run is None:
            self._order.drop(job)
            self._stop(index)
            self._idle += 1
            found += self.shards()
        else:
            self._done[job] = run
        while (done := self._order.next(self._done)) is not None:
            self._finish(done, self._done.pop(done))
            self._idle += 1
            found += self.shards()
        return found

    def _finish(self, job: Job, run: Run[Any]) -> None:
        index = next(i for i, members in enumerate(self.members) if members[0] == job.members[0])
        self.rounds[index].append(_Round(run, last_scores(run), self.members[index]))
        if len(self.rounds[index]) < len(self._evolution.keys):
            self._ready.append(index)

    def _stop(self, index: int) -> None:
        """Stops the members of a shard that was given up where their last round ended."""
        if self.rounds[index]:
            last = self.rounds[index].pop()
            going = np.flatnonzero(last.run.status == Status.OK)
            self.rounds[index].append(_Round(stop_members_of(last.run, going), last.scores, self.members[index]))

    def _start(self, index: int) -> Any:
        """What a shard begins its next round with; `None` if nobody in it trains."""
        if not self.rounds[index]:
            return self._ensemble[self.members[index]]
        last = self.rounds[index][-1]
        donors = self._donors(index)
        run = self._replace(index, donors)
        if not (to_host(run.train_state.status) == Status.OK).any():
            return None
        self.rounds[index][-1] = last._replace(donors=donors)
        return run

    def _donors(self, index: int) -> np.ndarray:
        """The positions of the donors of a shard's members, chosen among all that have ended a round."""
        begun = [(members, rounds[-1]) for members, rounds in zip(self.members, self.rounds, strict=True) if rounds]
        known = np.concatenate([members for members, _ in begun])
        training = np.concatenate([to_host(last.run.train_state.status) == Status.OK for _, last in begun])
        chosen = population.truncation(
            np.concatenate([last.scores for _, last in begun]),
            training,
            fraction=self._evolution.fraction,
            mode=begun[0][1].run.mode,
            key=self._evolution.keys[len(self.rounds[index])],
        )
        return known[chosen[np.isin(known, self.members[index])]]

    def _replace(self, index: int, donors: np.ndarray) -> Run[Any]:
        """The last run of a shard, with copies of donors, which may be of other shards and at other steps."""
        own, members = self.rounds[index][-1].run, self.members[index]
        others = np.setdiff1d(donors, members)
        together = join_runs([own, *self._runs_of(others)], interrupted=False, seconds=0.0)
        state = together.train_state
        state = TrainState(state.moving, state.fixed, own.train_state.shared, state.ids, own.train_state.step)
        place = {position: i for i, position in enumerate([*members.tolist(), *others.tolist()])}
        index_of = np.array([place[position] for position in [*donors.tolist(), *others.tolist()]])
        found = replace_members(
            dataclasses.replace(together, train_state=state), index_of, self._evolution.explore, key=self._key
        )
        found = cut_start(found, np.arange(len(members)))
        return with_status(dataclasses.replace(own, train_state=found.train_state, selection=found.selection))

    def _runs_of(self, positions: np.ndarray) -> list[Run[Any]]:
        """The last runs of some members, in their order."""
        found = []
        for members, rounds in zip(self.members, self.rounds, strict=True):
            index = np.flatnonzero(np.isin(members, positions))
            found += [cut_start(rounds[-1].run, index)] if len(index) else []
        return found

    def _part(self, start: Any, index: int, number: int) -> dict[str, Any]:
        positions = self.members[index]
        folder = None if self._folder is None else self._folder / f"round-{number:02d}" / f"shard-{index:05d}"
        fitting, more = (self._later, {}) if number else (self._fitting, self._first)
        return fitting.part(start, positions, self._ids[positions], folder, **self._evolution.length, **more)

    def population(self, *, interrupted: bool, seconds: float) -> Population[Any]:
        """All members that have ended a round; NaN where one has not ended others."""
        begun = [i for i, rounds in enumerate(self.rounds) if rounds]
        ids = self._ids[np.concatenate([self.members[i] for i in begun])]
        run = in_order([self.rounds[i][-1].run for i in begun], ids)
        run = dataclasses.replace(run, rows=None, interrupted=interrupted, seconds=seconds)
        count = max(len(self.rounds[i]) for i in begun)
        rows = [self._rows(i, count) for i in begun]
        scores, lineage, hyper = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *rows)
        return Population(run=run, scores=scores, lineage=lineage, hyper=hyper)

    def _rows(self, index: int, count: int) -> tuple[np.ndarray, np.ndarray, Any]:
        """Scores, lineage and hyper-parameters of a shard, each `(rounds, members, ...)`."""
        rounds, own = self.rounds[index], self.members[index]
        missing, unknown = count - len(rounds), np.full_like(rounds[0].scores, np.nan)
        scores = np.stack([one.scores for one in rounds] + [unknown] * missing)
        lineage = self._ids[np.stack([one.donors for one in rounds] + [own] * missing)]
        hypers = [to_host(one.run.train_state.hyper) for one in rounds]
        hypers += hypers[-1:] * missing
        return scores, lineage, jax.tree.map(lambda *parts: np.stack(parts), *hypers)
