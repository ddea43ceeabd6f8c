"""Algorithm 2 of Li et al. (2020): the members to promote or to start when a worker is idle."""

from collections import deque
from typing import NamedTuple

import numpy as np

from ..methods import population
from ..methods._halving import share
from ._divide import divide


class Job(NamedTuple):
    """Members, by position, to train until the end of a rung."""

    members: tuple[int, ...]
    rung: int


class Ladder:
    """The members that have finished each rung, and those that were promoted from it.

    A job has `size` members. With `size=1` this is the algorithm of the paper. Otherwise promotions wait until `size`
    members of a rung can be promoted, or until no new members are left.
    """

    def __init__(self, num_members: int, num_rungs: int, *, factor: float | int, size: int) -> None:
        self._factor, self._size = factor, size
        self._new = deque(np.arange(num_members)[:, None] if size == 1 else divide(num_members, size))
        self._scores: list[dict[int, float]] = [{} for _ in range(num_rungs)]
        self._promoted: list[set[int]] = [set() for _ in range(num_rungs)]

    def next_job(self) -> Job | None:
        """The next job for an idle worker; `None` if it depends on running jobs."""
        job = self._promote(least=self._size)
        if job is None and self._new:
            return Job(tuple(self._new.popleft().tolist()), 0)
        return job or self._promote(least=1)

    def _promote(self, *, least: int) -> Job | None:
        """Promotes the best members of the highest rung in which at least `least` can be promoted."""
        for rung in reversed(range(len(self._scores) - 1)):
            members = self.promotable(rung)[: self._size]
            if len(members) >= least:
                self._promoted[rung] |= set(members)
                return Job(tuple(sorted(members)), rung + 1)
        return None

    def promotable(self, rung: int) -> list[int]:
        """The best `1 / factor` of the members that have finished a rung, without those promoted before."""
        finished = sorted(self._scores[rung])
        if not finished:
            return []
        scores = np.array([self._scores[rung][member] for member in finished])
        best = population.rank(scores)[: share(len(finished), self._factor)]
        able = [finished[i] for i in best if not np.isnan(scores[i])]
        return [member for member in able if member not in self._promoted[rung]]

    def finish(self, rung: int, members: list[int], scores: np.ndarray) -> None:
        """Records the scores of members that have finished a rung; lower is better, NaN is no score."""
        self._scores[rung] |= dict(zip(members, scores.tolist(), strict=True))
