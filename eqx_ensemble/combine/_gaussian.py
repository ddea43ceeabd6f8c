from typing import NamedTuple

import jax
from jaxtyping import Array, ArrayLike, Float, Real

from .._check import check_moments, check_weights
from .._weighting import blank_unweighted, moments, weighted_mean


class Gaussian(NamedTuple):
    """One Gaussian per entry: `mean` and `variance`, of the same shape."""

    mean: Float[Array, "..."]
    variance: Float[Array, "..."]


def gaussian(
    mean: Float[ArrayLike, "members ..."],
    variance: Float[ArrayLike, "members ..."],
    *,
    weights: Real[ArrayLike, " members"] | None = None,
) -> Gaussian:
    r"""The Gaussian with the mean and the variance of the mixture of the members' Gaussians.

    $\mu = \sum_m w_m \mu_m$ and $\sigma^2 = \sum_m w_m (\sigma_m^2 + (\mu_m - \mu)^2)$, entry by entry. The
    deviations are formed before they are squared, so a large common offset of the means costs no precision.

    **Arguments:**

    - `mean`, `variance`: `(members, ...)`, of one shape.
    - `weights`: convex weights over members, `(members,)`; divided by their sum. A member of weight zero is left out.

    **Returns:**

    A named tuple with `.mean` and `.variance`, of the shape of one member's mean. For the two parts of the variance see
    [`eqx_ensemble.uncertainty.decompose_variance`][].

    **Raises:**

    - `TypeError` for arrays that are not floating-point.
    - `ValueError` for shapes that differ, negative variances (where concrete), and unfit weights.

    ```python
    import jax.numpy as jnp
    from eqx_ensemble import combine

    matched = combine.gaussian(jnp.array([[1.0], [3.0]]), jnp.array([[0.5], [0.5]]))
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
    fn = "combine.gaussian"
    means, variances = check_moments(fn, mean, variance)
    convex = check_weights(fn, weights, means.shape[0], means.dtype)
    return _gaussian(means, variances, convex)


@jax.jit
def _gaussian(
    mean: Float[Array, "members ..."], variance: Float[Array, "members ..."], weights: Float[Array, " members"] | None
) -> Gaussian:
    centre, between = moments(blank_unweighted(mean, weights), weights)
    return Gaussian(centre, weighted_mean(blank_unweighted(variance, weights), weights) + between)
