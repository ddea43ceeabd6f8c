import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Real

from .._check import as_column, check_fitted_members, check_mask, check_moments, check_regression, check_variance
from .._weighting import blank_masked
from ..combine import Gaussian, gaussian
from ..scores._check import check_some_rows
from ._check import check_finite_targets, check_scale
from ._pooling import Pool, Pooling, make_pooling


class Variance(eqx.Module):
    """Fitted variance scaling: call it on the means and variances of the same members.

    **Attributes:**

    - `scale`: the factor of the variances, `(members,)`, or `(1,)` for the combination; above 1 for overconfident
        predictions.
    - `pooling`: the predictions to calibrate: `.pool`, and the `.weights` of the combination.
    """

    scale: Float[Array, " groups"]
    pooling: Pooling

    def __call__(
        self, mean: Float[ArrayLike, " members *batch"], variance: Float[ArrayLike, " members *batch"]
    ) -> Gaussian:
        """Means and calibrated variances, `(members, *batch)`, or `(1, *batch)` for the combination."""
        name = "calibrate.Variance"
        means, variances = check_moments(name, mean, variance)
        check_fitted_members(name, self.pooling.num_members, means.shape[0])
        means, variances = _moments(means, variances, self.pooling)
        return Gaussian(means, variances * as_column(self.scale, means.ndim))


def variance(
    mean: Float[ArrayLike, " members *batch"],
    variance: Float[ArrayLike, " members *batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    pool: Pool,
    weights: Real[ArrayLike, " members"] | None = None,
    mask: Bool[ArrayLike, "*batch"] | None = None,
) -> Variance:
    r"""Variance scaling: variances are multiplied by a factor, fitted to held-out targets by maximum likelihood.

    For a Gaussian, the factor is the mean of $(y - \mu)^2 / \sigma^2$ over all entries. Means are unchanged.

    **Arguments:**

    - `mean`, `variance`: `(members, *batch)`, of one shape, for rows that the members were not trained on. Variances
        above zero.
    - `targets`: `(*batch,)`; nothing is broadcast. All entries share the factor: for one factor per output, fit each
        output separately.
    - `pool`: `"members"` fits one factor per member; combine them afterwards. `"mixture"` first combines the members
        into one Gaussian by [`eqx_ensemble.combine.gaussian`][], whose variance includes their disagreement.
    - `weights`: convex weights over members in the combination, `(members,)`; stored in the result.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.

    **Returns:**

    [`eqx_ensemble.calibrate.Variance`][], a Module: `fitted(mean, variance)` returns a named tuple with `.mean` and
    `.variance`, with a leading axis of length `members`, or 1 for the combination.

    **Raises:**

    - `TypeError` for means or variances that are not floating-point.
    - `ValueError` for mismatched shapes, zero rows, variances that are not positive, targets that all equal their
        means, values that are not finite (where concrete), and weights with `pool="members"`.

    ```python
    mean, variance, targets = jnp.zeros((1, 2)), jnp.ones((1, 2)), jnp.array([2.0, -2.0])
    fitted = ee.calibrate.variance(mean, variance, targets, pool="mixture")
    fitted(mean, variance).variance  # [[4.0, 4.0]]
    ```

    ??? cite
        [Well-Calibrated Regression Uncertainty in Medical Imaging with Deep Learning](https://arxiv.org/abs/2104.12376)

        ```bibtex
        @inproceedings{laves2020well,
            author={Max-Heinrich Laves and Sontje Ihler and Jacob F. Fast and L{\"u}der A. Kahrs and Tobias Ortmaier},
            title={Well-Calibrated Regression Uncertainty in Medical Imaging with Deep Learning},
            booktitle={Medical Imaging with Deep Learning},
            year={2020},
        }
        ```
    """
    name = "calibrate.variance"
    means, variances, observed = check_regression(name, targets, members=True, mean=mean, variance=variance)
    kept = check_mask(name, mask, observed.shape)
    check_variance(name, variance, positive=True, mask=mask, weights=weights)
    check_some_rows(name, observed.shape)
    check_finite_targets(name, targets, mask)
    pooling = make_pooling(name, pool, weights, means)
    means, variances = blank_masked(means, kept, before=1), blank_masked(variances, kept, before=1, fill=1)
    scale = _fit(*_moments(means, variances, pooling), blank_masked(observed, kept), kept)
    check_scale(name, pool, scale)
    return Variance(scale, pooling)


def _moments(mean: Array, variance: Array, pooling: Pooling) -> tuple[Array, Array]:
    if pooling.pool == "members":
        return mean, variance
    combined = gaussian(mean, variance, weights=pooling.weights)
    return combined.mean[None], combined.variance[None]


@jax.jit
def _fit(
    mean: Float[Array, " groups *batch"],
    variance: Float[Array, " groups *batch"],
    targets: Float[Array, "*batch"],
    mask: Bool[Array, "*batch"] | None,
) -> Float[Array, " groups"]:
    errors = (targets[None] - mean) ** 2 / variance
    entries = tuple(range(1, errors.ndim))
    if mask is None:
        return jnp.mean(errors, axis=entries)
    return jnp.sum(jnp.where(mask[None], errors, 0), axis=entries) / jnp.sum(mask).astype(errors.dtype)
