from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Integer, Real

from .._check import check_floating_arrays, check_labels, check_regression
from .._weighting import at_label
from ._check import check_interval, check_reduction, check_sets
from ._reduce import Reduction, RowWeights, reduce
from ._row_weights import check_rows


def coverage(
    lower: Float[ArrayLike, "*batch"],
    upper: Float[ArrayLike, "*batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    row_weights: Real[ArrayLike, "*batch"] | None = None,
    mask: Bool[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    """Fraction of targets inside their intervals, ends included; ideally equal to the level of the intervals.

    **Arguments:**

    - `lower`, `upper`: the ends, such as those of [`eqx_ensemble.uncertainty.gaussian_interval`][]; no `members` axis.
    - `targets`: of the same shape; nothing is broadcast.
    - `row_weights`: finite, non-negative row weights `(*batch,)`; only their ratios matter. A row of weight 2 counts
        twice; a row of weight zero is ignored, even if it contains NaN.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.
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
    name = "scores.coverage"
    low, high, observed = check_regression(name, targets, members=False, lower=lower, upper=upper)
    rows = check_rows(name, row_weights, mask, observed.shape, low.dtype)
    check_interval(name, lower, upper, mask=rows.known)
    check_reduction(name, reduction, observed.shape)
    return _coverage(low, high, observed, rows.weights, reduction)


def width(
    lower: Float[ArrayLike, "*batch"],
    upper: Float[ArrayLike, "*batch"],
    *,
    row_weights: Real[ArrayLike, "*batch"] | None = None,
    mask: Bool[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    """Width of intervals, in the unit of the target; at equal coverage, narrower is better.

    **Arguments:**

    - `lower`, `upper`: the ends, of one shape; no `members` axis.
    - `row_weights`: finite, non-negative row weights `(*batch,)`; only their ratios matter. A row of weight 2 counts
        twice; a row of weight zero is ignored, even if it contains NaN.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.
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
    name = "scores.width"
    low, high = check_floating_arrays(name, lower=lower, upper=upper)
    rows = check_rows(name, row_weights, mask, low.shape, low.dtype)
    check_interval(name, lower, upper, mask=rows.known)
    check_reduction(name, reduction, low.shape)
    return reduce(rows.blank(high) - rows.blank(low), reduction, rows.weights)


def set_coverage(
    sets: Bool[ArrayLike, "*batch classes"],
    labels: Integer[ArrayLike, "*batch"],
    *,
    row_weights: Real[ArrayLike, "*batch"] | None = None,
    mask: Bool[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    """Fraction of labels inside their prediction sets; ideally equal to the level of the sets.

    **Arguments:**

    - `sets`: booleans `(*batch, classes)`, such as those of [`eqx_ensemble.conformal.aps`][]; no `members` axis.
    - `labels`: integers `(*batch,)` from 0 to classes - 1.
    - `row_weights`: finite, non-negative row weights `(*batch,)`; only their ratios matter. A row of weight 2 counts
        twice; a row of weight zero is ignored, even if it contains NaN.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.
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
    name = "scores.set_coverage"
    chosen = check_sets(name, sets)
    rows = check_rows(name, row_weights, mask, chosen.shape[:-1], jnp.result_type(float))
    targets = check_labels(name, labels, chosen, rows.known, argument="sets", members=False)
    check_reduction(name, reduction, targets.shape)
    return _set_coverage(chosen, rows.blank(targets), rows.weights, reduction)


def set_size(
    sets: Bool[ArrayLike, "*batch classes"],
    *,
    row_weights: Real[ArrayLike, "*batch"] | None = None,
    mask: Bool[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    """Number of classes in prediction sets; at equal coverage, smaller is better.

    **Arguments:**

    - `sets`: booleans `(*batch, classes)`; no `members` axis.
    - `row_weights`: finite, non-negative row weights `(*batch,)`; only their ratios matter. A row of weight 2 counts
        twice; a row of weight zero is ignored, even if it contains NaN.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.
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
    name = "scores.set_size"
    chosen = check_sets(name, sets)
    rows = check_rows(name, row_weights, mask, chosen.shape[:-1], jnp.result_type(float))
    check_reduction(name, reduction, chosen.shape[:-1])
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
