from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Real

from .. import _weighting
from .._brief import brief_repr
from .._check import check_moments, check_values, check_weights
from .._combination import by_rows, takes_pair
from .._weighting import blank_unweighted, known_mean, mixture_moments, weighted_mean
from ._robust import check_power


def mean(
    values: Float[ArrayLike, "members ..."], *, weights: Real[ArrayLike, " members *rows"] | None = None
) -> Float[Array, "..."]:
    r"""The weighted mean over members of any array, $\sum_m w_m v_m$.

    For class probabilities from logits use [`eqx_ensemble.combine.mixture`][]: the mean of logits is different.

    **Arguments:**

    - `values`: floating-point, `(members, ...)`.

    **Returns:** an array `(...)`.

    ```python
    values = jnp.array([[1.0, 2.0], [4.0, 8.0]])
    ee.combine.mean(values)  # [2.5, 5.0]
    ee.combine.mean(values, weights=jnp.array([2, 1]))  # [2.0, 4.0]
    ee.combine.mean(values, weights=jnp.array([[2, 0], [1, 1]]))  # [2.0, 8.0]
    ```
    """
    checked = check_values("values", values)
    convex = check_weights(weights, checked.shape[0], checked.dtype, shape=checked.shape[1:])
    return _mean(checked, convex)


def log_mixture(
    log_densities: Float[ArrayLike, "members ..."], *, weights: Real[ArrayLike, " members *rows"] | None = None
) -> Float[Array, "..."]:
    r"""The logarithm of the mixture of the members' densities, $\log \sum_m w_m p_m$, of any kind, at the same points.

    For classes see [`eqx_ensemble.combine.mixture`][], for Gaussians [`eqx_ensemble.scores.nll_gaussian_mixture`][].

    **Arguments:**

    - `log_densities`: natural logarithms of densities or probabilities, `(members, ...)`.

    **Returns:** log-densities `(...)`.

    ```python
    ee.combine.log_mixture(jnp.log(jnp.array([[0.5], [0.1]])))  # log(0.3)
    ```
    """
    checked = check_values("log_densities", log_densities)
    convex = check_weights(weights, checked.shape[0], checked.dtype, shape=checked.shape[1:])
    return _log_mixture(checked, convex)


@jax.jit
def _mean(values: Float[Array, "members ..."], weights: Float[Array, "members ..."] | None) -> Float[Array, "..."]:
    return known_mean(values, weights)


@jax.jit
def _log_mixture(
    log_densities: Float[Array, "members ..."], weights: Float[Array, "members ..."] | None
) -> Float[Array, "..."]:
    return _weighting.log_mixture(blank_unweighted(log_densities, weights), weights)


class Gaussian(NamedTuple):
    """One Gaussian per entry: `mean` and `variance`, of the same shape."""

    mean: Float[Array, "..."]
    variance: Float[Array, "..."]

    __repr__ = brief_repr


@takes_pair
def gaussian(
    mean: Float[ArrayLike, "members ..."],
    variance: Float[ArrayLike, "members ..."],
    *,
    weights: Real[ArrayLike, " members *rows"] | None = None,
) -> Gaussian:
    r"""The Gaussian with the mean and variance of the mixture of the members' Gaussians.

    $\mu = \sum_m w_m \mu_m$ and $\sigma^2 = \sum_m w_m (\sigma_m^2 + (\mu_m - \mu)^2)$, entry by entry. For the two
    parts of the variance see [`eqx_ensemble.uncertainty.decompose_variance`][].

    **Arguments:**

    - `mean`, `variance`: `(members, ...)`.

    **Returns:** [`eqx_ensemble.combine.Gaussian`][], each `(...)`.

    ```python
    matched = ee.combine.gaussian(jnp.array([[1.0], [3.0]]), jnp.array([[0.5], [0.5]]))
    matched.mean, matched.variance  # [2.0], [1.5]
    ```

    ??? cite
        [Lakshminarayanan et al., NeurIPS 2017](https://arxiv.org/abs/1612.01474)
    """
    means, variances = check_moments(mean, variance, weights=weights)
    convex = check_weights(weights, means.shape[0], means.dtype, shape=means.shape[1:])
    return by_rows(_gaussian, (means, variances), (), convex)


