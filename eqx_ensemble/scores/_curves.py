from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Real

from ._check_rows import check_ranking
from ._ranking import rates


class RocCurve(NamedTuple):
    """The points of a ROC curve from (0, 0) to (1, 1): arrays `(rows + 1,)`.

    - `false_positive_rate`, `true_positive_rate`: of the rows whose score is at or above the threshold.
    - `thresholds`: from infinity down to the lowest score.
    """

    false_positive_rate: Float[Array, " points"]
    true_positive_rate: Float[Array, " points"]
    thresholds: Float[Array, " points"]


class PrecisionRecallCurve(NamedTuple):
    """The points of a precision-recall curve from recall 0 to recall 1: arrays `(rows + 1,)`.

    - `precision`: the fraction of positive rows among those whose score is at or above the threshold; 1 at the first
        point.
    - `recall`: the fraction of positive rows whose score is at or above the threshold.
    - `thresholds`: from infinity down to the lowest score.
    """

    precision: Float[Array, " points"]
    recall: Float[Array, " points"]
    thresholds: Float[Array, " points"]


def roc_curve(
    scores: Float[ArrayLike, "*batch"],
    positives: Bool[ArrayLike, "*batch"],
    *,
    row_weights: Real[ArrayLike, "*batch"] | None = None,
    mask: Bool[ArrayLike, "*batch"] | None = None,
) -> RocCurve:
    """ROC curve: true against false positive rate at every threshold, for [`eqx_ensemble.plot.roc_curve`][].

    Each row is a point: the number of points does not depend on values, and the function can be compiled. Tied rows
    repeat their point; ignored rows repeat the last one. Without repeated points it equals
    `sklearn.metrics.roc_curve(drop_intermediate=False)`; its `jnp.trapezoid` is [`eqx_ensemble.scores.auroc`][].

    **Arguments:**

    - `scores`, `positives`, `row_weights`, `mask`: as for [`eqx_ensemble.scores.auroc`][].

    **Returns:**

    [`eqx_ensemble.scores.RocCurve`][]. Rates are NaN if a row that is not ignored has a NaN score and, while tracing,
    if there are no positive or no negative rows.

    **Raises:**

    As [`eqx_ensemble.scores.auroc`][].

    ```python
    scores, positives = jnp.array([0.9, 0.8, 0.7]), jnp.array([True, False, True])
    curve = ee.scores.roc_curve(scores, positives)
    # [0, 0, 1, 1], [0, 0.5, 0.5, 1]
    curve.false_positive_rate, curve.true_positive_rate
    ```

    ??? cite
        [An Introduction to ROC Analysis](https://doi.org/10.1016/j.patrec.2005.10.010)

        ```bibtex
        @article{fawcett2006introduction,
            author={Tom Fawcett},
            title={An Introduction to {ROC} Analysis},
            journal={Pattern Recognition Letters},
            year={2006},
        }
        ```
    """
    return _roc_curve(*check_ranking("scores.roc_curve", scores, positives, row_weights, mask))


def precision_recall_curve(
    scores: Float[ArrayLike, "*batch"],
    positives: Bool[ArrayLike, "*batch"],
    *,
    row_weights: Real[ArrayLike, "*batch"] | None = None,
    mask: Bool[ArrayLike, "*batch"] | None = None,
) -> PrecisionRecallCurve:
    """Precision against recall at every threshold, for [`eqx_ensemble.plot.precision_recall_curve`][].

    Points are as in [`eqx_ensemble.scores.roc_curve`][], from the highest threshold to the lowest. Without repeated
    points, and in reverse, it equals `sklearn.metrics.precision_recall_curve`. Do not connect the points by straight
    lines: precision is not interpolated between them, see [`eqx_ensemble.scores.aupr`][].

    **Arguments:**

    - `scores`, `positives`, `row_weights`, `mask`: as for [`eqx_ensemble.scores.auroc`][].

    **Returns:**

    [`eqx_ensemble.scores.PrecisionRecallCurve`][]. Recall is NaN if a row that is not ignored has a NaN score and,
    while tracing, if there are no positive rows. The last precision is the fraction of positive rows, the chance level.

    **Raises:**

    As [`eqx_ensemble.scores.auroc`][].

    ```python
    scores, positives = jnp.array([0.9, 0.8, 0.7]), jnp.array([True, False, True])
    curve = ee.scores.precision_recall_curve(scores, positives)
    curve.precision, curve.recall  # [1, 1, 1/2, 2/3], [0, 1/2, 1/2, 1]
    ```

    ??? cite
        [The Relationship Between Precision-Recall and ROC Curves](https://doi.org/10.1145/1143844.1143874)
    """
    return _precision_recall_curve(
        *check_ranking("scores.precision_recall_curve", scores, positives, row_weights, mask)
    )


@jax.jit
def _roc_curve(
    scores: Float[Array, " rows"], positives: Bool[Array, " rows"], weights: Float[Array, " rows"]
) -> RocCurve:
    hits, false, _ = rates(scores, positives, weights)
    return RocCurve(_rise(false), _rise(hits), _thresholds(scores, weights))


@jax.jit
def _precision_recall_curve(
    scores: Float[Array, " rows"], positives: Bool[Array, " rows"], weights: Float[Array, " rows"]
) -> PrecisionRecallCurve:
    hits, _, precision = rates(scores, positives, weights)
    precision = jnp.where(jnp.isnan(hits), jnp.nan, precision)
    first = jnp.ones(1, precision.dtype)
    return PrecisionRecallCurve(jnp.concatenate([first, precision]), _rise(hits), _thresholds(scores, weights))


def _rise(rate: Float[Array, " rows"]) -> Float[Array, " points"]:
    """A zero and the rate of each row, made monotone: sums of weights may decrease by rounding."""
    return jnp.concatenate([jnp.zeros(1, rate.dtype), jax.lax.cummax(rate)])


def _thresholds(scores: Float[Array, " rows"], weights: Float[Array, " rows"]) -> Float[Array, " points"]:
    lowest = jnp.min(jnp.where(weights == 0, jnp.inf, scores))
    in_order = -jnp.sort(-jnp.where(weights == 0, lowest, scores))
    return jnp.concatenate([jnp.full(1, jnp.inf, in_order.dtype), in_order])
