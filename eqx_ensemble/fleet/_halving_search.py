"""Asynchronous halving in the caller's process: the latest run of each member, and its next rung."""

import dataclasses
import functools as ft
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from .._ensemble import Ensemble
from ..methods._scores import last_scores
from ..train._run import Run
from ..train._status import Status
from ._dispatch import AbstractSearch
from ._divide import take_members
from ._fitting import Fitting
from ._ladder import Job, Ladder
from ._rung import in_order
from ._stop_members import stop_members_of


class HalvingSearch(AbstractSearch):
    """Trains the members that a ladder promotes.

    **Attributes:**

    - `rung`: `(members,)`, the last rung that each member has finished, -1 for none.
    """

    def __init__(
        self,
        ensemble: Ensemble[Any],
        fitting: Fitting,
        ladder: Ladder,
        lengths: list[dict[str, Any]],
        *,
        first: dict[str, Any],
        folder: Any,
    ) -> None:
        self._ensemble, self._fitting, self._ladder, self._lengths = ensemble, fitting, ladder, lengths
        self._first, self._folder, self._ids = first, folder, np.asarray(ensemble.ids)
        self._runs: dict[int, tuple[Run[Any], int]] = {}  # with the member's position in it
        self.rung = np.full(len(self._ids), -1)

    def next_job(self) -> tuple[Job, Callable[[], dict[str, Any]]] | None:
        job = self._ladder.next_job()
        return None if job is None else (job, ft.partial(self._part, job, np.array(job.members)))

    def finish(self, job: Job, run: Run[Any]) -> None:
        scores = last_scores(run)
        scores = np.where(run.status == Status.OK, scores if run.mode == "min" else -scores, np.nan)
        self._ladder.finish(job.rung, list(job.members), scores[: len(job.members)])
        for position, member in enumerate(job.members):
            self._runs[member] = run, position
            self.rung[member] = job.rung

    def abandon(self, job: Job) -> None:
        """Does nothing: members without a score at this rung are not promoted."""

    def _part(self, job: Job, positions: np.ndarray) -> dict[str, Any]:
        ids, folder = self._ids[positions], None
        if self._folder is not None:
            folder = self._folder / f"rung-{job.rung:02d}" / hashlib.sha256(ids.tobytes()).hexdigest()[:16]
        if job.rung == 0:
            return self._fitting.part(
                self._ensemble[positions], positions, ids, folder, **self._lengths[0], **self._first
            )
        start, positions = self._gather_pair(positions)
        return self._fitting.for_runs.part(start, positions, self._ids[positions], folder, **self._lengths[job.rung])

    def _gather_pair(self, positions: np.ndarray) -> tuple[Run[Any], np.ndarray]:
        """As `_gather`, but pairs a single member with a stopped one: one alone is compiled to another program."""
        run, index = self._runs[int(positions[0])]
        if len(positions) > 1 or len(run.status) == 1:
            return self._gather(positions), positions
        pair = take_members(run, np.array([index, (index + 1) % len(run.status)]))
        of_id = {int(member): position for position, member in enumerate(self._ids)}
        return stop_members_of(pair, np.array([1])), np.array([of_id[int(member)] for member in pair.ensemble.ids])

    def _gather(self, positions: np.ndarray, *, ended: bool = False) -> Run[Any]:
        """The latest runs of some members as one; with `ended`, members below the last rung are stopped."""
        runs: dict[int, tuple[Run[Any], list[int]]] = {}
        for member in positions.tolist():
            run, index = self._runs[member]
            runs.setdefault(id(run), (run, []))[1].append(index)
        found = [take_members(run, np.array(indices)) for run, indices in runs.values()]
        if ended:
            top = set(self._ids[self.rung == len(self._lengths) - 1].tolist())
            found = [run if int(run.ensemble.ids[0]) in top else _stop(run) for run in found]
        return in_order(found, self._ids[positions])

    def run(self, *, interrupted: bool, seconds: float) -> Run[Any]:
        """The run of all members that have finished a rung; those that were not promoted are stopped."""
        run = self._gather(np.flatnonzero(self.rung >= 0), ended=not interrupted)
        return dataclasses.replace(run, interrupted=interrupted, seconds=seconds)


def _stop(run: Run[Any]) -> Run[Any]:
    """Stops the members of a run that are still training, at its end."""
    return stop_members_of(run, np.flatnonzero(run.status == Status.OK))
