from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int32, Integer

from .._brief import brief_repr
from .._check import (
    ALL_ROWS,
    CountedRows,
    RowWeightsLike,
    check_array,
    check_entries,
    check_floating,
    check_labels,
    check_positive_int,
    check_row_weights,
    promote,
    type_error,
    value_error,
)
from .._weighting import at_label
from ._intervals import check_sets
from ._reduce import RowWeights, counts, sum_by_segment, weigh


def check_groups(
    groups: Any, num_groups: Any, shape: tuple[int, ...], rows: CountedRows = ALL_ROWS
) -> tuple[Array, int]:
    """Raises unless `groups` are integers from 0 to `num_groups - 1` (where concrete), one per row. Returns both."""
    count = check_positive_int(num_groups, "num_groups")
    if isinstance(groups, np.ndarray) and groups.dtype.kind in "OUST":
        fix = "Number the groups: `names, groups = np.unique(groups, return_inverse=True)`."
        raise type_error("integer `groups`", f"got dtype {groups.dtype}", fix)
    array = check_array("groups", groups)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        fix = "Number the groups from 0: `names, groups = np.unique(groups, return_inverse=True)`."
        got = f"got dtype {array.dtype}, shape {array.shape}"
        raise type_error("integer `groups`", got, fix)
    if array.shape != shape:
        got = f"expected {shape}, got {array.shape}"
        raise value_error("one of `groups` per row", got, "Groups are in the order of the rows.")
    fix = "Count groups from 0, and leave rows without a group out (`row_weights`)."
    needs = f"`groups` from 0 to {count - 1}, as `num_groups` is {count}"
    check_entries(needs, groups, lambda host: (host < 0) | (host >= count), fix, rows)
    return array.astype(jnp.int32), count


class ByGroup(NamedTuple):
    """The mean of a score in each group of rows.

    - `mean`: `(groups,)`; NaN for a group without rows.
    - `count`: `(groups,)`, the number of rows in each group, regardless of their weights.
    """

    mean: Float[Array, " groups"]
    count: Int32[Array, " groups"]

    __repr__ = brief_repr


def by_group(
    values: Float[ArrayLike, "*batch"],
    groups: Integer[ArrayLike, "*batch"],
    *,
    num_groups: int,
    row_weights: RowWeightsLike | None = None,
) -> ByGroup:
    """The mean of a score in each group of rows, such as group-conditional coverage.

    **Arguments:**

    - `values`: `(*batch,)`, a score with `reduction="none"`.
    - `groups`: integers `(*batch,)` from 0 to num_groups - 1.
    - `num_groups`: the number of groups.
    - `row_weights`: as for every score.

    **Returns:**

    [`eqx_ensemble.scores.ByGroup`][]. A coverage of 0.9 has a standard deviation of 0.09 for 11 rows.

    ```python
    inside = ee.scores.coverage(
        jnp.zeros(4), jnp.ones(4), jnp.array([0.5, 0.2, 0.1, 3.0]), reduction="none"
    )
    # mean [1.0, 0.5], count [2, 2]
    ee.scores.by_group(inside, jnp.array([0, 0, 1, 1]), num_groups=2)
    ```
    """
    (checked,) = promote(check_floating("values", values))
    rows = check_row_weights(row_weights, checked.shape, checked.dtype)
    own, count = check_groups(groups, num_groups, checked.shape, rows)
    return _by_group(rows.blank(checked), own, rows.weights, count)


def class_conditional_coverage(
    sets: Bool[ArrayLike, "*batch classes"],
    labels: Integer[ArrayLike, "*batch"],
    *,
    row_weights: RowWeightsLike | None = None,
) -> ByGroup:
    """Coverage of prediction sets in the rows of each class; ideally equal to the sets' level for every class.

    **Arguments:**

    As [`eqx_ensemble.scores.set_coverage`][].

    **Returns:**

    [`eqx_ensemble.scores.ByGroup`][], `(classes,)`.

    ```python
    sets = jnp.array([[True, True, False], [True, False, False]])
    # mean [nan, 1.0, 0.0], count [0, 1, 1]
    ee.scores.class_conditional_coverage(sets, jnp.array([1, 2]))
    ```
    """
    chosen, targets, weights = _check(sets, labels, row_weights)
    return _by_group(_inside(chosen, targets), targets, weights, chosen.shape[-1])


def size_stratified_coverage(
    sets: Bool[ArrayLike, "*batch classes"],
    labels: Integer[ArrayLike, "*batch"],
    *,
    row_weights: RowWeightsLike | None = None,
) -> ByGroup:
    """Coverage of prediction sets of each size; ideally equal to the sets' level for every size.

    `jnp.nanmax(jnp.abs(found.mean - level))` is the size-stratified coverage violation (SSCV). It is an extreme: check
    `count`, and merge rare sizes with [`eqx_ensemble.scores.by_group`][].

    **Arguments:**

    As [`eqx_ensemble.scores.set_coverage`][].

    **Returns:**

    [`eqx_ensemble.scores.ByGroup`][], `(classes + 1,)`, for sizes from 0 to classes.

    ```python
    sets = jnp.array([[True, True, False], [True, False, False]])
    # mean [nan, 0.0, 1.0, nan], count [0, 1, 1, 0]
    ee.scores.size_stratified_coverage(sets, jnp.array([1, 2]))
    ```

    ??? cite
        [Angelopoulos et al., ICLR 2021](https://arxiv.org/abs/2009.14193)
    """
    chosen, targets, weights = _check(sets, labels, row_weights)
    sizes = jnp.sum(chosen, axis=-1, dtype=jnp.int32)
    return _by_group(_inside(chosen, targets), sizes, weights, chosen.shape[-1] + 1)


def _check(
    sets: ArrayLike, labels: ArrayLike, row_weights: ArrayLike | None
) -> tuple[Array, Integer[Array, "*batch"], Array | None]:
    chosen = check_sets(sets)
    rows = check_row_weights(row_weights, chosen.shape[:-1], jnp.result_type(float))
    targets = check_labels(labels, chosen, rows, argument="sets", members=False)
    return chosen, rows.blank(targets), rows.weights


def _inside(sets: Bool[Array, "*batch classes"], labels: Integer[Array, "*batch"]) -> Float[Array, "*batch"]:
    return at_label(sets.astype(float), labels)


@partial(jax.jit, static_argnames="num_groups")
def _by_group(
    values: Float[Array, "*batch"], groups: Integer[Array, "*batch"], row_weights: RowWeights | None, num_groups: int
) -> ByGroup:
    known = (groups >= 0) & (groups < num_groups)
    kept = known if row_weights is None else known & counts(row_weights)
    # Ignored rows go to an extra bucket: in a scatter, negative groups would index from the end.
    bucket = jnp.ravel(jnp.where(kept, groups, num_groups))
    sums = lambda x: sum_by_segment(jnp.ravel(x), bucket, num_groups + 1)[:-1]
    total, count = sums(jnp.where(kept, weigh(values, row_weights), 0)), sums(jnp.ones(groups.shape, jnp.int32))
    is_weighted = row_weights is not None and row_weights.dtype != bool
    weight = sums(row_weights) if is_weighted else count.astype(total.dtype)
    return ByGroup(jnp.where(count == 0, jnp.nan, total / jnp.where(count == 0, 1, weight)), count)
