from typing import Any, Literal

import numpy as np

from .._caller import caller
from .._check import check_positive_int, check_word
from .._foreign import from_foreign
from ._state import Status

Mode = Literal["min", "max"]


def rank_members(run: Any, count: int | None, by: Any = None, mode: Mode | None = None) -> np.ndarray:
    """The positions of a run's `count` best members, or of all with a score, best first, without diverged ones."""
    mode = check_ranking_mode(by, mode, default=run.mode)
    scores = check_scores_to_rank(run.best_score if by is None else by, len(run.status))
    scores = scores if mode == "min" else -scores
    scores = np.where(run.status == Status.DIVERGED, np.inf, scores)
    order = np.argsort(np.where(np.isnan(scores), np.inf, scores), kind="stable")
    ranked = int((scores < np.inf).sum())
    if count is not None:
        check_num_ranked(count, ranked)
    return order[: ranked if count is None else count]


def check_ranking_mode(by: Any, mode: Any, *, default: Mode) -> Mode:
    """Raises unless the direction of the scores is known. Returns the mode."""
    if by is not None and mode is None:
        raise TypeError(
            f"`{caller()}` needs `mode` with `by`, because a score may be better when it is lower or when it is "
            "higher.\n"
            'Pass `mode="min"` for an error, `mode="max"` for an accuracy.'
        )
    if mode is not None:
        check_word(mode, "mode", ("min", "max"))
    if by is None and mode not in (None, default):
        raise ValueError(
            f"`{caller()}` ranks by `best_score`, chosen with `mode={default!r}`; got `mode={mode!r}`.\n"
            "Leave `mode` out, or pass the scores to rank by as `by`."
        )
    return default if mode is None else mode


def check_scores_to_rank(scores: Any, num_members: int) -> np.ndarray:
    """Raises unless there is a score for every member. Returns them as an array."""
    if scores is None:
        raise TypeError(f"`{caller()}` needs scores to rank members by: train with `validation=` data, or pass `by=`.")
    if isinstance(scores, str):
        raise TypeError(f"`{caller()}` needs one score per member in `by`, got {scores!r}: pass the scores themselves.")
    scores = np.asarray(from_foreign(scores, "by"), float)
    if scores.shape != (num_members,):
        raise ValueError(
            f"`{caller()}` needs one score per member in `by`: expected ({num_members},), got {scores.shape}."
        )
    return scores


def check_num_ranked(count: Any, available: int) -> None:
    """Raises if `count` exceeds the number of members with a score."""
    check_positive_int(count, "count")
    if count > available:
        raise ValueError(
            f"`{caller()}` needs `count` of at most {available}, the number of healthy members with a score; got "
            f"{count}."
        )
