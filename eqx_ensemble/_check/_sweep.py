from typing import Any

import numpy as np

from ._options import check_positive_int


def scores_to_rank(scores: Any, num_members: int, *, name: str) -> np.ndarray:
    """A score for every member."""
    if scores is None:
        raise TypeError(f"`{name}` needs scores to rank members by: train with `validation=` data, or pass `by=`.")
    scores = np.asarray(scores, float)
    if scores.shape != (num_members,):
        raise ValueError(f"`{name}` needs one score per member in `by`: expected ({num_members},), got {scores.shape}.")
    return scores


def enough_to_rank(count: Any, available: int, *, name: str) -> None:
    """As many members as are asked for."""
    check_positive_int(count, "count", name=name)
    if count > available:
        raise ValueError(f"`{name}` was asked for {count} members, but only {available} are healthy and have a score.")
