from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Real

from .._brief import brief_repr
from .._check import check_counted_rows
from ._reduce import RowWeights, check_selection, counts, mean_of_rows, sum_by_segment, weigh


class RiskCoverage(NamedTuple):
    """The fraction of accepted rows, `coverage`, and their mean loss, `risk`, each `(rows,)`."""

    coverage: Float[Array, " rows"]
    risk: Float[Array, " rows"]

    __repr__ = brief_repr


def risk_coverage(
    uncertainty: Float[ArrayLike, "*batch"],
    losses: Real[ArrayLike, "*batch"],
    *,
    row_weights: Bool[ArrayLike, "*batch"] | Real[ArrayLike, "*batch"] | None = None,
) -> RiskCoverage:
    """Risk-coverage curve of selective prediction: the mean loss when the least certain rows are rejected.

    Point `k` is the mean loss of the `k + 1` rows with the lowest uncertainty. The risk of tied rows is its expectation
    over their random order, so the row order does not matter. With weights, risks are weighted means and coverages are
    fractions of the weight; points of tied rows are then equally spaced.

    **Arguments:**

    - `uncertainty`: one number per row `(*batch,)`, higher is less certain.
    - `losses`: `(*batch,)`, such as `scores.nll(logits, labels, reduction="none")`, or one minus `scores.accuracy`.
    - `row_weights`: relative weights `(*batch,)`, or booleans; rows of zero or `False` are ignored, even if NaN.

    **Returns:**

    A named tuple with `.coverage`, increasing to 1, and `.risk`, each `(rows,)`; ignored rows repeat the last point.
    NaN if a row that is not ignored is NaN.

    **Raises:**

    - `TypeError` for uncertainties that are not floating-point.
    - `ValueError` for mismatched shapes, zero rows, and invalid row weights.

    ```python
    uncertainty, wrong = jnp.array([0.1, 0.7, 0.3, 0.9]), jnp.array([0.0, 0.0, 0.0, 1.0])
    ee.scores.risk_coverage(uncertainty, wrong)  # risk [0, 0, 0, 0.25]
    ```

    ??? cite
        [Selective Classification for Deep Neural Networks](https://arxiv.org/abs/1705.08500)
    """
    return _risk_coverage(*check_selection(uncertainty, losses, row_weights))


def aurc(
    uncertainty: Float[ArrayLike, "*batch"],
    losses: Real[ArrayLike, "*batch"],
    *,
    row_weights: Bool[ArrayLike, "*batch"] | Real[ArrayLike, "*batch"] | None = None,
) -> Float[Array, ""]:
    r"""Area under the risk-coverage curve, $\frac1n \sum_{k=1}^n \mathrm{risk}_k$; lower is better.

    In the unit of the loss. It depends on the ranking and on the predictions: for the ranking alone see
    [`eqx_ensemble.scores.excess_aurc`][].

    **Arguments:**

    - `uncertainty`, `losses`, `row_weights`: as for [`eqx_ensemble.scores.risk_coverage`][]. The risk of each
        point is weighted by its row. A repeated row has more points than a row of larger weight, and gives a different
        area.

    **Returns:**

    A scalar; the mean loss if all rows tie.

    **Raises:**

    As [`eqx_ensemble.scores.risk_coverage`][].

    ```python
    uncertainty, wrong = jnp.array([0.1, 0.7, 0.3, 0.9]), jnp.array([0.0, 0.0, 0.0, 1.0])
    ee.scores.aurc(uncertainty, wrong)  # 0.25 / 4 = 0.0625
    ```

    ??? cite
        [Bias-Reduced Uncertainty Estimation for Deep Neural Classifiers](https://arxiv.org/abs/1805.08206)
    """
    return _aurc(*check_selection(uncertainty, losses, row_weights))


