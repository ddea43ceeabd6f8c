from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._combination import AbstractCombination
from .._ensemble._group_order import join_values
from .._pytree import PyTree
from ..plan._pilot import Pilot
from ._batch import MemberCall, PredictionInputs


class Work(NamedTuple):
    """The rows of a call to be predicted by an ensemble.

    `members`: the positions of its members in the group, if it is part of one.
    """

    pilot: Pilot
    call: MemberCall
    inputs: PredictionInputs
    num_rows: int
    batch_size: int
    members: np.ndarray | None = None

    def rows(self, start: int, count: int) -> np.ndarray:
        """The indices of `count` rows from `start`; at the end of the data the last `count` rows.

        If there are fewer rows than `count`, the last one is repeated.
        """
        start = max(min(start, self.num_rows - count), 0)
        return np.minimum(np.arange(start, start + count), self.num_rows - 1)

    def positions_of(self, chunk: slice | np.ndarray) -> Any:
        """The positions, among all members, of a chunk of this ensemble."""
        return chunk if self.members is None else self.members[chunk]


def combine_parts(parts: Iterable[tuple[Any, PyTree]], combine: Any, weights: Any) -> PyTree:
    """Combines the predictions of all members; each of `parts` has those of some, with their positions."""
    if isinstance(combine, AbstractCombination):
        partial = None
        for index, part in parts:
            partial = combine.update(partial, part, weights=None if weights is None else weights[index])
        return combine.finish(partial)
    positions, held = zip(*parts, strict=True)
    if any(isinstance(index, np.ndarray) for index in positions):
        predictions = join_values(held, np.argsort(np.concatenate(positions)))
    else:
        predictions = held[0] if len(held) == 1 else jax.tree.map(lambda *xs: jnp.concatenate(xs), *held)
    if combine is None:
        return predictions
    return combine(predictions) if weights is None else combine(predictions, weights=weights)
