import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._boundary import array_function, kinds
from .._check import value_error
from .._weighting import log_mixture, shares_in_order, sum_members, weighted_mean


@array_function
def nll_gaussian(
    mean: kinds.Points,
    variance: kinds.Variance,
    targets: kinds.Targets,
    *,
    row_weights: kinds.RowWeights = None,
    reduction: kinds.Reduction = "mean",
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
    mean: kinds.Samples,
    variance: kinds.Variances,
    targets: kinds.Targets,
    *,
    weights: kinds.WeightsOfRows = None,
    row_weights: kinds.RowWeights = None,
    reduction: kinds.Reduction = "mean",
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
    """The log-density of a Gaussian, in nats."""
    return -0.5 * (math.log(2 * math.pi) + jnp.log(variance) + (targets - mean) ** 2 / variance)


@array_function
def crps_gaussian(
    mean: kinds.Points,
    variance: kinds.VarianceOrZero,
    targets: kinds.Targets,
    *,
    row_weights: kinds.RowWeights = None,
    reduction: kinds.Reduction = "mean",
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
    mean: kinds.Samples,
    variance: kinds.VariancesOrZero,
    targets: kinds.Targets,
    *,
    weights: kinds.Weights = None,
    row_weights: kinds.RowWeights = None,
    reduction: kinds.Reduction = "mean",
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


Estimator = Literal["nrg", "fair"]


@array_function(in_order="samples")
def crps(
    samples: kinds.Samples,
    targets: kinds.Targets,
    *,
    estimator: Estimator = "nrg",
    alpha: float = 1.0,
    weights: kinds.Weights = None,
    row_weights: kinds.RowWeights = None,
    reduction: kinds.Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Continuous ranked probability score of the members' point predictions as samples.

    $\sum_m w_m |x_m - y| - \frac12 \sum_{mn} w_m w_n |x_m - x_n|$, in the unit of the target. For `"fair"` the last sum
    is divided by $M (M - 1)$ instead of $M^2$: unbiased for the distribution that members are drawn from, without
    favouring larger ensembles.

    **Arguments:**

    - `samples`: `(members, *batch)`, one number per member and entry.
    - `targets`: `(*batch,)`.
    - `estimator`: `"nrg"` or `"fair"`, as in `scoringrules`; report which one was used.
    - `alpha`: with `"fair"`, its share in the sum with `"nrg"`: 0.95 is almost fair. At one, the score does not depend
        on one member if all others are at the target.
    - `weights`: convex weights over members, `(members,)`. Only with `"nrg"`.
    - `row_weights`, `reduction`: as for every score.

    **Returns:**

    A scalar, or `(*batch,)`. For one member, `"nrg"` is the absolute error. Infinite where the target or a member is.

    ```python
    samples, targets = jnp.array([[0.0], [2.0]]), jnp.array([1.0])
    ee.scores.crps(samples, targets)  # 1 - 0.5 = 0.5
    ee.scores.crps(samples, targets, estimator="fair")  # 1 - 1 = 0.0
    ```

    ??? cite
        [Ferro, QJRMS 2014](https://doi.org/10.1002/qj.2270); [Lang et al., 2024](https://arxiv.org/abs/2412.15832)
    """
    if estimator == "nrg" and alpha != 1:
        raise value_error('`alpha` with `estimator="fair"`', f"got {alpha}", 'Pass `estimator="fair"`, too.')
    return crps_in_order(samples, targets, weights, estimator, alpha)


@array_function(in_order="samples")
def threshold_weighted_crps(
    samples: kinds.Samples,
    targets: kinds.Targets,
    *,
    lower: kinds.Threshold | None = None,
    upper: kinds.Threshold | None = None,
    estimator: Estimator = "nrg",
    weights: kinds.Weights = None,
    row_weights: kinds.RowWeights = None,
    reduction: kinds.Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Threshold-weighted CRPS of the members' point predictions, for a range of values.

    $\int w(z) (F(z) - [z \ge y])^2 dz$ with $w$ one between the thresholds and zero elsewhere:
    [`eqx_ensemble.scores.crps`][] of $v(x_m)$ and $v(y)$, where $v$ clips. Unlike the CRPS of rows with extreme
    targets, it is proper.

    **Arguments:**

    - `lower`, `upper`: the thresholds at which $v$ clips, one number each.
    - the others: as for [`eqx_ensemble.scores.crps`][].

    **Returns:**

    A scalar, or `(*batch,)`.

    ```python
    samples, targets = jnp.array([[0.0], [4.0]]), jnp.array([1.0])
    # values above 2 only: of 2 and 4 for a target of 2, 1 - 0.5
    ee.scores.threshold_weighted_crps(samples, targets, lower=2.0)
    ```

    ??? cite
        [Allen et al., JUQ 2023](https://doi.org/10.1137/22M1532184); [Gneiting and Ranjan, JBES
        2011](https://doi.org/10.1198/jbes.2010.08110)
    """
    if (lower is None) and (upper is None):
        fix = "`lower=`, `upper=` or both restrict the score to a range. For all values use `scores.crps`."
        raise value_error("`lower` or `upper`", "got neither", fix)
    clip = lambda x: jnp.clip(x, lower, upper).astype(x.dtype)
    return crps_in_order(clip(samples), clip(targets), weights, estimator)


def check_estimator(estimator: Estimator, num_members: int, weights: Array | None) -> None:
    """Raises unless the estimator accepts these members."""
    if estimator == "fair" and num_members < 2:
        needs = 'at least two members for estimator="fair"'
        raise value_error(needs, f"got {num_members}", 'Use `estimator="nrg"`.')
    if estimator == "fair" and weights is not None:
        fix = 'Drop them, or use `estimator="nrg"`.'
        raise value_error('equally weighted members for estimator="fair"', "got `weights`", fix)


def crps_in_order(
    samples: Float[Array, " members *batch"],
    targets: Float[Array, "*batch"],
    weights: Float[Array, " members *batch"] | None,
    estimator: Estimator,
    alpha: float = 1.0,
) -> Float[Array, "*batch"]:
    """The score of each row, of samples that are sorted over members. A common offset cancels before the sums."""
    check_estimator(estimator, samples.shape[0], weights)
    errors = samples - targets[None]
    below = shares_in_order(errors, weights)[:-1]
    under = sum_members(below**2 * jnp.diff(jnp.minimum(errors, 0), axis=0))
    over = sum_members((1 - below) ** 2 * jnp.diff(jnp.maximum(errors, 0), axis=0))
    found = under + over + jnp.maximum(errors[0], 0) + jnp.maximum(-errors[-1], 0)
    if estimator == "fair":  # minus half the mean distance of two members, over M - 1
        found -= alpha * sum_members(below * (1 - below) * jnp.diff(errors, axis=0)) / (samples.shape[0] - 1)
    # Where differences are NaN, the score is infinite, or zero if all agree with the target.
    infinite = jnp.isinf(samples[0]) | jnp.isinf(samples[-1]) | jnp.isinf(targets)
    unknown = jnp.isnan(samples[-1]) | jnp.isnan(targets)
    exact = jnp.where((samples[0] == targets) & (samples[-1] == targets), 0, jnp.inf).astype(found.dtype)
    return jnp.where(infinite & ~unknown, exact, jnp.where(unknown, jnp.nan, found))
