import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Real

from .._check import CountedRows, check_regression, check_row_weights, check_variance, check_weights
from .._combination import by_rows
from .._weighting import blank_unweighted, log_mixture, weighted_mean
from ._reduce import Reduction, RowWeights, reduce, reduce_rows


def nll_gaussian(
    mean: Float[ArrayLike, "*batch"],
    variance: Float[ArrayLike, "*batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    row_weights: Bool[ArrayLike, "*batch"] | Real[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Negative log-density, in nats, of the targets under a single Gaussian per entry; lower is better.

    $\frac12 \log(2 \pi \sigma^2) + (y - \mu)^2 / (2 \sigma^2)$. No `members` axis: pass the result of
    [`eqx_ensemble.combine.gaussian`][] for the score reported in the deep-ensembles paper. For the mixture itself see
    [`eqx_ensemble.scores.nll_gaussian_mixture`][].

    **Arguments:**

    - `mean`, `variance`, `targets`: of one shape `(*batch,)`; nothing is broadcast. Variances above zero.
    - `row_weights`: relative weights `(*batch,)`, or booleans; rows of zero or `False` are ignored, even if NaN.
    - `reduction`: `"mean"` over all entries, or `"none"` for one value per entry, NaN for ignored ones.

    **Returns:**

    A scalar, or `(*batch,)`. Several outputs per row are separate entries: for the joint density of independent
    outputs, sum the values of `reduction="none"` over them.

    **Raises:**

    - `TypeError` for means or variances that are not floating-point.
    - `ValueError` for mismatched shapes (such as targets `(n, 1)` for predictions `(n,)`), and variances that are not
        positive (where concrete).

    ```python
    ee.scores.nll_gaussian(jnp.array([0.0]), jnp.array([1.0]), jnp.array([1.0]))
    # 0.919 + 0.5 = 1.419
    ```

    ??? cite
        [Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles](https://arxiv.org/abs/1612.01474)
    """
    *arrays, rows = check_gaussian(
        mean, variance, targets, row_weights, members=False, positive=True, reduction=reduction
    )
    return _nll(*arrays, rows.weights, reduction)


def nll_gaussian_mixture(
    mean: Float[ArrayLike, " members *batch"],
    variance: Float[ArrayLike, " members *batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    weights: Real[ArrayLike, " members *rows"] | None = None,
    row_weights: Bool[ArrayLike, "*batch"] | Real[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Negative log-density, in nats, of the targets under the mixture of the members' Gaussians; lower is better.

    $-\log \sum_m w_m \, \mathcal{N}(y; \mu_m, \sigma_m^2)$ for each entry, computed in log space.

    **Arguments:**

    - `mean`, `variance`: `(members, *batch)`, of one shape. Variances above zero.
    - `targets`: `(*batch,)`; nothing is broadcast.
    - `weights`: convex weights over members, `(members,)` or `(members, *rows)`; a member of weight zero is ignored.
    - `row_weights`: relative weights `(*batch,)`, or booleans; rows of zero or `False` are ignored, even if NaN.
    - `reduction`: `"mean"` over all entries, or `"none"` for one value per entry, NaN for ignored ones.

    **Returns:**

    A scalar, or `(*batch,)`. Several outputs per row are separate entries, each with its own mixture.

    **Raises:**

    As [`eqx_ensemble.scores.nll_gaussian`][], and `ValueError` for a missing `members` axis or invalid weights.

    ```python
    mean, variance = jnp.array([[-1.0], [1.0]]), jnp.ones((2, 1))
    ee.scores.nll_gaussian_mixture(mean, variance, jnp.array([0.0]))  # 1.419
    ```
    """
    *arrays, rows = check_gaussian(
        mean, variance, targets, row_weights, members=True, positive=True, weights=weights, reduction=reduction
    )
    means, variances, observed = arrays
    convex = check_weights(weights, means.shape[0], means.dtype, shape=observed.shape, rows=rows)
    return reduce_rows(by_rows(_nll_mixture, (means, variances), observed, convex), rows.weights, reduction)


def check_gaussian(
    mean: ArrayLike,
    variance: ArrayLike,
    targets: ArrayLike,
    row_weights: ArrayLike | None,
    *,
    members: bool,
    positive: bool,
    reduction: Any = "none",
    weights: ArrayLike | None = None,
) -> tuple[Array, Array, Array, CountedRows]:
    """Raises for invalid arguments. Returns means, variances, targets and row weights; ignored rows are overwritten."""
    means, variances, observed = check_regression(targets, members=members, mean=mean, variance=variance)
    rows = check_row_weights(row_weights, observed.shape, means.dtype, reduction=reduction)
    check_variance(variance, positive=positive, rows=rows, weights=weights)
    means = rows.blank(means, before=int(members))
    variances = rows.blank(variances, before=int(members), fill=1)
    return means, variances, rows.blank(observed), rows


@partial(jax.jit, static_argnames="reduction")
def _nll(
    mean: Float[Array, "*batch"],
    variance: Float[Array, "*batch"],
    targets: Float[Array, "*batch"],
    row_weights: RowWeights | None,
    reduction: Reduction,
) -> Float[Array, "..."]:
    return reduce(-log_density(mean, variance, targets), reduction, row_weights)


def _nll_mixture(
    moments: tuple[Array, Array], targets: Float[Array, "*batch"], weights: Float[Array, "members ..."] | None
) -> Float[Array, "*batch"]:
    mean, variance = moments
    mean, variance = blank_unweighted(mean, weights), blank_unweighted(variance, weights, fill=1.0)
    return -log_mixture(log_density(mean, variance, targets[None]), weights)


def log_density(
    mean: Float[Array, "*batch"], variance: Float[Array, "*batch"], targets: Float[Array, "*targets"]
) -> Float[Array, "*batch"]:
    return -0.5 * (math.log(2 * math.pi) + jnp.log(variance) + (targets - mean) ** 2 / variance)


def crps_gaussian(
    mean: Float[ArrayLike, "*batch"],
    variance: Float[ArrayLike, "*batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    row_weights: Bool[ArrayLike, "*batch"] | Real[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Continuous ranked probability score of a single Gaussian per entry, in closed form; lower is better.

    $\sigma (z (2 \Phi(z) - 1) + 2 \varphi(z) - \pi^{-1/2})$ with $z = (y - \mu) / \sigma$, in the unit of the
    target. No `members` axis: pass the result of [`eqx_ensemble.combine.gaussian`][].

    **Arguments:**

    - `mean`, `variance`, `targets`: of one shape `(*batch,)`; nothing is broadcast. For variance zero, the score is the
        absolute error.
    - `row_weights`: relative weights `(*batch,)`, or booleans; rows of zero or `False` are ignored, even if NaN.
    - `reduction`: `"mean"` over all entries, or `"none"` for one value per entry, NaN for ignored ones.

    **Returns:**

    A scalar, or `(*batch,)`.

    **Raises:**

    - `TypeError` for means or variances that are not floating-point.
    - `ValueError` for mismatched shapes (such as targets `(n, 1)` for predictions `(n,)`), and negative variances
        (where concrete).

    ```python
    ee.scores.crps_gaussian(jnp.array([0.0]), jnp.array([1.0]), jnp.array([0.0]))
    # (sqrt(2) - 1) / sqrt(pi) = 0.234
    ```

    ??? cite
        [Strictly Proper Scoring Rules, Prediction, and Estimation](https://doi.org/10.1198/016214506000001437)
    """
    *arrays, rows = check_gaussian(
        mean, variance, targets, row_weights, members=False, positive=False, reduction=reduction
    )
    return _single(*arrays, rows.weights, reduction)


def crps_gaussian_mixture(
    mean: Float[ArrayLike, " members *batch"],
    variance: Float[ArrayLike, " members *batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: Bool[ArrayLike, "*batch"] | Real[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Continuous ranked probability score of the mixture of the members' Gaussians, in closed form; lower is better.

    $\sum_m w_m A(y - \mu_m, \sigma_m^2) - \frac12 \sum_{mn} w_m w_n A(\mu_m - \mu_n, \sigma_m^2 + \sigma_n^2)$, where
    $A(d, v)$ is the mean distance from zero of a Gaussian of mean $d$ and variance $v$. In the unit of the target.
    Takes O(M^2) time and the memory of one member.

    **Arguments:**

    - `mean`, `variance`: `(members, *batch)`, of one shape. Members of variance zero are point masses.
    - `targets`: `(*batch,)`; nothing is broadcast.
    - `weights`: convex weights over members, `(members,)`; divided by their sum. Members of weight zero are ignored.
    - `row_weights`: relative weights `(*batch,)`, or booleans; rows of zero or `False` are ignored, even if NaN.
    - `reduction`: `"mean"` over all entries, or `"none"` for one value per entry, NaN for ignored ones.

    **Returns:**

    A scalar, or `(*batch,)`.

    **Raises:**

    As [`eqx_ensemble.scores.crps_gaussian`][], and `ValueError` for a missing `members` axis or invalid weights.

    ```python
    mean, variance = jnp.array([[-1.0], [1.0]]), jnp.ones((2, 1))
    ee.scores.crps_gaussian_mixture(mean, variance, jnp.array([0.0]))  # 0.359
    ```

    ??? cite
        [The continuous ranked probability score for circular variables and its application to mesoscale forecast
        ensemble verification](https://doi.org/10.1256/qj.05.235)
    """
    *arrays, rows = check_gaussian(
        mean, variance, targets, row_weights, members=True, positive=False, weights=weights, reduction=reduction
    )
    convex = check_weights(weights, arrays[0].shape[0], arrays[0].dtype)
    return _mixture(*arrays, rows.weights, convex, reduction)


@partial(jax.jit, static_argnames="reduction")
def _single(
    mean: Float[Array, "*batch"],
    variance: Float[Array, "*batch"],
    targets: Float[Array, "*batch"],
    row_weights: RowWeights | None,
    reduction: Reduction,
) -> Float[Array, "..."]:
    mean, variance, targets, infinite = _finite(mean, variance, targets)
    within = expected_distance(jnp.zeros_like(mean), 2 * variance)
    score = expected_distance(targets - mean, variance) - 0.5 * within
    return reduce(jnp.where(infinite, jnp.inf, score), reduction, row_weights)


@partial(jax.jit, static_argnames="reduction")
def _mixture(
    mean: Float[Array, " members *batch"],
    variance: Float[Array, " members *batch"],
    targets: Float[Array, "*batch"],
    row_weights: RowWeights | None,
    weights: Float[Array, " members"] | None,
    reduction: Reduction,
) -> Float[Array, "..."]:
    mean, variance = blank_unweighted(mean, weights), blank_unweighted(variance, weights)
    mean, variance, targets, infinite = _finite(mean, variance, targets)
    outside = weighted_mean(expected_distance(targets[None] - mean, variance), weights)
    score = outside - 0.5 * _distance_between(mean, variance, weights)
    return reduce(jnp.where(infinite, jnp.inf, score), reduction, row_weights)


def _finite(
    mean: Float[Array, "*members"], variance: Float[Array, "*members"], targets: Float[Array, "*batch"]
) -> tuple[Array, Array, Array, Bool[Array, "*batch"]]:
    """The arrays with infinities replaced by one, and which rows had any; NaN is kept.

    The score of these rows is infinite, also where the closed form gives infinity minus infinity.
    """
    over_members = (lambda x: jnp.any(x, axis=0)) if mean.ndim > targets.ndim else (lambda x: x)
    infinite = over_members(jnp.isinf(mean) | jnp.isinf(variance)) | jnp.isinf(targets)
    number = lambda x: jnp.where(jnp.isinf(x), 1, x)
    unknown = over_members(jnp.isnan(mean) | jnp.isnan(variance)) | jnp.isnan(targets)
    return number(mean), number(variance), number(targets), infinite & ~unknown


def _distance_between(
    mean: Float[Array, " members *batch"], variance: Float[Array, " members *batch"], weights: Array | None
) -> Float[Array, "*batch"]:
    """Mean distance between two draws from the mixture, computed one member against all at a time."""

    @jax.checkpoint  # otherwise its gradient stores an array for every pair of members
    def to_all(one: tuple[Array, Array]) -> Array:
        return weighted_mean(expected_distance(mean - one[0][None], variance + one[1][None]), weights)

    return weighted_mean(jax.lax.map(to_all, (mean, variance)), weights)


def expected_distance(distance: Float[Array, "*batch"], variance: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """Mean of $|X|$ for a Gaussian X with that mean and variance; the gradient is finite at variance zero."""
    point = variance == 0
    sigma = jnp.sqrt(jnp.where(point, 1, variance))
    # No division by the variance: in the gradient its inverse square overflows for tiny values.
    z = distance / sigma
    inner = distance * jax.scipy.special.erf(z / math.sqrt(2))
    outer = sigma * math.sqrt(2 / math.pi) * jnp.exp(-0.5 * z**2)
    return jnp.where(point, jnp.abs(distance), inner + outer)
