from typing import Generic

import equinox as eqx
import numpy as np
from jaxtyping import Float, Int

from .._ensemble import M
from .._pytree import PyTree
from ..train._run import Run
from ._check import check_indices


class Population(eqx.Module, Generic[M]):
    """The result of [`eqx_ensemble.methods.population_based_training`][].

    **Attributes:**

    - `run`: the run of all rounds; `run.ensemble` holds each member's best weights since it was last replaced.
    - `scores`: `(rounds, members)`, the validation scores at the end of each round.
    - `lineage`: `(rounds, members)`, the id of each member's donor after each round; its own id if it was not replaced.
    - `hyper`: the hyper-parameters during each round, each array `(rounds, members, ...)`.
    """

    run: Run[M]
    scores: Float[np.ndarray, "rounds members"]
    lineage: Int[np.ndarray, "rounds members"]
    hyper: PyTree

    def __repr__(self) -> str:
        return f"{len(self.scores)} rounds of population-based training\n{self.run!r}"

    def ancestors(self, index: int) -> Int[np.ndarray, " rounds"]:
        """The ids of the members whose weights the member at `index` descends from, one per round.

        The hyper-parameters of these members in their rounds are the schedule that the member was trained with.

        **Arguments:**

        - `index`: the position of the member in the ensemble.

        **Returns:** ids `(rounds,)`; the last one is the member's own.

        **Raises:** `ValueError` for an index out of range.
        """
        ids = np.asarray(self.run.train_state.ids).tolist()
        check_indices([index], len(ids), name="methods.Population.ancestors")
        found = [ids[index]]
        for row in self.lineage[-2::-1]:
            found.append(int(row[ids.index(found[-1])]))
        return np.array(found[::-1])
