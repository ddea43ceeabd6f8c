from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Real

from .._check import check_moments, check_weights
from .._combination import Summary, by_rows, check_pair_of_moments, stream
from .._weighting import blank_unweighted, mixture_moments, weighted_mean
from ._check import check_power


class Gaussian(NamedTuple):
    """One Gaussian per entry: `mean` and `variance`, of the same shape."""

    mean: Float[Array, "..."]
    variance: Float[Array, "..."]


def gaussian(
    mean: Float[ArrayLike, "members ..."],
    variance: Float[ArrayLike, "members ..."],
    *,
    weights: Real[ArrayLike, " members *rows"] | None = None,
) -> Gaussian:
    r"""The Gaussian with the mean and variance of the mixture of the members' Gaussians.

    $\mu = \sum_m w_m \mu_m$ and $\sigma^2 = \sum_m w_m (\sigma_m^2 + (\mu_m - \mu)^2)$, entry by entry. Deviations are
    computed before they are squared, so a large common offset of the means costs no precision.

    **Arguments:**

    - `mean`, `variance`: `(members, ...)`, of one shape.
    - `weights`: convex weights over members, `(members,)`, or per row, `(members, *rows)`; divided by their sum.
        Members of weight zero are ignored.

    **Returns:**

    A named tuple with `.mean` and `.variance`, of the shape of one member's mean. For the two parts of the variance see
    [`eqx_ensemble.uncertainty.decompose_variance`][].

    **Raises:**

    - `TypeError` for arrays that are not floating-point.
    - `ValueError` for mismatched shapes, negative variances (where concrete), and invalid weights.

    ```python
    matched = ee.combine.gaussian(jnp.array([[1.0], [3.0]]), jnp.array([[0.5], [0.5]]))
    matched.mean, matched.variance  # [2.0], [1.5]
    ```

    ??? cite
        [Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles](https://arxiv.org/abs/1612.01474)

        ```bibtex
        @inproceedings{lakshminarayanan2017simple,
            author={Balaji Lakshminarayanan and Alexander Pritzel and Charles Blundell},
            title={Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles},
            booktitle={Advances in Neural Information Processing Systems},
            year={2017},
        }
        ```
    """
    name = "combine.gaussian"
    means, variances = check_moments(name, mean, variance, weights=weights)
    convex = check_weights(name, weights, means.shape[0], means.dtype, rows=means.shape[1:])
    return by_rows(_gaussian, (means, variances), (), convex)


def product_gaussian(
    mean: Float[ArrayLike, "members ..."],
    variance: Float[ArrayLike, "members ..."],
    *,
    weights: Real[ArrayLike, " members *rows"] | None = None,
    power: Real[ArrayLike, ""] = 1.0,
) -> Gaussian:
    r"""The Gaussian proportional to the product of the members' Gaussians, each raised to its weight.

    The precision is $\sigma^{-2} = a \sum_m w_m \sigma_m^{-2}$ and the mean $\mu = a \, \sigma^2 \sum_m w_m \mu_m /
    \sigma_m^2$, entry by entry, where $a$, the `power`, is the sum of all exponents. For 1 it is the geometric mean of
    the densities: if all members agree, it equals each of them. For the number of members it is the plain product,
    valid for members with independent errors: each additional member narrows it.

    **Arguments:**

    - `mean`, `variance`: `(members, ...)`, of one shape. Members of infinite variance have no influence; where a member
        has variance zero, only such members are used.
    - `weights`: convex weights over members, `(members,)`, or per row, `(members, *rows)`; divided by their sum.
        Members of weight zero are ignored.
    - `power`: the sum of the exponents, positive.

    **Returns:**

    A named tuple with `.mean` and `.variance`, of the shape of one member's mean. Unlike the variance of the mixture,
    [`eqx_ensemble.combine.gaussian`][], it does not depend on the means.

    **Raises:**

    As [`eqx_ensemble.combine.gaussian`][], and `ValueError` for a power that is not positive (where concrete).

    ```python
    mean, variance = jnp.array([[0.0], [3.0]]), jnp.array([[1.0], [2.0]])
    ee.combine.product_gaussian(mean, variance, power=2)  # mean 1.0, variance 2/3
    ```

    ??? cite
        [Generalized Product of Experts for Automatic and Principled Fusion of Gaussian Process
        Predictions](https://arxiv.org/abs/1410.7827)

        ```bibtex
        @article{cao2014generalized,
            author={Yanshuai Cao and David J. Fleet},
            title={Generalized Product of Experts for Automatic and Principled Fusion of {G}aussian Process
                   Predictions},
            journal={arXiv: 1410.7827},
            year={2014},
        }
        ```
    """
    name = "combine.product_gaussian"
    means, variances = check_moments(name, mean, variance, weights=weights)
    convex = check_weights(name, weights, means.shape[0], means.dtype, rows=means.shape[1:])
    return _product(means, variances, convex, check_power(name, power, means.dtype))


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


_of_pair = lambda pair, weights: _gaussian(pair, (), weights)
stream(gaussian, Summary("combine.gaussian", check_pair_of_moments, _of_pair, _of_pair, pairs=True))
