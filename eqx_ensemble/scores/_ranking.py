import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float

from .._brief import brief_repr
from .._check import RowWeightsLike, check_level
from .._combination import sort_rows
from ._reduce import check_ranking, mean_of_rows, running_sum, ties


def auroc(
    scores: Float[ArrayLike, "*batch"],
    positives: Bool[ArrayLike, "*batch"],
    *,
    row_weights: RowWeightsLike | None = None,
) -> Float[Array, ""]:
    """Area under the ROC curve: the probability that a positive row has a higher score than a negative one.

    Ties count one half. 0.5 is chance level.

    **Arguments:**

    - `scores`: one number per row `(*batch,)`, higher for likely positives.
    - `positives`: booleans `(*batch,)`, such as out-of-distribution or wrongly predicted rows.
    - `row_weights`: as for every score.

    **Returns:**

    A scalar. While tracing, NaN without positive or without negative rows.

    **Raises:**

    `ValueError` for rows that are all positive or all negative.

    ```python
    inside, outside = jnp.array([0.1, 0.2, 0.3]), jnp.array([0.2, 0.9])
    scores = jnp.concatenate([inside, outside])
    ee.scores.auroc(scores, jnp.arange(5) >= 3)  # 4.5 of 6 pairs: 0.75
    ```

    ??? cite
        [Hanley and McNeil, Radiology 1982](https://doi.org/10.1148/radiology.143.1.7063747)
    """
    return _auroc(_rank(scores, positives, row_weights))


def aupr(
    scores: Float[ArrayLike, "*batch"],
    positives: Bool[ArrayLike, "*batch"],
    *,
    row_weights: RowWeightsLike | None = None,
) -> Float[Array, ""]:
    r"""Area under the precision-recall curve, as average precision, $\sum_k (R_k - R_{k-1}) P_k$ over thresholds.

    Recall $R_k$ and precision $P_k$ are those of all rows at or above the $k$-th highest distinct score. The chance
    level is the fraction of positive rows: areas for different fractions are not comparable.

    **Arguments:**

    As [`eqx_ensemble.scores.auroc`][].

    **Returns:**

    A scalar.

    ```python
    scores, positives = jnp.array([0.9, 0.8, 0.7]), jnp.array([True, False, True])
    ee.scores.aupr(scores, positives)  # 1/2 * 1 + 1/2 * 2/3 = 0.833
    ```

    ??? cite
        [Davis and Goadrich, ICML 2006](https://doi.org/10.1145/1143844.1143874)
    """
    return _aupr(_rank(scores, positives, row_weights))


def fpr_at_tpr(
    scores: Float[ArrayLike, "*batch"],
    positives: Bool[ArrayLike, "*batch"],
    *,
    level: float = 0.95,
    row_weights: RowWeightsLike | None = None,
) -> Float[Array, ""]:
    """False positive rate at the threshold where the true positive rate reaches `level`: by default FPR95.

    Papers on out-of-distribution detection differ in which rows are positive: for positive in-distribution rows pass
    `-scores, ~positives`.

    **Arguments:**

    - `level`: the true positive rate, between 0 and 1.
    - the others: as for [`eqx_ensemble.scores.auroc`][].

    **Returns:**

    A scalar, without interpolation; lower is better.

    ```python
    scores = jnp.array([0.9, 0.8, 0.7, 0.1])
    positives = jnp.array([True, False, True, False])
    ee.scores.fpr_at_tpr(scores, positives)  # 0.5: at the threshold 0.7
    ```
    """
    check_level(level)
    return _fpr_at_tpr(_rank(scores, positives, row_weights), level)


class _Ranked(NamedTuple):
    """The negative scores, and the weights of positive and of negative rows, highest score first."""

    scores: Float[Array, " rows"]
    positive: Float[Array, " rows"]
    negative: Float[Array, " rows"]


def _rank(scores: ArrayLike, positives: ArrayLike, row_weights: ArrayLike | None) -> _Ranked:
    return _Ranked(*sort_rows(*_divide(*check_ranking(scores, positives, row_weights))))


@jax.jit
def _divide(scores: Float[Array, " rows"], positives: Bool[Array, " rows"], weights: Float[Array, " rows"]) -> _Ranked:
    positive = jnp.where(positives, weights, 0)
    return _Ranked(-jnp.where(weights == 0, -jnp.inf, scores), positive, weights - positive)


def _rates(ranked: _Ranked) -> tuple[Float[Array, " rows"], Float[Array, " rows"], Float[Array, " rows"]]:
    """True and false positive rates, and precision, at the score of each row, highest first."""
    total = running_sum(ranked.positive), running_sum(ranked.negative)
    # Tied rows have the rates of the last of them.
    _, last = ties(ranked.scores)
    hits, false = total[0][last], total[1][last]
    broken = jnp.isnan(ranked.scores[-1])
    found = jnp.where(broken, jnp.nan, hits / total[0][-1])
    return found, jnp.where(broken, jnp.nan, false / total[1][-1]), jnp.where(hits == 0, 0, hits / (hits + false))


@jax.jit
def _auroc(ranked: _Ranked) -> Float[Array, ""]:
    hits, _, _ = _rates(ranked)
    first, _ = ties(ranked.scores)
    # The rate above the tied rows of each row. Weights are not differences of rates: as XLA rounds these, millions of
    # rows between which nothing changes would add up.
    above = jnp.append(0, hits).astype(hits.dtype)[first]
    return mean_of_rows((hits + above) / 2, ranked.negative)


