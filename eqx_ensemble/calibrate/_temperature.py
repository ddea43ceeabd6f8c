import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Integer, Real

from .._brief import brief_doc
from .._check import (
    RowWeightsLike,
    as_column,
    check_entries,
    check_fitted_members,
    check_moments,
    check_regression,
    check_row_weights,
    check_variance,
)
from ..combine import Gaussian, gaussian
from ..scores._engine import RowWeights, reduce
from ._pooling import Pool, Pooling, Rows, check_best_temperature, check_scale, fit_rows, make_pooling


class Variance(eqx.Module):
    """Fitted variance scaling.

    **Attributes:**

    - `scale`: the factor of the variances, `(groups,)`; above 1 for overconfident predictions.
    - `pooling`: that of the fit.
    """

    scale: Float[Array, " groups"]
    pooling: Pooling

    __pdoc__ = brief_doc

    def __call__(
        self, mean: Float[ArrayLike, " members *batch"], variance: Float[ArrayLike, " members *batch"]
    ) -> Gaussian:
        """Means and calibrated variances, `(groups, *batch)`, as `.mean` and `.variance`."""
        means, variances = check_moments(mean, variance)
        check_fitted_members(self.pooling.num_members, means.shape[0])
        means, variances = _moments(means, variances, self.pooling)
        return Gaussian(means, variances * as_column(self.scale, means.ndim))


