from typing import Any

import numpy as np

from ._check_run import check_num_ranked, check_ranking_mode, check_scores_to_rank
from ._status import Status
from .compiled._selection import Mode


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