@jax.jit
def _aupr(ranked: _Ranked) -> Float[Array, ""]:
    hits, _, precision = _rates(ranked)
    return mean_of_rows(jnp.where(jnp.isnan(hits), jnp.nan, precision), ranked.positive)


@jax.jit
def _fpr_at_tpr(ranked: _Ranked, level: float | Float[Array, ""]) -> Float[Array, ""]:
    hits, false, _ = _rates(ranked)
    rounding = 4 * math.log2(2 * hits.size) * jnp.finfo(hits.dtype).eps
    enough = hits >= level * (1 - rounding)
    return jnp.min(jnp.where(enough | jnp.isnan(hits), false, 1))


class RocCurve(NamedTuple):
    """The points of a ROC curve from (0, 0) to (1, 1): arrays `(rows + 1,)`.

    - `false_positive_rate`, `true_positive_rate`: of the rows whose score is at or above the threshold.
    - `thresholds`: from infinity down to the lowest score.
    """

    false_positive_rate: Float[Array, " points"]
    true_positive_rate: Float[Array, " points"]
    thresholds: Float[Array, " points"]

    __repr__ = brief_repr


class PrecisionRecallCurve(NamedTuple):
    """The points of a precision-recall curve from recall 0 to recall 1: arrays `(rows + 1,)`.

    - `precision`, `recall`: of the rows whose score is at or above the threshold; precision is 1 at the first point.
    - `thresholds`: from infinity down to the lowest score.
    """

    precision: Float[Array, " points"]
    recall: Float[Array, " points"]
    thresholds: Float[Array, " points"]

    __repr__ = brief_repr


def roc_curve(
    scores: Float[ArrayLike, "*batch"],
    positives: Bool[ArrayLike, "*batch"],
    *,
    row_weights: RowWeightsLike | None = None,
) -> RocCurve:
    """ROC curve: true against false positive rate at every threshold.

    Each row is a point: tied rows repeat their point, ignored rows the last one.

    **Arguments:**

    As [`eqx_ensemble.scores.auroc`][].

    **Returns:**

    [`eqx_ensemble.scores.RocCurve`][].

    ```python
    scores, positives = jnp.array([0.9, 0.8, 0.7]), jnp.array([True, False, True])
    curve = ee.scores.roc_curve(scores, positives)
    # [0, 0, 1, 1], [0, 0.5, 0.5, 1]
    curve.false_positive_rate, curve.true_positive_rate
    ```

    ??? cite
        [Fawcett, PRL 2006](https://doi.org/10.1016/j.patrec.2005.10.010)
    """
    return _roc_curve(_rank(scores, positives, row_weights))


def precision_recall_curve(
    scores: Float[ArrayLike, "*batch"],
    positives: Bool[ArrayLike, "*batch"],
    *,
    row_weights: RowWeightsLike | None = None,
) -> PrecisionRecallCurve:
    """Precision against recall at every threshold.

    Points are as in [`eqx_ensemble.scores.roc_curve`][], in the reverse order of scikit-learn. Do not connect them by
    straight lines.

    **Arguments:**

    As [`eqx_ensemble.scores.auroc`][].

    **Returns:**

    [`eqx_ensemble.scores.PrecisionRecallCurve`][]. The last precision is the chance level.

    ```python
    scores, positives = jnp.array([0.9, 0.8, 0.7]), jnp.array([True, False, True])
    curve = ee.scores.precision_recall_curve(scores, positives)
    curve.precision, curve.recall  # [1, 1, 1/2, 2/3], [0, 1/2, 1/2, 1]
    ```

    ??? cite
        [Davis and Goadrich, ICML 2006](https://doi.org/10.1145/1143844.1143874)
    """
    return _precision_recall_curve(_rank(scores, positives, row_weights))


@jax.jit
def _roc_curve(ranked: _Ranked) -> RocCurve:
    hits, false, _ = _rates(ranked)
    return RocCurve(_rise(false), _rise(hits), _thresholds(ranked))


@jax.jit
def _precision_recall_curve(ranked: _Ranked) -> PrecisionRecallCurve:
    hits, _, precision = _rates(ranked)
    precision = jnp.where(jnp.isnan(hits), jnp.nan, precision)
    first = jnp.ones(1, precision.dtype)
    return PrecisionRecallCurve(jnp.concatenate([first, precision]), _rise(hits), _thresholds(ranked))


def _rise(rate: Float[Array, " rows"]) -> Float[Array, " points"]:
    """A zero and the rate of each row, made monotone: sums of weights may decrease by rounding."""
    return jnp.concatenate([jnp.zeros(1, rate.dtype), jax.lax.cummax(rate)])


def _thresholds(ranked: _Ranked) -> Float[Array, " points"]:
    in_order = -ranked.scores
    # Ignored rows, which come last, repeat the lowest threshold.
    lowest = jnp.min(jnp.where(ranked.positive + ranked.negative == 0, jnp.inf, in_order))
    return jnp.concatenate([jnp.full(1, jnp.inf, in_order.dtype), jnp.maximum(in_order, lowest)])