def variance(
    mean: Float[ArrayLike, " members *batch"],
    variance: Float[ArrayLike, " members *batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    pool: Pool,
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: RowWeightsLike | None = None,
) -> Variance:
    r"""Variance scaling: variances are multiplied by a factor, fitted to held-out targets by maximum likelihood.

    For a Gaussian, the factor is the mean of $(y - \mu)^2 / \sigma^2$ over all entries. Means are unchanged. For one
    factor per output, fit each output separately.

    **Arguments:**

    - `mean`, `variance`: `(members, *batch)`, of one shape, for rows that the members were not trained on. Variances
        above zero.
    - `targets`: `(*batch,)`; nothing is broadcast.
    - `pool`: `"members"` fits one factor per member; combine them afterwards. `"mixture"` first combines the members by
        [`eqx_ensemble.combine.gaussian`][], whose variance includes their disagreement.
    - `weights`, `row_weights`: as for [`eqx_ensemble.calibrate.temperature`][].

    **Returns:**

    [`eqx_ensemble.calibrate.Variance`][].

    **Raises:**

    - `ValueError` for variances that are not positive, and targets that all equal their means.

    ```python
    mean, variance, targets = jnp.zeros((1, 2)), jnp.ones((1, 2)), jnp.array([2.0, -2.0])
    fitted = ee.calibrate.variance(mean, variance, targets, pool="mixture")
    fitted(mean, variance).variance  # [[4.0, 4.0]]
    ```

    ??? cite
        [Laves et al. 2020](https://arxiv.org/abs/2104.12376)
    """
    means, variances, observed = check_regression(targets, members=True, mean=mean, variance=variance)
    rows = check_row_weights(row_weights, observed.shape, means.dtype, reduction="mean")
    check_variance(variance, positive=True, rows=rows, weights=weights)
    fix = "Leave these rows out: `row_weights=jnp.isfinite(targets)`."
    check_entries("finite `targets`", targets, lambda host: ~np.isfinite(host.astype(np.float64)), fix, rows)
    pooling = make_pooling(pool, weights, means)
    means, variances = rows.blank(means, before=1), rows.blank(variances, before=1, fill=1)
    scale = _fit_scale(*_moments(means, variances, pooling), rows.blank(observed), rows.weights)
    check_scale(pool, scale)
    return Variance(scale, pooling)


def _moments(mean: Array, variance: Array, pooling: Pooling) -> tuple[Array, Array]:
    if pooling.pool == "members":
        return mean, variance
    combined = gaussian(mean, variance, weights=pooling.weights)
    return combined.mean[None], combined.variance[None]


@jax.jit
def _fit_scale(
    mean: Float[Array, " groups *batch"],
    variance: Float[Array, " groups *batch"],
    targets: Float[Array, "*batch"],
    row_weights: RowWeights | None,
) -> Float[Array, " groups"]:
    errors = (targets[None] - mean) ** 2 / variance
    return jax.vmap(lambda of_group: reduce(of_group, "mean", row_weights))(errors)


_BRACKET = 40.0  # bounds of log(1 / T), in units of the largest difference of logits


class Temperature(eqx.Module):
    """Fitted temperature scaling.

    **Attributes:**

    - `temperature`: `(groups,)`; above 1 for overconfident predictions.
    - `pooling`: that of the fit.
    """

    temperature: Float[Array, " groups"]
    pooling: Pooling

    __pdoc__ = brief_doc

    def __call__(self, logits: Float[ArrayLike, "members *batch classes"]) -> Float[Array, "groups *batch classes"]:
        """Calibrated log-probabilities, `(groups, *batch, classes)`."""
        logs = self.pooling.logs(logits)
        return jax.nn.log_softmax(logs / as_column(self.temperature, logs.ndim), axis=-1)


def temperature(
    logits: Float[ArrayLike, "members *batch classes"],
    labels: Integer[ArrayLike, "*batch"],
    *,
    pool: Pool,
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: RowWeightsLike | None = None,
) -> Temperature:
    r"""Temperature scaling: logits are divided by a temperature $T$, fitted to held-out labels by maximum likelihood.

    The mean of $-\log \mathrm{softmax}(z / T)_y$ over rows, convex in $1 / T$, is minimised to machine precision. The
    most likely class is unchanged.

    **Arguments:**

    - `logits`: logits or log-probabilities of rows that the members were not trained on, `(members, *batch, classes)`.
    - `labels`: integers `(*batch,)` from 0 to classes - 1. While tracing, rows with other labels are ignored.
    - `pool`: `"members"` calibrates each member separately; combine them afterwards. `"mixture"` combines the members
        first, and calibrates the mixture.
    - `weights`: over members in the mixture, `(members,)`; stored in the result.
    - `row_weights`: relative weights `(*batch,)`, or booleans; rows of zero or `False` are ignored, even if NaN.

    **Returns:**

    [`eqx_ensemble.calibrate.Temperature`][].

    **Raises:**

    - `ValueError` if no optimum exists: every label is the most likely class, or labels are no more likely than by
        chance. While tracing, the temperature is then NaN.

    ```python
    # 90 % confidence, right in three of four rows
    logits = jnp.log(jnp.array([[[0.9, 0.1]] * 4]))
    fitted = ee.calibrate.temperature(logits, jnp.array([0, 0, 0, 1]), pool="mixture")
    jnp.exp(fitted(logits))[0, 0]  # [0.75, 0.25]: the temperature is 2
    ```

    ??? cite
        [Guo et al. 2017](https://arxiv.org/abs/1706.04599); before or after combination:
        [Rahaman and Thiery 2021](https://arxiv.org/abs/2007.08792)
    """
    pooling, rows = fit_rows(logits, labels, pool, weights, row_weights)
    inverse, separated, hopeless = _fit(rows)
    check_best_temperature(pool, separated, hopeless)
    return Temperature(1 / inverse, pooling)


@jax.jit
def _fit(rows: Rows) -> tuple[Float[Array, " groups"], Bool[Array, " groups"], Bool[Array, " groups"]]:
    # Relative to the label: the loss of a row is logsumexp(beta * gaps); the signs of gaps show if an optimum exists.
    of_label = jnp.take_along_axis(rows.logs, rows.labels[None, :, None], axis=-1)
    gaps = rows.logs - of_label
    counted = jnp.reshape(rows.share > 0, (1, -1, 1))
    separated = jnp.all((gaps <= 0) | ~counted, axis=(1, 2))
    hopeless = jnp.sum(jnp.mean(gaps, axis=-1) * rows.share[None], axis=-1) >= 0
    gaps = jnp.where(counted, gaps, 0)
    # In units of the largest gap: logits may have any magnitude.
    unit = jax.lax.stop_gradient(jnp.max(jnp.abs(gaps), axis=(1, 2)))
    unit = jnp.where(unit > 0, unit, 1)
    log_beta = jax.vmap(_log_inverse_temperature, in_axes=(0, None))(gaps / unit[:, None, None], rows.share)
    separated, hopeless = separated | (log_beta >= _BRACKET), hopeless | (log_beta <= -_BRACKET)
    inverse = jnp.exp(log_beta) / unit
    return jnp.where(separated | hopeless, jnp.nan, inverse), separated, hopeless


def _log_inverse_temperature(gaps: Float[Array, "rows classes"], share: Float[Array, " rows"]) -> Float[Array, ""]:
    found = _root(*jax.lax.stop_gradient((gaps, share)))
    # A Newton step of length zero carries the gradient of the implicit function.
    beta = jnp.exp(found)
    slope, curvature = _slope_and_curvature(beta, gaps, share)
    weight = jax.lax.stop_gradient(jnp.where(curvature > 0, beta * curvature, jnp.inf))
    return found - (slope - jax.lax.stop_gradient(slope)) / weight


def _slope_and_curvature(
    beta: Float[Array, ""], gaps: Float[Array, "rows classes"], share: Float[Array, " rows"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    p = jax.nn.softmax(beta * gaps, axis=-1)
    mean = jnp.sum(p * gaps, axis=-1)
    variance = jnp.sum(p * (gaps - mean[:, None]) ** 2, axis=-1)
    return jnp.sum(share * mean), jnp.sum(share * variance)


def _root(gaps: Float[Array, "rows classes"], share: Float[Array, " rows"]) -> Float[Array, ""]:
    """The root of the increasing slope of the mean loss: Newton's steps while they shrink, else bisection."""

    def step(state: tuple[Array, ...]) -> tuple[Array, ...]:
        log_beta, low, high, last, count = state
        beta = jnp.exp(log_beta)
        slope, curvature = _slope_and_curvature(beta, gaps, share)
        low, high = jnp.where(slope < 0, log_beta, low), jnp.where(slope < 0, high, log_beta)
        ratio = slope / jnp.where(curvature > 0, beta * curvature, 1)
        newton = log_beta + jnp.log1p(-jnp.minimum(ratio, 0.9))
        inside = (low < newton) & (newton < high) & (curvature > 0)
        new = jnp.where(inside & (jnp.abs(newton - log_beta) < 0.5 * jnp.abs(last)), newton, 0.5 * (low + high))
        new = jnp.where(slope == 0, log_beta, new)
        return new, low, high, new - log_beta, count + 1

    def goes_on(state: tuple[Array, ...]) -> Array:
        log_beta, low, high, last, count = state
        return (jnp.abs(last) > jnp.finfo(gaps.dtype).eps) & (high > low) & (count < 200)

    zero = jnp.zeros((), gaps.dtype)
    ends = zero - _BRACKET - 1, zero + _BRACKET + 1
    log_beta, *_ = jax.lax.while_loop(goes_on, step, (zero, *ends, zero + 2 * _BRACKET, jnp.asarray(0)))
    return jnp.where(jnp.all(jnp.isfinite(gaps)), log_beta, jnp.nan)