@takes_pair
def product_gaussian(
    mean: Float[ArrayLike, "members ..."],
    variance: Float[ArrayLike, "members ..."],
    *,
    weights: Real[ArrayLike, " members *rows"] | None = None,
    power: Real[ArrayLike, ""] = 1.0,
) -> Gaussian:
    r"""The Gaussian proportional to the product of the members' Gaussians, each raised to its weight.

    The precision is $\sigma^{-2} = a \sum_m w_m \sigma_m^{-2}$ and the mean $\mu = a \, \sigma^2 \sum_m w_m \mu_m /
    \sigma_m^2$, where $a$, the `power`, is the sum of all exponents: 1 for the geometric mean of the densities, the
    number of members for the plain product, valid for members with independent errors.

    **Arguments:**

    - `mean`, `variance`: `(members, ...)`. Where a member has variance zero, only such members are used.
    - `power`: the sum of the exponents, positive.

    **Returns:** [`eqx_ensemble.combine.Gaussian`][], each `(...)`. The variance does not depend on the means.

    ```python
    mean, variance = jnp.array([[0.0], [3.0]]), jnp.array([[1.0], [2.0]])
    ee.combine.product_gaussian(mean, variance, power=2)  # mean 1.0, variance 2/3
    ```

    ??? cite
        [Cao and Fleet, arXiv 2014](https://arxiv.org/abs/1410.7827)
    """
    means, variances = check_moments(mean, variance, weights=weights)
    convex = check_weights(weights, means.shape[0], means.dtype, shape=means.shape[1:])
    return _product(means, variances, convex, check_power(power, means.dtype))


def _gaussian(moments: tuple[Array, Array], _: tuple, weights: Float[Array, "members ..."] | None) -> Gaussian:
    return Gaussian(*mixture_moments(*moments, weights))


@jax.jit
def _product(
    mean: Float[Array, "members ..."],
    variance: Float[Array, "members ..."],
    weights: Float[Array, "members ..."] | None,
    power: Float[Array, ""],
) -> Gaussian:
    mean = blank_unweighted(mean, weights)
    variance = blank_unweighted(variance, weights, fill=jnp.inf)
    # Precisions relative to the largest do not overflow, and do not give 0 / 0 where a member has variance zero.
    least = jax.lax.stop_gradient(jnp.min(variance, axis=0))
    limit = (least == 0) | (least == jnp.inf)
    of_equals = (variance == least[None]).astype(variance.dtype)
    safe = jnp.where(limit[None], 1, variance)
    precision = jnp.where(limit[None], of_equals, 1 / (safe / jnp.where(limit, 1, least)[None]))
    # A member of precision zero has no influence, even if its mean is not finite.
    mean = jnp.where(precision == 0, 0, mean)
    total = weighted_mean(precision, weights)
    # The first mean is also weighted by precision: otherwise members of low precision could shift it far away.
    found = weighted_mean(precision * mean, weights) / total
    infinite = jnp.isinf(found)
    rough = jnp.where(infinite, 0, found)
    deviation = jnp.where(infinite[None], 0, mean) - rough[None]
    correction = weighted_mean(precision * jnp.where(precision == 0, 0, deviation), weights) / total
    return Gaussian(jnp.where(infinite, found, rough + correction), least / total / power)


def moments(
    values: Float[ArrayLike, "members ..."], *, weights: Real[ArrayLike, " members *rows"] | None = None
) -> Gaussian:
    r"""Mean and variance over members of point predictions, entry by entry.

    $\mu = \sum_m w_m v_m$ and $\sigma^2 = \sum_m w_m (v_m - \mu)^2$ (ddof 0). A large common offset costs no precision.
    For members that predict a variance see [`eqx_ensemble.combine.gaussian`][].

    **Arguments:**

    - `values`: floating-point, `(members, ...)`.

    **Returns:** a named tuple of `.mean` and `.variance`, each `(...)`.

    ```python
    ee.combine.moments(jnp.array([[1.0], [3.0]]))  # mean [2.0], variance [1.0]
    ```

    ??? cite
        [Chan et al., COMPSTAT 1982](https://doi.org/10.1007/978-3-642-51461-6_3)
    """
    checked = check_values("values", values)
    convex = check_weights(weights, checked.shape[0], checked.dtype, shape=checked.shape[1:])
    return Gaussian(*by_rows(_moments, checked, (), convex))


def _moments(
    values: Float[Array, "members ..."], _: tuple, weights: Float[Array, "members ..."] | None
) -> tuple[Array, Array]:
    return _weighting.moments(blank_unweighted(values, weights), weights)
