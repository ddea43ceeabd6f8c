import math
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Real

from .._check import check_regression, check_variance, check_weights
from .._combination import by_rows
from .._weighting import blank_unweighted, log_mixture
from ._check import check_reduction
from ._reduce import Reduction, RowWeights, reduce, reduce_rows
from ._row_weights import CountedRows, check_rows


def nll_gaussian(
    mean: Float[ArrayLike, "*batch"],
    variance: Float[ArrayLike, "*batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    row_weights: Real[ArrayLike, "*batch"] | None = None,
    mask: Bool[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Negative log-density, in nats, of the targets under a single Gaussian per entry; lower is better.

    $\frac12 \log(2 \pi \sigma^2) + (y - \mu)^2 / (2 \sigma^2)$. No `members` axis: pass the result of
    [`eqx_ensemble.combine.gaussian`][] for the score reported in the deep-ensembles paper. For the mixture itself see
    [`eqx_ensemble.scores.nll_gaussian_mixture`][].

    **Arguments:**

    - `mean`, `variance`, `targets`: of one shape `(*batch,)`; nothing is broadcast. Variances above zero.
    - `row_weights`: finite, non-negative row weights `(*batch,)`; only their ratios matter. A row of weight 2 counts
        twice; a row of weight zero is ignored, even if it contains NaN.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.
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
    name = "scores.nll_gaussian"
    *arrays, rows = check_gaussian(name, mean, variance, targets, row_weights, mask, members=False, positive=True)
    check_reduction(name, reduction, arrays[-1].shape)
    return _nll(*arrays, rows.weights, reduction)


def nll_gaussian_mixture(
    mean: Float[ArrayLike, " members *batch"],
    variance: Float[ArrayLike, " members *batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    weights: Real[ArrayLike, " members *rows"] | None = None,
    row_weights: Real[ArrayLike, "*batch"] | None = None,
    mask: Bool[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Negative log-density, in nats, of the targets under the mixture of the members' Gaussians; lower is better.

    $-\log \sum_m w_m \, \mathcal{N}(y; \mu_m, \sigma_m^2)$ for each entry, computed in log space.

    **Arguments:**

    - `mean`, `variance`: `(members, *batch)`, of one shape. Variances above zero.
    - `targets`: `(*batch,)`; nothing is broadcast.
    - `weights`: convex weights over members, `(members,)`, or per row, `(members, *rows)`; divided by their sum.
        Members of weight zero are ignored.
    - `row_weights`: finite, non-negative row weights `(*batch,)`; only their ratios matter. A row of weight 2 counts
        twice; a row of weight zero is ignored, even if it contains NaN.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.
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
    name = "scores.nll_gaussian_mixture"
    *arrays, rows = check_gaussian(
        name, mean, variance, targets, row_weights, mask, members=True, positive=True, weights=weights
    )
    means, variances, observed = arrays
    convex = check_weights(name, weights, means.shape[0], means.dtype, rows=observed.shape, mask=rows.mask)
    check_reduction(name, reduction, observed.shape)
    return reduce_rows(by_rows(_nll_mixture, (means, variances), observed, convex), rows.weights, reduction)


def check_gaussian(
    name: str,
    mean: ArrayLike,
    variance: ArrayLike,
    targets: ArrayLike,
    row_weights: ArrayLike | None,
    mask: ArrayLike | None,
    *,
    members: bool,
    positive: bool,
    weights: ArrayLike | None = None,
) -> tuple[Array, Array, Array, CountedRows]:
    """Raises for invalid arguments. Returns means, variances, targets and row weights; ignored rows are overwritten."""
    means, variances, observed = check_regression(name, targets, members=members, mean=mean, variance=variance)
    rows = check_rows(name, row_weights, mask, observed.shape, means.dtype)
    check_variance(name, variance, positive=positive, mask=rows.known, weights=weights)
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
