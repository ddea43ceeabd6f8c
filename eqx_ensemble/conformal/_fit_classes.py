from jax import Array
from jax.typing import ArrayLike

from .._check import check_labels, check_mask, check_no_nan
from .._weighting import at_label, blank_masked
from ._check import check_level, check_row_logits
from ._class_scores import Score, class_scores


def score_labels(
    name: str,
    score: Score,
    logits: ArrayLike,
    labels: ArrayLike,
    level: float,
    mask: ArrayLike | None,
    *,
    argument: str = "logits",
) -> tuple[Array, Array, Array | None]:
    """Raises for invalid arguments. Returns the labels' scores on held-out rows, the labels and the mask."""
    checked = check_row_logits(name, logits, argument=argument)
    kept = check_mask(name, mask, checked.shape[:-1])
    targets = check_labels(name, labels, checked, mask, argument=argument, members=False)
    check_level(name, level)
    blanked = blank_masked(targets, kept)
    scores = at_label(class_scores(score, blank_masked(checked, kept)), blanked)
    check_no_nan(name, argument, scores, mask)
    return scores, blanked, kept
