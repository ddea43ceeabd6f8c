import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from .._pytree import PyTree
from .._warnings import warn
from ..distributed import to_host
from ..train._check_run import diverged_message
from ..train._run import Run
from ..train._status import Status
from ._population import Population
from ._scores import last_scores


class Past(NamedTuple):
    """The completed rounds of a population: scores, ids of donors and hyper-parameters, one entry per round.

    `training` marks the members that are still training at the end of the last round.
    """

    scores: tuple[np.ndarray, ...] = ()
    lineage: tuple[np.ndarray, ...] = ()
    hyper: tuple[PyTree, ...] = ()
    training: np.ndarray = np.ones(0, bool)

    @classmethod
    def of(cls, decisions: dict[str, Any]) -> "Past":
        """The rounds saved as `decisions`."""
        count = len(decisions["scores"])
        hyper = tuple(jax.tree.map(lambda x: x[i], decisions["hyper"]) for i in range(count))  # noqa: B023
        return cls(tuple(decisions["scores"]), tuple(decisions["lineage"]), hyper)

    def add(self, run: Run[Any]) -> "Past":
        """Adds a completed round, before members are replaced."""
        state = run.train_state
        return Past(
            (*self.scores, last_scores(run)),
            (*self.lineage, np.asarray(state.ids)),
            (*self.hyper, to_host(state.hyper)),
            to_host(state.status) == Status.OK,
        )

    def descend(self, donors: np.ndarray) -> "Past":
        """Adds the donors after the last round, one index per member."""
        return self._replace(lineage=(*self.lineage[:-1], self.lineage[-1][donors]))

    def decisions(self) -> dict[str, Any]:
        """All rounds as arrays `(rounds, members, ...)`."""
        hyper = jax.tree.map(lambda *parts: np.stack(parts), *self.hyper)
        return {"scores": np.stack(self.scores), "lineage": np.stack(self.lineage), "hyper": hyper}

    def population(self, run: Run[Any], *, ended: bool) -> Population[Any]:
        """The result; warns if all members had diverged before the last round."""
        if not ended and not self.training.any():
            warn(diverged_message(self.lineage[-1], run.stopped_at, run.fault))
        run = dataclasses.replace(run, rows=None)  # a copy was trained on the rows of its donor too
        return Population(run=run, **self.decisions())
