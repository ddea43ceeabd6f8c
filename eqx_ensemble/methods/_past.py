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
    """The rounds of a population so far: scores, ids of donors and hyper-parameters, one entry for each round.

    `training` are the members that train at the end of the last one.
    """

    scores: tuple[np.ndarray, ...] = ()
    lineage: tuple[np.ndarray, ...] = ()
    hyper: tuple[PyTree, ...] = ()
    training: np.ndarray = np.ones(0, bool)

    @classmethod
    def of(cls, decisions: dict[str, Any]) -> "Past":
        """The rounds that `decisions` describes."""
        count = len(decisions["scores"])
        hyper = tuple(jax.tree.map(lambda x: x[i], decisions["hyper"]) for i in range(count))  # noqa: B023
        return cls(tuple(decisions["scores"]), tuple(decisions["lineage"]), hyper)

    def add(self, run: Run[Any]) -> "Past":
        """With a round that has ended, before members are replaced."""
        state = run.train_state
        return Past(
            (*self.scores, last_scores(run)),
            (*self.lineage, np.asarray(state.ids)),
            (*self.hyper, to_host(state.hyper)),
            to_host(state.status) == Status.OK,
        )

    def descend(self, donors: np.ndarray) -> "Past":
        """With the donors of the last round, the index of one for each member."""
        return self._replace(lineage=(*self.lineage[:-1], self.lineage[-1][donors]))

    def decisions(self) -> dict[str, Any]:
        """All rounds as arrays `(rounds, members, ...)`."""
        hyper = jax.tree.map(lambda *parts: np.stack(parts), *self.hyper)
        return {"scores": np.stack(self.scores), "lineage": np.stack(self.lineage), "hyper": hyper}

    def population(self, run: Run[Any], *, ended: bool) -> Population[Any]:
        """The result, with a warning where no member was left before the last round."""
        if not ended and not self.training.any():
            warn(diverged_message(self.lineage[-1], run.stopped_at, run.fault))
        run = dataclasses.replace(run, rows=None)  # a copy was trained on the rows of others
        return Population(run=run, **self.decisions())
