from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Real

from .._combination import pays_if_large
from ._check import check_reduction
from ._reduce import Reduction, RowWeights, counts, mean_of_rows, reduce
from ._regression import check_points, error_of_mean


def mae(
    predictions: Float[ArrayLike, " members *batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: Real[ArrayLike, "*batch"] | None = None,
    mask: Bool[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Mean absolute error of the ensemble mean, in the unit of the target; lower is better.

    $\frac1n \sum_i |\sum_m w_m x_{mi} - y_i|$ over all entries of `*batch`. Its expectation is minimised by the median:
    pass `ee.combine.median(predictions)[None]` to score the members' median.

    **Arguments:**

    - `predictions`: `(members, *batch)`.
    - `targets`: `(*batch,)`; nothing is broadcast.
    - `weights`: convex weights over members, `(members,)`; divided by their sum. Members of weight zero are ignored.
    - `row_weights`: finite, non-negative row weights `(*batch,)`; only their ratios matter. A row of weight 2 counts
        twice; a row of weight zero is ignored, even if it contains NaN.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.
    - `reduction`: `"mean"` over all entries, or `"none"` for one value per entry, NaN for ignored ones.

    **Returns:**

    A scalar, or `(*batch,)`.

    **Raises:**

    As [`eqx_ensemble.scores.rmse`][].

    ```python
    predictions, targets = jnp.array([[0.0, 1.0], [2.0, 1.0]]), jnp.array([1.0, 3.0])
    ee.scores.mae(predictions, targets)  # (0 + 2) / 2 = 1.0
    ```
    """
    name = "scores.mae"
    check_reduction(name, reduction, ())
    arrays = check_points(name, predictions, targets, weights, row_weights, mask)
    return _mae(*arrays, reduction, in_groups=pays_if_large(arrays[0], arrays[1:]))


def r2(
    predictions: Float[ArrayLike, " members *batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: Real[ArrayLike, "*batch"] | None = None,
    mask: Bool[ArrayLike, "*batch"] | None = None,
) -> Float[Array, ""]:
    r"""Coefficient of determination $R^2$ of the ensemble mean: 1 is perfect, 0 equals predicting the mean target.

    $1 - \sum_i (\sum_m w_m x_{mi} - y_i)^2 / \sum_i (y_i - \bar y)^2$ over all entries of `*batch`, with the mean $\bar
    y$ of these targets. Several outputs share one mean: for one $R^2$ per output use
    `jax.vmap(ee.scores.r2, in_axes=-1)(predictions, targets)`.

    **Arguments:**

    - `predictions`: `(members, *batch)`.
    - `targets`: `(*batch,)`; nothing is broadcast.
    - `weights`: convex weights over members, `(members,)`; divided by their sum. Members of weight zero are ignored.
    - `row_weights`: finite, non-negative row weights `(*batch,)`; only their ratios matter. A row of weight 2 counts
        twice; a row of weight zero is ignored, even if it contains NaN.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.

    **Returns:**

    A scalar of at most 1. If all targets are equal, minus infinity, or NaN if all predictions equal them too.

    **Raises:**

    As [`eqx_ensemble.scores.rmse`][].

    ```python
    predictions, targets = jnp.array([[1.0, 2.0, 3.0]]), jnp.array([1.0, 2.0, 4.0])
    ee.scores.r2(predictions, targets)  # 1 - 1 / 4.67 = 0.786
    ```
    """
    arrays = check_points("scores.r2", predictions, targets, weights, row_weights, mask)
    return _r2(*arrays, in_groups=pays_if_large(arrays[0], arrays[1:]))


@partial(jax.jit, static_argnames=("reduction", "in_groups"))
def _mae(
    predictions: Float[Array, " members *batch"],
    targets: Float[Array, "*batch"],
    weights: Float[Array, " members"] | None,
    row_weights: RowWeights | None,
    reduction: Reduction,
    *,
    in_groups: bool,
) -> Float[Array, "..."]:
    error = error_of_mean(predictions, targets, weights, in_groups=in_groups)
    return reduce(jnp.abs(error), reduction, row_weights)


@partial(jax.jit, static_argnames="in_groups")
def _r2(
    predictions: Float[Array, " members *batch"],
    targets: Float[Array, "*batch"],
    weights: Float[Array, " members"] | None,
    row_weights: RowWeights | None,
    *,
    in_groups: bool,
) -> Float[Array, ""]:
    error = error_of_mean(predictions, targets, weights, in_groups=in_groups)
    known = True if row_weights is None else counts(row_weights)
    lowest = jnp.min(targets, initial=jnp.inf, where=known)
    # Differences from one target are exactly zero for equal targets, and a common offset costs no precision.
    shifted = jnp.where(known, targets - lowest, 0)
    variance = mean_of_rows((shifted - mean_of_rows(shifted, row_weights)) ** 2, row_weights)
    return 1 - mean_of_rows(error**2, row_weights) / variance
