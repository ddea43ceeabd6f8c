from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Real

from .._brief import brief_repr
from .._check import RowWeightsLike, check_counted_rows
from .._combination import sort_rows
from ._reduce import RowWeights, check_selection, counts, mean_of_rows, running_sum, ties, weigh


class RiskCoverage(NamedTuple):
    """The fraction of accepted rows, `coverage`, increasing to 1, and their mean loss, `risk`, each `(rows,)`."""

    coverage: Float[Array, " rows"]
    risk: Float[Array, " rows"]

    __repr__ = brief_repr


def risk_coverage(
    uncertainty: Float[ArrayLike, "*batch"],
    losses: Real[ArrayLike, "*batch"],
    *,
    row_weights: RowWeightsLike | None = None,
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
    return _risk_coverage(_rank(*check_selection(uncertainty, losses, row_weights)))


def aurc(
    uncertainty: Float[ArrayLike, "*batch"],
    losses: Real[ArrayLike, "*batch"],
    *,
    row_weights: RowWeightsLike | None = None,
) -> Float[Array, ""]:
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
    return _aurc(_rank(*check_selection(uncertainty, losses, row_weights)))


def excess_aurc(
    uncertainty: Float[ArrayLike, "*batch"],
    losses: Real[ArrayLike, "*batch"],
    *,
    row_weights: RowWeightsLike | None = None,
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
    counted = check_counted_rows(row_weights, np.shape(uncertainty)).counted
    values, array, counted = check_selection(uncertainty, losses, counted)
    centred = _centre(array, counted)
    return _excess_aurc(_rank(values, centred, counted), _rank(centred, centred, counted))


class _Ranked(NamedTuple):
    """Uncertainties in rising order, NaN for ignored rows, which come last, their losses and row weights."""

    uncertainty: Float[Array, " rows"]
    losses: Float[Array, " rows"]
    weights: RowWeights


def _rank(uncertainty: Float[Array, " rows"], losses: Float[Array, " rows"], row_weights: RowWeights) -> _Ranked:
    return _Ranked(*sort_rows(_blank(uncertainty, row_weights), losses, row_weights))


@jax.jit
def _blank(values: Float[Array, " rows"], row_weights: RowWeights) -> Float[Array, " rows"]:
    return jnp.where(counts(row_weights), values, jnp.nan)


@jax.jit
def _risk_coverage(ranked: _Ranked) -> RiskCoverage:
    return _points(ranked)[0]


@jax.jit
def _aurc(ranked: _Ranked) -> Float[Array, ""]:
    points, steps = _points(ranked)
    return _area(points.risk, steps)


@jax.jit
def _centre(losses: Float[Array, " rows"], counted: Bool[Array, " rows"]) -> Float[Array, " rows"]:
    return jnp.where(counted, losses - mean_of_rows(losses, counted), 0)


@jax.jit
def _excess_aurc(ranked: _Ranked, ideal: _Ranked) -> Float[Array, ""]:
    (found, steps), (best, _) = _points(ranked), _points(ideal)
    return jnp.maximum(_area(found.risk - best.risk, steps), 0)


def _points(ranked: _Ranked) -> tuple[RiskCoverage, Float[Array, " rows"]]:
    """The points of the curve, and the increments of covered weight."""
    uncertainty, losses, weights = ranked
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
