from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._boundary import CountedRows, Losses, Ranked, RowWeights, array_function, counts, mean_of_rows, weigh
from .._brief import brief_repr
from ._reduce import running_sum, ties


class RiskCoverage(NamedTuple):
    """The fraction of accepted rows, `coverage`, increasing to 1, and their mean loss, `risk`, each `(rows,)`."""

    coverage: Float[Array, " rows"]
    risk: Float[Array, " rows"]

    __repr__ = brief_repr


@array_function(in_order="uncertainty")
def risk_coverage(uncertainty: Ranked, losses: Losses, *, row_weights: RowWeights = None) -> RiskCoverage:
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
def aurc(uncertainty: Ranked, losses: Losses, *, row_weights: RowWeights = None) -> Float[Array, ""]:
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
def excess_aurc(uncertainty: Ranked, losses: Losses, *, row_weights: CountedRows = None) -> Float[Array, ""]:
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
    counted, dtype = counts(weights), losses.dtype
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
