import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._boundary import (
    Points,
    Reduction,
    RowWeights,
    Samples,
    Targets,
    Variance,
    VarianceOrZero,
    Variances,
    VariancesOrZero,
    Weights,
    WeightsOfRows,
    array_function,
)
from .._weighting import log_mixture, weighted_mean


@array_function
def nll_gaussian(
    mean: Points, variance: Variance, targets: Targets, *, row_weights: RowWeights = None, reduction: Reduction = "mean"
) -> Float[Array, "..."]:
    r"""Negative log-density, in nats, of the targets under a single Gaussian per entry.

    $\frac12 \log(2 \pi \sigma^2) + (y - \mu)^2 / (2 \sigma^2)$. With the result of [`eqx_ensemble.combine.gaussian`][]
    it is the score of the deep-ensembles paper.

    **Arguments:**

    - `mean`, `variance`, `targets`: of one shape `(*batch,)`, no `members` axis. Variances above zero.
    - `row_weights`, `reduction`: as for every score.

    **Returns:**

    A scalar, or `(*batch,)`. Joint density of independent outputs: sum the values of `reduction="none"`.

    **Raises:**

    `ValueError` for variances that are not positive.

    ```python
    ee.scores.nll_gaussian(jnp.array([0.0]), jnp.array([1.0]), jnp.array([1.0]))
    # 0.919 + 0.5 = 1.419
    ```

    ??? cite
        [Lakshminarayanan et al., NeurIPS 2017](https://arxiv.org/abs/1612.01474)
    """
    return -log_density(mean, variance, targets)


@array_function
def nll_gaussian_mixture(
    mean: Samples,
    variance: Variances,
    targets: Targets,
    *,
    weights: WeightsOfRows = None,
    row_weights: RowWeights = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Negative log-density, in nats, of the targets under the mixture of the members' Gaussians.

    $-\log \sum_m w_m \, \mathcal{N}(y; \mu_m, \sigma_m^2)$ for each entry.

    **Arguments:**

    - `mean`, `variance`: `(members, *batch)`. Variances above zero.
    - `targets`: `(*batch,)`.
    - `weights`: convex weights over members, `(members,)` or `(members, *rows)`.
    - `row_weights`, `reduction`: as for every score.

    **Returns:**

    A scalar, or `(*batch,)`.

    ```python
    mean, variance = jnp.array([[-1.0], [1.0]]), jnp.ones((2, 1))
    ee.scores.nll_gaussian_mixture(mean, variance, jnp.array([0.0]))  # 1.419
    ```
    """
    return -log_mixture(log_density(mean, variance, targets[None]), weights)


def log_density(
    mean: Float[Array, "*batch"], variance: Float[Array, "*batch"], targets: Float[Array, "*targets"]
) -> Float[Array, "*batch"]:
    return -0.5 * (math.log(2 * math.pi) + jnp.log(variance) + (targets - mean) ** 2 / variance)


@array_function
def crps_gaussian(
    mean: Points,
    variance: VarianceOrZero,
    targets: Targets,
    *,
    row_weights: RowWeights = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Continuous ranked probability score of a single Gaussian per entry, in closed form.

    $\sigma (z (2 \Phi(z) - 1) + 2 \varphi(z) - \pi^{-1/2})$ with $z = (y - \mu) / \sigma$, in the unit of the target.

    **Arguments:**

    As [`eqx_ensemble.scores.nll_gaussian`][]; variances may be zero.

    **Returns:**

    A scalar, or `(*batch,)`.

    ```python
    ee.scores.crps_gaussian(jnp.array([0.0]), jnp.array([1.0]), jnp.array([0.0]))
    # (sqrt(2) - 1) / sqrt(pi) = 0.234
    ```

    ??? cite
        [Gneiting and Raftery, JASA 2007](https://doi.org/10.1198/016214506000001437)
    """
    mean, variance, targets, infinite = _finite(mean, variance, targets)
    within = expected_distance(jnp.zeros_like(mean), 2 * variance)
    return jnp.where(infinite, jnp.inf, expected_distance(targets - mean, variance) - 0.5 * within)


@array_function
def crps_gaussian_mixture(
    mean: Samples,
    variance: VariancesOrZero,
    targets: Targets,
    *,
    weights: Weights = None,
    row_weights: RowWeights = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Continuous ranked probability score of the mixture of the members' Gaussians, in closed form.

    $\sum_m w_m A(y - \mu_m, \sigma_m^2) - \frac12 \sum_{mn} w_m w_n A(\mu_m - \mu_n, \sigma_m^2 + \sigma_n^2)$, where
    $A(d, v)$ is the mean distance from zero of a Gaussian of mean $d$ and variance $v$. In the unit of the target.

    **Arguments:**

    As [`eqx_ensemble.scores.nll_gaussian_mixture`][], with weights `(members,)`; variances may be zero.

    **Returns:**

    A scalar, or `(*batch,)`.

    ```python
    mean, variance = jnp.array([[-1.0], [1.0]]), jnp.ones((2, 1))
    ee.scores.crps_gaussian_mixture(mean, variance, jnp.array([0.0]))  # 0.359
    ```

    ??? cite
        [Grimit et al., QJRMS 2006](https://doi.org/10.1256/qj.05.235)
    """
    mean, variance, targets, infinite = _finite(mean, variance, targets)
    outside = weighted_mean(expected_distance(targets[None] - mean, variance), weights)
    return jnp.where(infinite, jnp.inf, outside - 0.5 * _distance_between(mean, variance, weights))


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
