import equinox as eqx
from jaxtyping import Array, ArrayLike, Bool, Float, Integer

from .._check import check_logits, promote
from ._class_scores import top_k_scores
from ._fit_classes import score_labels
from ._rank import fraction, rank_of, value_at_rank_jit


class TopK(eqx.Module):
    """Prediction sets of the likeliest classes, fitted: call it on logits.

    **Attributes:**

    - `k`: how many classes are in each set; infinite if the held-out rows were too few, so that sets have all classes.
    """

    k: Float[Array, ""]

    def __call__(self, logits: Float[ArrayLike, "*batch classes"]) -> Bool[Array, "*batch classes"]:
        """The set of each row, as booleans; all classes where the logits are NaN."""
        scores, k = promote(top_k_scores(check_logits("conformal.TopK", logits, members=False)), self.k)
        return ~(scores > k)


def top_k(
    logits: Float[ArrayLike, "rows classes"],
    labels: Integer[ArrayLike, " rows"],
    *,
    level: float,
    mask: Bool[ArrayLike, " rows"] | None = None,
) -> TopK:
    r"""Prediction sets of a fixed size: the `k` likeliest classes, with the smallest `k` that has the coverage.

    A class's score is the number of classes that are at least as likely, and `k` is
    [`eqx_ensemble.conformal.quantile`][] of the labels' scores on held-out rows. The size does not depend on how
    certain a prediction is. Scores are whole numbers, so that the coverage usually exceeds `level`. Of classes that tie
    for the last place none is in the set, as none was counted for it in the fit.

    **Arguments:**

    - `logits`: `(rows, classes)`, of the combined prediction for rows that no member was trained on. No `members` axis.
    - `labels`: integers `(rows,)` from 0 to classes - 1.
    - `level`: the coverage, a Python number between 0 and 1.
    - `mask`: booleans `(rows,)`; rows where it is `False` are ignored, even if they contain NaN.

    **Returns:**

    [`eqx_ensemble.conformal.TopK`][]: `fitted(logits)` gives booleans `(*batch, classes)`.

    **Raises:**

    As [`eqx_ensemble.conformal.aps`][].

    ```python
    logits = jnp.log(jnp.array([[0.6, 0.3, 0.1]] * 9))
    fitted = ee.conformal.top_k(
        logits, jnp.array([0, 0, 0, 0, 0, 1, 1, 1, 2]), level=0.8
    )
    fitted.k, fitted(logits[:1])  # 2, [[True, True, False]]
    ```

    ??? cite
        [Uncertainty Sets for Image Classifiers using Conformal Prediction](https://arxiv.org/abs/2009.14193), where it
        is the baseline of sets of a fixed size.
    """
    name = "conformal.top_k"
    scores, _, kept = score_labels(name, "top_k", logits, labels, level, mask)
    return TopK(value_at_rank_jit(scores, kept, rank_of(name, fraction(level), scores.size, kept)))