def excess_aurc(
    uncertainty: Float[ArrayLike, "*batch"],
    losses: Real[ArrayLike, "*batch"],
    *,
    row_weights: Bool[ArrayLike, "*batch"] | Real[ArrayLike, "*batch"] | None = None,
) -> Float[Array, ""]:
    """Excess area under the risk-coverage curve (E-AURC): the area minus that of the ideal ranking, by the losses.

    Zero for a perfect ranking. The ideal area is computed exactly for these rows, not in the limit of many rows. Row
    weights are booleans: with unequal weights, the ranking by losses is not always optimal.

    **Arguments:**

    - `uncertainty`, `losses`: as for [`eqx_ensemble.scores.risk_coverage`][].
    - `row_weights`: booleans `(*batch,)`, or 0 and 1; rows of `False` or 0 are ignored, even if NaN.

    **Returns:**

    A non-negative scalar, in the unit of the loss. A common offset of the losses costs no precision.

    **Raises:**

    As [`eqx_ensemble.scores.risk_coverage`][].

    ```python
    uncertainty, wrong = jnp.array([0.1, 0.7, 0.3, 0.9]), jnp.array([1.0, 0.0, 0.0, 0.0])
    ee.scores.excess_aurc(uncertainty, wrong)
    # (1 + 1/2 + 1/3 + 1/4) / 4 - 0.25 / 4 = 0.458
    ```

    ??? cite
        [Bias-Reduced Uncertainty Estimation for Deep Neural Classifiers](https://arxiv.org/abs/1805.08206)
    """
    counted = check_counted_rows(row_weights, np.shape(uncertainty)).counted
    return _excess_aurc(*check_selection(uncertainty, losses, counted))


@jax.jit
def _risk_coverage(
    uncertainty: Float[Array, " rows"], losses: Float[Array, " rows"], row_weights: RowWeights
) -> RiskCoverage:
    points, _ = _points(uncertainty, losses, row_weights)
    return points


@jax.jit
def _aurc(
    uncertainty: Float[Array, " rows"], losses: Float[Array, " rows"], row_weights: RowWeights
) -> Float[Array, ""]:
    points, steps = _points(uncertainty, losses, row_weights)
    return _area(points.risk, steps)


@jax.jit
def _excess_aurc(
    uncertainty: Float[Array, " rows"], losses: Float[Array, " rows"], counted: Bool[Array, " rows"]
) -> Float[Array, ""]:
    centred = jnp.where(counted, losses - mean_of_rows(losses, counted), 0)
    found, steps = _points(uncertainty, centred, counted)
    best, _ = _points(centred, centred, counted)
    return jnp.maximum(_area(found.risk - best.risk, steps), 0)


def _points(
    uncertainty: Float[Array, " rows"], losses: Float[Array, " rows"], row_weights: RowWeights
) -> tuple[RiskCoverage, Float[Array, " rows"]]:
    """The points of the curve, and the increments of covered weight."""
    counted = counts(row_weights)
    uncertainty = jnp.where(counted, uncertainty, jnp.inf)
    # Ignored rows come last, after rows of infinite uncertainty.
    order = jnp.lexsort((uncertainty, ~counted))
    ranked, kept = uncertainty[order], counted[order]
    # The expectation over random orders: tied rows get their mean loss and mean weight.
    new = (ranked[1:] != ranked[:-1]) | (kept[1:] != kept[:-1])
    group = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(new, dtype=jnp.int32)])
    per_group = lambda x: sum_by_segment(x, group, group.size, in_order=True)[group]
    size = per_group(jnp.ones(group.shape, jnp.int32)).astype(losses.dtype)
    if row_weights.dtype == bool:
        steps, weight = kept.astype(losses.dtype), size
        covered = jnp.minimum(jnp.arange(1, group.size + 1), jnp.sum(kept)).astype(losses.dtype)
    else:
        own = row_weights[order]
        weight = per_group(own)
        steps = weight / size
        covered = jax.lax.cummax(jnp.cumsum(steps))
    expected = per_group(weigh(losses, row_weights)[order]) / jnp.where(weight == 0, 1, weight)
    risk = jnp.cumsum(expected * steps) / covered
    broken = jnp.any(jnp.isnan(ranked) & kept)
    return RiskCoverage(covered / covered[-1], jnp.where(broken, jnp.nan, risk)), steps


def _area(risk: Float[Array, " rows"], steps: Float[Array, " rows"]) -> Float[Array, ""]:
    """The mean over the points of rows that are not ignored, which come first."""
    return jnp.sum(jnp.where(steps == 0, 0, risk * steps)) / jnp.sum(steps)
