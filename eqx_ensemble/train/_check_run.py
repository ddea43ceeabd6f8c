from typing import Any

import numpy as np

from .._check import check_nonnegative_weights, check_positive_int, check_weight_count
from .._foreign import as_numpy, from_foreign


def diverged_message(ids: Any, stopped_at: Any, faults: Any, *, first_step: int = -1, integers: str = "") -> str:
    """The warning that names diverged members, in a run that began at `first_step`, on data with `integers`."""
    each = zip(ids.tolist(), stopped_at.tolist(), faults.tolist(), strict=True)
    listed = ", ".join(f"{member} at step {step} (`{fault}`)" for member, step, fault in each)
    lines = [
        f"{len(ids)} member(s) diverged and keep their last finite weights (id, step, what was not finite): {listed}.",
        "`run.healthy` leaves them out; a smaller learning rate or gradient clipping often helps.",
    ]
    of_loss = faults == "loss"
    if (of_loss & (stopped_at == first_step)).all():
        lines[1] = (
            "Their loss was not finite before any update: the cause is the loss, the model or the data, not the "
            "learning rate."
        )
    if of_loss.any() and integers:
        lines.append(f"{integers}: a class label beyond a model's outputs makes the loss NaN.")
    return "\n".join(lines)


def excluded_message(ids: Any, healthy: Any, *, name: str) -> str:
    """The warning, or the error, that diverged members are excluded from predictions."""
    if not healthy.any():
        return f"`{name}` cannot predict: all {len(ids)} members diverged."
    return f"`{name}` excludes {len(ids)} member(s) that diverged: {', '.join(map(str, ids.tolist()))}."


def check_run_weights(weights: Any, healthy: np.ndarray, combine: Any, *, name: str) -> np.ndarray | None:
    """Raises for invalid weights. Returns those of the healthy members, which sum to 1."""
    if weights is None:
        return None
    if combine is None:
        raise TypeError(f"`{name}` needs `combine=` with `weights`: weights have no effect without `combine`.")
    check_weight_count(weights, len(healthy), name=name)
    check_nonnegative_weights(name, weights, mask=healthy, all_zero=False)
    kept = as_numpy(weights, "weights", name=name).astype(float)[healthy]
    return kept / kept.sum() if kept.size else kept


def check_scores_to_rank(scores: Any, num_members: int, *, name: str) -> np.ndarray:
    """Raises unless there is a score for every member. Returns them as an array."""
    if scores is None:
        raise TypeError(f"`{name}` needs scores to rank members by: train with `validation=` data, or pass `by=`.")
    scores = np.asarray(from_foreign(scores, "by", name=name), float)
    if scores.shape != (num_members,):
        raise ValueError(f"`{name}` needs one score per member in `by`: expected ({num_members},), got {scores.shape}.")
    return scores


def check_num_ranked(count: Any, available: int, *, name: str) -> None:
    """Raises if more members are asked for than have a score."""
    check_positive_int(count, "count", name=name)
    if count > available:
        raise ValueError(f"`{name}` was asked for {count} members, but only {available} are healthy and have a score.")
