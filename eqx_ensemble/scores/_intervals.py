from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Integer, Real

from .._check import (
    CountedRows,
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
    row_weights: Bool[ArrayLike, "*batch"] | Real[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Interval (Winkler) score of central intervals: width plus a penalty for targets outside; lower is better.

    $(u - l) + \frac{2}{1 - \mathrm{level}} (\max(l - y, 0) + \max(y - u, 0))$, in the unit of the target. Its
    expectation is minimised by the true quantiles: it balances coverage and width. Computed by `scoringrules`
    (`pip install 'eqx_ensemble[scores]'`).

    **Arguments:**

    - `lower`, `upper`: the ends, of one shape; no `members` axis.
    - `targets`: of the same shape; nothing is broadcast.
    - `level`: the nominal coverage of the intervals, a Python number between 0 and 1.
    - `row_weights`: relative weights `(*batch,)`, or booleans; rows of zero or `False` are ignored, even if NaN.
    - `reduction`: `"mean"` over all entries, or `"none"` for one value per entry, NaN for ignored ones.

    **Returns:**

    A scalar, or `(*batch,)`. Infinite for unbounded intervals, such as those of [`eqx_ensemble.conformal.split`][] with
    too few rows, and infinite targets.

    **Raises:**

    As [`eqx_ensemble.scores.coverage`][]; also `ValueError` for a level outside (0, 1), and `ImportError` without
    scoringrules.

    ```python
    ee.scores.interval_score(jnp.zeros(1), jnp.ones(1), jnp.array([1.1]), level=0.8)
    # 1 + 0.1 * 2 / 0.2 = 2.0
    ```

    ??? cite
        [Strictly Proper Scoring Rules, Prediction, and Estimation](https://doi.org/10.1198/016214506000001437)
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
    row_weights: Bool[ArrayLike, "*batch"] | Real[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Pinball (quantile) score of predictions of a single quantile; lower is better.

    $\tau (y - q)$ for targets above the prediction and $(1 - \tau) (q - y)$ for targets below, with level $\tau$; in
    the unit of the target. Computed by `scoringrules` (`pip install 'eqx_ensemble[scores]'`).

    **Arguments:**

    - `quantiles`, `targets`: of one shape `(*batch,)`, without a `members` axis; nothing is broadcast.
    - `level`: the level of the predicted quantile, a Python number between 0 and 1.
    - `row_weights`: relative weights `(*batch,)`, or booleans; rows of zero or `False` are ignored, even if NaN.
    - `reduction`: `"mean"` over all entries, or `"none"` for one value per entry, NaN for ignored ones.

    **Returns:**

    A scalar, or `(*batch,)`.

    **Raises:**

    - `ImportError` without scoringrules.
    - `TypeError` for quantiles that are not floating-point.
    - `ValueError` for mismatched shapes, and a level outside (0, 1).

    ```python
    ee.scores.pinball(jnp.zeros(2), jnp.array([1.0, -1.0]), level=0.9)
    # (0.9 + 0.1) / 2 = 0.5
    ```

    ??? cite
        [Regression Quantiles](https://doi.org/10.2307/1913643)
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
    row_weights: Bool[ArrayLike, "*batch"] | Real[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    """Fraction of targets inside their intervals, ends included; ideally equal to the level of the intervals.

    **Arguments:**

    - `lower`, `upper`: the ends, such as those of [`eqx_ensemble.uncertainty.gaussian_interval`][]; no `members` axis.
    - `targets`: of the same shape; nothing is broadcast.
    - `row_weights`: relative weights `(*batch,)`, or booleans; rows of zero or `False` are ignored, even if NaN.
    - `reduction`: `"mean"` over all entries, or `"none"` for 1.0 (inside) or 0.0 (outside) per entry, NaN for ignored
        ones.

    **Returns:**

    A scalar, or `(*batch,)`. NaN where an end or the target is NaN.

    **Raises:**

    - `TypeError` for ends that are not floating-point.
    - `ValueError` for mismatched shapes, and lower ends above upper ends (where concrete).

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
    row_weights: Bool[ArrayLike, "*batch"] | Real[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    """Width of intervals, in the unit of the target; at equal coverage, narrower is better.

    **Arguments:**

    - `lower`, `upper`: the ends, of one shape; no `members` axis.
    - `row_weights`: relative weights `(*batch,)`, or booleans; rows of zero or `False` are ignored, even if NaN.
    - `reduction`: `"mean"` over all entries, or `"none"` for one value per entry, NaN for ignored ones.

    **Returns:**

    A scalar, or `(*batch,)`.

    **Raises:**

    - `TypeError` for ends that are not floating-point.
    - `ValueError` for mismatched shapes, and for a lower end above its upper end (where concrete).

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
    row_weights: Bool[ArrayLike, "*batch"] | Real[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    """Fraction of labels inside their prediction sets; ideally equal to the level of the sets.

    **Arguments:**

    - `sets`: booleans `(*batch, classes)`, such as those of [`eqx_ensemble.conformal.aps`][]; no `members` axis.
    - `labels`: integers `(*batch,)` from 0 to classes - 1.
    - `row_weights`: relative weights `(*batch,)`, or booleans; rows of zero or `False` are ignored, even if NaN.
    - `reduction`: `"mean"` over all rows, or `"none"` for 1.0 (inside) or 0.0 (outside) per row, NaN for ignored rows.

    **Returns:**

    A scalar, or `(*batch,)`. While tracing, a label out of range makes its row NaN.

    **Raises:**

    - `TypeError` for sets that are not boolean or labels that are not integers.
    - `ValueError` for mismatched shapes, and labels out of range (where concrete).

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
    row_weights: Bool[ArrayLike, "*batch"] | Real[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    """Number of classes in prediction sets; at equal coverage, smaller is better.

    **Arguments:**

    - `sets`: booleans `(*batch, classes)`; no `members` axis.
    - `row_weights`: relative weights `(*batch,)`, or booleans; rows of zero or `False` are ignored, even if NaN.
    - `reduction`: `"mean"` over all rows, or `"none"` for one value per row, NaN for ignored rows.

    **Returns:**

    A scalar, or `(*batch,)`.

    **Raises:**

    - `TypeError` for sets that are not boolean.
    - `ValueError` for sets without a class axis.

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
