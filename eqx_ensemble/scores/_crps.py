from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Real

from .._check import as_column, check_regression, check_weights, check_word
from .._combination import by_order
from .._weighting import shares_in_order
from ._check import check_fair, check_reduction
from ._reduce import Reduction, reduce_rows
from ._row_weights import CountedRows, check_rows


def crps(
    samples: Float[ArrayLike, " members *batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    estimator: Literal["nrg", "fair"] = "nrg",
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: Real[ArrayLike, "*batch"] | None = None,
    mask: Bool[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Continuous ranked probability score of the members' point predictions as samples; lower is better.

    In the unit of the target. The estimator `"nrg"` is the score of the members' empirical distribution, $\sum_m w_m
    |x_m - y| - \frac12 \sum_{mn} w_m w_n |x_m - x_n|$. For `"fair"` the last sum is divided by $M (M - 1)$ instead of
    $M^2$, which is unbiased for the distribution that members are drawn from, and does not favour larger ensembles. The
    names are those of `scoringrules`. Members are sorted once and $\int (F(z) - [z \ge y])^2 dz$ is summed over the
    gaps, in O(M log M) and without cancellation.

    **Arguments:**

    - `samples`: `(members, *batch)`, one number per member and entry.
    - `targets`: `(*batch,)`; nothing is broadcast.
    - `estimator`: `"nrg"` or `"fair"`; report which one was used.
    - `weights`: convex weights over members, `(members,)`; divided by their sum. Only with `"nrg"`.
    - `row_weights`: finite, non-negative row weights `(*batch,)`; only their ratios matter. A row of weight 2 counts
        twice; a row of weight zero is ignored, even if it contains NaN.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.
    - `reduction`: `"mean"` over all entries, or `"none"` for one value per entry, NaN for ignored ones.

    **Returns:**

    A scalar, or `(*batch,)`. For one member, `"nrg"` is the absolute error. Infinite where the target or a member is,
    unless all are equal.

    **Raises:**

    - `TypeError` for samples that are not floating-point.
    - `ValueError` for mismatched shapes (such as targets `(n, 1)` for predictions `(n,)`), invalid weights, and
        `"fair"` with weights or with fewer than two members.

    ```python
    samples, targets = jnp.array([[0.0], [2.0]]), jnp.array([1.0])
    ee.scores.crps(samples, targets)  # 1 - 0.5 = 0.5
    ee.scores.crps(samples, targets, estimator="fair")  # 1 - 1 = 0.0
    ```

    ??? cite
        [Fair scores for ensemble forecasts](https://doi.org/10.1002/qj.2270)

        ```bibtex
        @article{ferro2014fair,
            author={C. A. T. Ferro},
            title={Fair scores for ensemble forecasts},
            journal={Quarterly Journal of the Royal Meteorological Society},
            year={2014},
        }
        ```
    """
    name = "scores.crps"
    points, observed = check_regression(name, targets, members=True, samples=samples)
    convex = check_estimator(name, estimator, points, weights)
    rows = check_rows(name, row_weights, mask, observed.shape, points.dtype)
    return crps_of_points(name, points, observed, rows, convex, estimator, reduction)


def check_estimator(name: str, estimator: str, points: Array, weights: ArrayLike | None) -> Array | None:
    """Raises unless the estimator is known and accepts these members. Returns normalised weights."""
    check_word(estimator, "estimator", ("nrg", "fair"), name=name)
    if estimator == "fair":
        check_fair(name, points.shape[0], weighted=weights is not None)
    return check_weights(name, weights, points.shape[0], points.dtype)


def crps_of_points(
    name: str,
    points: Float[Array, " members *batch"],
    observed: Float[Array, "*batch"],
    rows: CountedRows,
    convex: Float[Array, " members"] | None,
    estimator: str,
    reduction: Reduction,
) -> Float[Array, "..."]:
    """The score of checked arrays and options."""
    check_reduction(name, reduction, observed.shape)
    points, observed = rows.blank(points, before=1), rows.blank(observed)
    # Errors are sorted, not values: a large common offset of samples and targets cancels before the sums.
    each = by_order(_fair if estimator == "fair" else _energy, points, convex, centre=observed, fill=0.0)
    return reduce_rows(_with_infinite(each, points, observed, convex), rows.weights, reduction)


@jax.jit
def _with_infinite(
    each: Float[Array, "*batch"],
    points: Float[Array, " members *batch"],
    observed: Float[Array, "*batch"],
    convex: Float[Array, " members"] | None,
) -> Float[Array, "*batch"]:
    """Scores of rows with infinite members or targets, whose differences are NaN: infinite, or zero if all agree."""
    ignored = False if convex is None else as_column(convex, points.ndim) == 0
    points = jnp.where(ignored, observed[None], points)
    infinite = jnp.any(jnp.isinf(points), axis=0) | jnp.isinf(observed)
    unknown = jnp.any(jnp.isnan(points), axis=0) | jnp.isnan(observed)
    exact = jnp.where(jnp.all(points == observed[None], axis=0), 0, jnp.inf)
    return jnp.where(infinite & ~unknown, exact.astype(each.dtype), each)


def _energy(
    errors: Float[Array, " members *batch"], own: Float[Array, " members *batch"] | None, _: None
) -> Float[Array, "*batch"]:
    below = shares_in_order(errors, own)[:-1]
    under = jnp.sum(below**2 * jnp.diff(jnp.minimum(errors, 0), axis=0), axis=0)
    over = jnp.sum((1 - below) ** 2 * jnp.diff(jnp.maximum(errors, 0), axis=0), axis=0)
    return under + over + jnp.maximum(errors[0], 0) + jnp.maximum(-errors[-1], 0)


def _fair(
    errors: Float[Array, " members *batch"], own: Float[Array, " members *batch"] | None, _: None
) -> Float[Array, "*batch"]:
    below = shares_in_order(errors, own)[:-1]
    distance = jnp.sum(below * (1 - below) * jnp.diff(errors, axis=0), axis=0)  # half the mean distance of two members
    return _energy(errors, own, None) - distance / (errors.shape[0] - 1)
