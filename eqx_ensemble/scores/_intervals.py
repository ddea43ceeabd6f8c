from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Integer, Real

from .._check import (
    CountedRows,
    RowWeightsLike,
    check_array,
    check_entries,
    check_floating_arrays,
    check_labels,
    check_level,
    check_regression,
    check_row_weights,
    concrete,
    type_error,
    value_error,
)
from .._weighting import at_label
from ._reduce import Reduction, RowWeights, import_scoringrules, reduce, scoringrules_config


def check_interval(lower: ArrayLike, upper: ArrayLike, rows: CountedRows) -> None:
    """Raises if a lower end is above its upper end in a row that counts; checked where concrete."""
    high, fix = concrete(upper), "Swapped? `lower` comes first."
    if high is not None:
        check_entries("`lower` ends at or below `upper` ends", lower, lambda low: low > high, fix, rows)


def interval_score(
    lower: Float[ArrayLike, "*batch"],
    upper: Float[ArrayLike, "*batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    level: float,
    row_weights: RowWeightsLike | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Interval (Winkler) score of central intervals: width plus a penalty for targets outside.

    $(u - l) + \frac{2}{1 - \mathrm{level}} (\max(l - y, 0) + \max(y - u, 0))$, in the unit of the target. Its
    expectation is minimised by the true quantiles. Needs `scoringrules`.

    **Arguments:**

    - `level`: the nominal coverage of the intervals, between 0 and 1.
    - the others: as for [`eqx_ensemble.scores.coverage`][].

    **Returns:**

    A scalar, or `(*batch,)`. Infinite for unbounded intervals.

    ```python
    ee.scores.interval_score(jnp.zeros(1), jnp.ones(1), jnp.array([1.1]), level=0.8)
    # 1 + 0.1 * 2 / 0.2 = 2.0
    ```

    ??? cite
        [Gneiting and Raftery, JASA 2007](https://doi.org/10.1198/016214506000001437)
    """
    rules = import_scoringrules()
    low, high, observed = check_regression(targets, members=False, lower=lower, upper=upper)
    check_level(level)
    rows = check_row_weights(row_weights, observed.shape, observed.dtype, reduction=reduction)
    check_interval(lower, upper, rows=rows)
    low, high, observed = (rows.blank(x) for x in (low, high, observed))
    # scoringrules multiplies distances by zero or one, and infinity times zero is NaN.
    infinite = jnp.isinf(low) | jnp.isinf(high) | jnp.isinf(observed)
    unknown = jnp.isnan(low) | jnp.isnan(high) | jnp.isnan(observed)
    low, high, observed = (jnp.where(infinite, 0, x) for x in (low, high, observed))
    with scoringrules_config():
        each = rules.interval_score(observed, low, high, 1 - level, backend="jax")
    each = jnp.where(infinite, jnp.where(unknown, jnp.nan, jnp.inf), jnp.reshape(each, observed.shape))
    return reduce(each, reduction, rows.weights)


def pinball(
    quantiles: Float[ArrayLike, "*batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    level: float,
    row_weights: RowWeightsLike | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Pinball (quantile) score of predictions of a single quantile.

    $\tau (y - q)$ for targets above the prediction, $(1 - \tau) (q - y)$ for targets below, with level $\tau$. Needs
    `scoringrules`.

    **Arguments:**

    - `quantiles`, `targets`: of one shape `(*batch,)`, no `members` axis.
    - `level`: the level of the predicted quantile, between 0 and 1.
    - `row_weights`, `reduction`: as for every score.

    **Returns:**

    A scalar, or `(*batch,)`, in the unit of the target.

    ```python
    ee.scores.pinball(jnp.zeros(2), jnp.array([1.0, -1.0]), level=0.9)
    # (0.9 + 0.1) / 2 = 0.5
    ```

    ??? cite
        [Koenker and Bassett, Econometrica 1978](https://doi.org/10.2307/1913643)
    """
    rules = import_scoringrules()
    predicted, observed = check_regression(targets, members=False, quantiles=quantiles)
    check_level(level)
    rows = check_row_weights(row_weights, observed.shape, observed.dtype, reduction=reduction)
    predicted, observed = rows.blank(predicted), rows.blank(observed)
    with scoringrules_config():
        each = rules.quantile_score(observed, predicted, level, backend="jax").astype(predicted.dtype)
    return reduce(each, reduction, rows.weights)


def coverage(
    lower: Float[ArrayLike, "*batch"],
    upper: Float[ArrayLike, "*batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    row_weights: RowWeightsLike | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    """Fraction of targets inside their intervals, ends included; ideally equal to the level of the intervals.

    **Arguments:**

    - `lower`, `upper`, `targets`: of one shape `(*batch,)`, no `members` axis.
    - `row_weights`, `reduction`: as for every score.

    **Returns:**

    A scalar, or `(*batch,)`.

    **Raises:**

    `ValueError` for lower ends above upper ends.

    ```python
    ee.scores.coverage(jnp.zeros(2), jnp.ones(2), jnp.array([0.5, 3.0]))  # 0.5
    ```
    """
    low, high, observed = check_regression(targets, members=False, lower=lower, upper=upper)
    rows = check_row_weights(row_weights, observed.shape, low.dtype, reduction=reduction)
    check_interval(lower, upper, rows=rows)
    return _coverage(low, high, observed, rows.weights, reduction)


def width(
    lower: Float[ArrayLike, "*batch"],
    upper: Float[ArrayLike, "*batch"],
    *,
    row_weights: RowWeightsLike | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    """Width of intervals, in the unit of the target; at equal coverage, narrower is better.

    **Arguments:**

    As [`eqx_ensemble.scores.coverage`][], without `targets`.

    **Returns:**

    A scalar, or `(*batch,)`.

    ```python
    ee.scores.width(jnp.zeros(2), jnp.array([1.0, 3.0]))  # 2.0
    ```
    """
    low, high = check_floating_arrays(lower=lower, upper=upper)
    rows = check_row_weights(row_weights, low.shape, low.dtype, reduction=reduction)
    check_interval(lower, upper, rows=rows)
    return reduce(rows.blank(high) - rows.blank(low), reduction, rows.weights)


def check_sets(sets: ArrayLike) -> Array:
    """Raises unless `sets` are booleans `(*batch, classes)`. Returns them as an array."""
    array = check_array("sets", sets)
    if array.dtype != bool:
        fix = "Pass one boolean per class: whether it is in the set."
        raise type_error("boolean `sets`", f"got dtype {array.dtype}, shape {array.shape}", fix)
    if array.ndim < 1:
        got, fix = f"got shape {array.shape}", "Classes are on the last axis."
        raise value_error("`sets` of shape (*batch, classes)", got, fix)
    return array


def set_coverage(
    sets: Bool[ArrayLike, "*batch classes"],
    labels: Integer[ArrayLike, "*batch"],
    *,
    row_weights: RowWeightsLike | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    """Fraction of labels inside their prediction sets; ideally equal to the level of the sets.

    **Arguments:**

    - `sets`: booleans `(*batch, classes)`, no `members` axis.
    - `labels`: integers `(*batch,)` from 0 to classes - 1.
    - `row_weights`, `reduction`: as for every score.

    **Returns:**

    A scalar, or `(*batch,)`.

    ```python
    sets = jnp.array([[True, True, False], [True, False, False]])
    ee.scores.set_coverage(sets, jnp.array([1, 2])), ee.scores.set_size(sets)  # 0.5, 1.5
    ```
    """
    chosen = check_sets(sets)
    rows = check_row_weights(row_weights, chosen.shape[:-1], jnp.result_type(float), reduction=reduction)
    targets = check_labels(labels, chosen, rows, argument="sets", members=False)
    return _set_coverage(chosen, rows.blank(targets), rows.weights, reduction)


def set_size(
    sets: Bool[ArrayLike, "*batch classes"],
    *,
    row_weights: RowWeightsLike | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    """Number of classes in prediction sets; at equal coverage, smaller is better.

    **Arguments:**

    As [`eqx_ensemble.scores.set_coverage`][], without `labels`.

    **Returns:**

    A scalar, or `(*batch,)`.

    ```python
    ee.scores.set_size(jnp.array([[True, True, False], [True, False, False]]))  # 1.5
    ```
    """
    chosen = check_sets(sets)
    rows = check_row_weights(row_weights, chosen.shape[:-1], jnp.result_type(float), reduction=reduction)
    return reduce(jnp.sum(chosen, axis=-1).astype(float), reduction, rows.weights)


@partial(jax.jit, static_argnames="reduction")
def _coverage(
    lower: Float[Array, "*batch"],
    upper: Float[Array, "*batch"],
    targets: Float[Array, "*batch"],
    row_weights: RowWeights | None,
    reduction: Reduction,
) -> Float[Array, "..."]:
    inside = ((lower <= targets) & (targets <= upper)).astype(lower.dtype)
    unknown = jnp.isnan(lower) | jnp.isnan(upper) | jnp.isnan(targets)
    return reduce(jnp.where(unknown, jnp.nan, inside), reduction, row_weights)


@partial(jax.jit, static_argnames="reduction")
def _set_coverage(
    sets: Bool[Array, "*batch classes"],
    labels: Integer[Array, "*batch"],
    row_weights: RowWeights | None,
    reduction: Reduction,
) -> Float[Array, "..."]:
    return reduce(at_label(sets.astype(float), labels), reduction, row_weights)
