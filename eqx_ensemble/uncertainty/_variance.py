from typing import Any

from jaxtyping import Array, ArrayLike, Float, Real

from .._check import check_moments, check_weights
from .._combination import Summary, by_rows, check_pair_of_moments, stream
from .._weighting import blank_unweighted, known_mean, mixture_moments, moments
from ._decomposition import Decomposition


def decompose_variance(
    mean: Float[ArrayLike, "members ..."],
    variance: Float[ArrayLike, "members ..."],
    *,
    weights: Real[ArrayLike, " members *rows"] | None = None,
) -> Decomposition:
    r"""The variance of the mixture of the members, split by the law of total variance.

    `aleatoric` is the mean of the members' variances, $\sum_m w_m \sigma_m^2$; `epistemic` is the variance of their
    means, $\sum_m w_m (\mu_m - \mu)^2$ (ddof 0); `total` is their sum, the variance of
    [`eqx_ensemble.combine.gaussian`][]. All are in the squared unit of the target. For class probabilities `p` pass `p`
    and `p * (1 - p)`, the variance of each class's indicator, and sum the parts over classes.

    **Arguments:**

    - `mean`, `variance`: `(members, ...)`, of one shape. For point predictions pass `jnp.zeros_like(mean)`.
    - `weights`: convex weights over members, `(members,)`, or per row, `(members, *rows)`; divided by their sum.
        Members of weight zero are ignored.

    **Returns:**

    A named tuple with `.total`, `.aleatoric` and `.epistemic`, each of the shape of one member's mean.

    **Raises:**

    - `TypeError` for arrays that are not floating-point.
    - `ValueError` for mismatched shapes, negative variances (where concrete), and invalid weights.

    ```python
    parts = ee.uncertainty.decompose_variance(
        jnp.array([[1.0], [3.0]]), jnp.array([[0.5], [0.7]])
    )
    parts.total, parts.aleatoric, parts.epistemic  # [1.6], [0.6], [1.0]
    ```

    ??? cite
        [Decomposition of Uncertainty in Bayesian Deep Learning for Efficient and Risk-sensitive
        Learning](https://arxiv.org/abs/1710.07283)
    """
    name = "uncertainty.decompose_variance"
    means, variances = check_moments(name, mean, variance, weights=weights)
    convex = check_weights(name, weights, means.shape[0], means.dtype, rows=means.shape[1:])
    aleatoric, epistemic = by_rows(_parts, (means, variances), (), convex)
    return Decomposition(aleatoric + epistemic, aleatoric, epistemic)


def _parts(
    pair: tuple[Array, Array], _: tuple, weights: Float[Array, "members ..."] | None
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    mean, variance = pair
    return known_mean(variance, weights), moments(blank_unweighted(mean, weights), weights)[1]


def _of_members(pair: tuple[Array, Array], weights: Any) -> tuple[tuple[Array, Array], Array]:
    """The moments of the members' means, and the mean of their variances."""
    aleatoric, epistemic = _parts(pair, (), weights)
    return (known_mean(pair[0], weights), epistemic), aleatoric


def _of_groups(groups: tuple[tuple[Array, Array], Array], weights: Any) -> tuple[tuple[Array, Array], Array]:
    moments_of_means, variances = groups
    return mixture_moments(*moments_of_means, weights), known_mean(variances, weights)


def _decomposition(summary: tuple[tuple[Array, Array], Array]) -> Decomposition:
    (_, epistemic), aleatoric = summary
    return Decomposition(aleatoric + epistemic, aleatoric, epistemic)


stream(
    decompose_variance,
    Summary(
        "uncertainty.decompose_variance", check_pair_of_moments, _of_members, _of_groups, _decomposition, pairs=True
    ),
)
