import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._boundary import array_function, counted_rows, kinds, mean_of_rows, weigh
from .._brief import brief_repr
from ._groups import running_sum, ties


@array_function(in_order="-scores")
def auroc(
    scores: kinds.Ranked, positives: kinds.Positives, *, row_weights: kinds.RowWeights = None
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
    ranked = _rank(scores, positives, row_weights)
    # The rate above the tied rows of each row. Weights are not differences of rates: as XLA rounds these, millions of
    # rows between which nothing changes would add up.
    above = jnp.append(0, ranked.hits).astype(scores.dtype)[ranked.first]
    return mean_of_rows((ranked.hits + above) / 2, ranked.negative)


@array_function(in_order="-scores")
def aupr(scores: kinds.Ranked, positives: kinds.Positives, *, row_weights: kinds.RowWeights = None) -> Float[Array, ""]:
    r"""Area under the precision-recall curve, as average precision, $\sum_k (R_k - R_{k-1}) P_k$ over thresholds.

    Recall $R_k$ and precision $P_k$ count all rows at or above the $k$-th highest distinct score. The chance
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
    ranked = _rank(scores, positives, row_weights)
    return mean_of_rows(jnp.where(jnp.isnan(ranked.hits), jnp.nan, ranked.precision), ranked.positive)


@array_function(in_order="-scores")
def fpr_at_tpr(
    scores: kinds.Ranked, positives: kinds.Positives, *, level: float = 0.95, row_weights: kinds.RowWeights = None
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
    ranked = _rank(scores, positives, row_weights)
    rounding = 4 * math.log2(2 * scores.size) * jnp.finfo(scores.dtype).eps
    enough = ranked.hits >= level * (1 - rounding)
    return jnp.min(jnp.where(enough | jnp.isnan(ranked.hits), ranked.false, 1))


class _Ranking(NamedTuple):
    """Of rows, highest score first: their weights if positive or negative, the true and false positive rate and the
    precision at their score, and the first of the rows that tie with them.
    """

    positive: Float[Array, " rows"]
    negative: Float[Array, " rows"]
    hits: Float[Array, " rows"]
    false: Float[Array, " rows"]
    precision: Float[Array, " rows"]
    first: Int[Array, " rows"]


def _rank(scores: Float[Array, " rows"], positives: Bool[Array, " rows"], row_weights: Array | None) -> _Ranking:
    """The ranking; NaN if the score of a row that counts is."""
    own = jnp.ones_like(scores) if row_weights is None else row_weights.astype(scores.dtype)
    positive = jnp.where(positives, own, 0)
    negative = own - positive
    total = running_sum(positive), running_sum(negative)
    first, last = ties(scores)
    hits, false = total[0][last], total[1][last]  # tied rows have the rates of the last of them
    broken = jnp.any(jnp.isnan(scores) & (own != 0))
    rate = lambda x: jnp.where(broken, jnp.nan, x / x[-1])
    precision = jnp.where(hits == 0, 0, hits / (hits + false))
    return _Ranking(positive, negative, rate(hits), rate(false), precision, first)


class RocCurve(NamedTuple):
    """The points of a ROC curve from (0, 0) to (1, 1): arrays `(rows + 1,)`.

    - `false_positive_rate`, `true_positive_rate`: of the rows whose score is at or above the threshold.
    - `thresholds`: from infinity down to the lowest score.
    """

    false_positive_rate: Float[Array, " points"]
    true_positive_rate: Float[Array, " points"]
    thresholds: Float[Array, " points"]

    def __repr__(self) -> str:
        return brief_repr(self)


class PrecisionRecallCurve(NamedTuple):
    """The points of a precision-recall curve from recall 0 to recall 1: arrays `(rows + 1,)`.

    - `precision`, `recall`: of the rows whose score is at or above the threshold; precision is 1 at the first point.
    - `thresholds`: from infinity down to the lowest score.
    """

    precision: Float[Array, " points"]
    recall: Float[Array, " points"]
    thresholds: Float[Array, " points"]

    def __repr__(self) -> str:
        return brief_repr(self)


@array_function(in_order="-scores")
def roc_curve(scores: kinds.Ranked, positives: kinds.Positives, *, row_weights: kinds.RowWeights = None) -> RocCurve:
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
    ranked = _rank(scores, positives, row_weights)
    return RocCurve(_rise(ranked.false), _rise(ranked.hits), _thresholds(scores))


@array_function(in_order="-scores")
def precision_recall_curve(
    scores: kinds.Ranked, positives: kinds.Positives, *, row_weights: kinds.RowWeights = None
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
    ranked = _rank(scores, positives, row_weights)
    precision = jnp.where(jnp.isnan(ranked.hits), jnp.nan, ranked.precision)
    first = jnp.ones(1, precision.dtype)
    return PrecisionRecallCurve(jnp.concatenate([first, precision]), _rise(ranked.hits), _thresholds(scores))


def _rise(rate: Float[Array, " rows"]) -> Float[Array, " points"]:
    """A zero and the rate of each row, made monotone: sums of weights may decrease by rounding."""
    return jnp.concatenate([jnp.zeros(1, rate.dtype), jax.lax.cummax(rate)])


def _thresholds(scores: Float[Array, " rows"]) -> Float[Array, " points"]:
    """Infinity and the scores; ignored rows, which come last and are NaN, repeat the lowest."""
    lowest = jnp.min(jnp.where(jnp.isnan(scores), jnp.inf, scores))
    return jnp.concatenate([jnp.full(1, jnp.inf, scores.dtype), jnp.where(jnp.isnan(scores), lowest, scores)])


class RiskCoverage(NamedTuple):
    """The fraction of accepted rows, `coverage`, increasing to 1, and their mean loss, `risk`, each `(rows,)`."""

    coverage: Float[Array, " rows"]
    risk: Float[Array, " rows"]

    def __repr__(self) -> str:
        return brief_repr(self)


@array_function(in_order="uncertainty")
def risk_coverage(
    uncertainty: kinds.Ranked, losses: kinds.Losses, *, row_weights: kinds.RowWeights = None
) -> RiskCoverage:
    """Risk-coverage curve of selective prediction: the mean loss when the least certain rows are rejected.

    Point `k` is the mean loss of the `k + 1` rows with the lowest uncertainty; for tied rows, its expectation over
    their random order. Row weights weight both axes.

    **Arguments:**

    - `uncertainty`: one number per row `(*batch,)`, higher is less certain.
    - `losses`: `(*batch,)`, such as `scores.nll(logits, labels, reduction="none")`.
    - `row_weights`: as for every score.

    **Returns:**

    [`eqx_ensemble.scores.RiskCoverage`][]; ignored rows repeat the last point.

    ```python
    uncertainty, wrong = jnp.array([0.1, 0.7, 0.3, 0.9]), jnp.array([0.0, 0.0, 0.0, 1.0])
    ee.scores.risk_coverage(uncertainty, wrong)  # risk [0, 0, 0, 0.25]
    ```

    ??? cite
        [Geifman and El-Yaniv, NeurIPS 2017](https://arxiv.org/abs/1705.08500)
    """
    return _points(uncertainty, losses, row_weights)[0]


@array_function(in_order="uncertainty")
def aurc(uncertainty: kinds.Ranked, losses: kinds.Losses, *, row_weights: kinds.RowWeights = None) -> Float[Array, ""]:
    r"""Area under the risk-coverage curve, $\frac1n \sum_{k=1}^n \mathrm{risk}_k$, in the unit of the loss.

    It depends on the ranking and on the predictions; [`eqx_ensemble.scores.excess_aurc`][] on the ranking alone.

    **Arguments:**

    As [`eqx_ensemble.scores.risk_coverage`][].

    **Returns:**

    A scalar; the mean loss if all rows tie.

    ```python
    uncertainty, wrong = jnp.array([0.1, 0.7, 0.3, 0.9]), jnp.array([0.0, 0.0, 0.0, 1.0])
    ee.scores.aurc(uncertainty, wrong)  # 0.25 / 4 = 0.0625
    ```

    ??? cite
        [Geifman et al., ICLR 2019](https://arxiv.org/abs/1805.08206)
    """
    points, steps = _points(uncertainty, losses, row_weights)
    return _area(points.risk, steps)


@array_function(in_order="uncertainty")
def excess_aurc(
    uncertainty: kinds.Ranked, losses: kinds.Losses, *, row_weights: kinds.CountedRows = None
) -> Float[Array, ""]:
    """Excess area under the risk-coverage curve (E-AURC): the area minus that of the ideal ranking of these rows.

    **Arguments:**

    As [`eqx_ensemble.scores.risk_coverage`][], but `row_weights` are booleans.

    **Returns:**

    A non-negative scalar, in the unit of the loss.

    ```python
    uncertainty, wrong = jnp.array([0.1, 0.7, 0.3, 0.9]), jnp.array([1.0, 0.0, 0.0, 0.0])
    ee.scores.excess_aurc(uncertainty, wrong)
    # (1 + 1/2 + 1/3 + 1/4) / 4 - 0.25 / 4 = 0.458
    ```

    ??? cite
        [Geifman et al., ICLR 2019](https://arxiv.org/abs/1805.08206)
    """
    counted = jnp.ones(losses.shape, bool) if row_weights is None else row_weights
    centred = jnp.where(counted, losses - mean_of_rows(losses, counted), 0)
    (found, steps), order = _points(uncertainty, centred, counted), jnp.argsort(jnp.where(counted, losses, jnp.nan))
    best, _ = _points(jnp.where(counted, centred, jnp.nan)[order], centred[order], counted[order])
    return jnp.maximum(_area(found.risk - best.risk, steps), 0)


def _points(
    uncertainty: Float[Array, " rows"], losses: Float[Array, " rows"], row_weights: Array | None
) -> tuple[RiskCoverage, Float[Array, " rows"]]:
    """The points of the curve, and the increments of covered weight; ignored rows come last, with uncertainty NaN."""
    weights = jnp.ones(losses.shape, bool) if row_weights is None else row_weights
    counted, dtype = counted_rows(weights), losses.dtype
    first, last = ties(uncertainty)
    row = jnp.arange(first.size, dtype=first.dtype)
    share = (row - first + 1).astype(dtype) / (last - first + 1).astype(dtype)

    def running(values: Float[Array, " rows"]) -> Float[Array, " rows"]:
        """The expected sum over random orders: it is linear between the ends of tied rows."""
        sums = jnp.append(0, running_sum(values)).astype(dtype)
        before, after = sums[first], sums[last + 1]
        return jnp.where(row == last, after, (1 - share) * before + share * after)

    if weights.dtype == bool:
        steps = counted.astype(dtype)
        covered = jnp.minimum(row + 1, jnp.sum(counted, dtype=row.dtype)).astype(dtype)
    else:
        covered = jax.lax.cummax(running(weights))
        steps = jnp.where(first == last, weights, jnp.diff(covered, prepend=jnp.zeros(1, dtype)))
    risk = running(weigh(losses, weights)) / covered
    broken = jnp.any(jnp.isnan(uncertainty) & counted)
    return RiskCoverage(covered / covered[-1], jnp.where(broken, jnp.nan, risk)), steps


def _area(risk: Float[Array, " rows"], steps: Float[Array, " rows"]) -> Float[Array, ""]:
    """The mean over the points of rows that are not ignored, which come first."""
    return jnp.sum(jnp.where(steps == 0, 0, risk * steps)) / jnp.sum(steps)
