import jax
import jax.numpy as jnp
from jax.scipy.special import ndtr, ndtri
from jaxtyping import Array, ArrayLike, Bool, Float, Real

from .._check import check_level, check_levels, check_moments, check_weights
from .._weighting import blank_unweighted, weighted_mean
from ._interval import Interval


def gaussian_mixture_quantile(
    mean: Float[ArrayLike, " members *batch"],
    variance: Float[ArrayLike, " members *batch"],
    levels: Real[ArrayLike, "..."],
    *,
    weights: Real[ArrayLike, " members"] | None = None,
) -> Float[Array, "..."]:
    r"""Quantiles of the mixture of the members' Gaussians, entry by entry.

    The solution $x$ of $\sum_m w_m \Phi((x - \mu_m) / \sigma_m) = \mathrm{level}$, found to rounding by Newton's method
    kept inside a shrinking bracket. Levels above one half are solved for the upper tail, so that those close to one
    keep their digits. The gradient is that of the implicit function.

    **Arguments:**

    - `mean`, `variance`: `(members, *batch)`, of one shape. A member of variance zero is a point.
    - `levels`: a number between 0 and 1, or several `(levels,)`.
    - `weights`: convex weights over members, `(members,)`; divided by their sum. A member of weight zero is left out.

    **Returns:**

    `(*batch,)` for one level, `(levels, *batch)` for several.

    **Raises:**

    - `TypeError` for arrays that are not floating-point.
    - `ValueError` for levels that are not between 0 and 1, shapes that differ, negative variances (all where concrete),
        and unfit weights.

    ```python
    mean, variance = jnp.array([[-3.0], [3.0]]), jnp.ones((2, 1))
    ee.uncertainty.gaussian_mixture_quantile(mean, variance, jnp.array([0.25, 0.5]))  # about [[-3.0], [0.0]]
    ```
    """
    fn = "uncertainty.gaussian_mixture_quantile"
    means, variances = check_moments(fn, mean, variance)
    below, over = check_levels(fn, levels, means.dtype, ends=False)
    convex = check_weights(fn, weights, means.shape[0], means.dtype)
    return _quantile(means, variances, below, over, convex)


def gaussian_mixture_interval(
    mean: Float[ArrayLike, " members *batch"],
    variance: Float[ArrayLike, " members *batch"],
    *,
    level: float = 0.9,
    weights: Real[ArrayLike, " members"] | None = None,
) -> Interval:
    r"""The central interval of the mixture of the members' Gaussians, entry by entry.

    From the quantile of level $(1 - \mathrm{level}) / 2$ to that of $(1 + \mathrm{level}) / 2$, as
    [`eqx_ensemble.uncertainty.gaussian_mixture_quantile`][] finds them. Unlike the interval of one Gaussian with the
    same mean and variance, [`eqx_ensemble.uncertainty.gaussian_interval`][], it is right where members disagree.

    **Arguments:**

    - `mean`, `variance`: `(members, *batch)`, of one shape.
    - `level`: the probability inside, a Python number between 0 and 1.
    - `weights`: convex weights over members, `(members,)`; divided by their sum. A member of weight zero is left out.

    **Returns:**

    A named tuple with `.lower` and `.upper`, `(*batch,)`; judge it by [`eqx_ensemble.scores.coverage`][].

    **Raises:**

    As [`eqx_ensemble.uncertainty.gaussian_mixture_quantile`][].

    ```python
    mean, variance = jnp.array([[-3.0], [3.0]]), jnp.ones((2, 1))
    ee.uncertainty.gaussian_mixture_interval(mean, variance, level=0.9)  # [-4.28], [4.28]
    ```
    """
    fn = "uncertainty.gaussian_mixture_interval"
    means, variances = check_moments(fn, mean, variance)
    check_level(fn, level)
    convex = check_weights(fn, weights, means.shape[0], means.dtype)
    tail = (1 - level) / 2
    below, over = (jnp.asarray(levels, means.dtype) for levels in ([tail, 1 - tail], [1 - tail, tail]))
    return Interval(*_quantile(means, variances, below, over, convex))


@jax.jit
def _quantile(
    mean: Float[Array, " members *batch"],
    variance: Float[Array, " members *batch"],
    below: Float[Array, "*levels"],
    over: Float[Array, "*levels"],
    weights: Float[Array, " members"] | None,
) -> Float[Array, "..."]:
    mean, variance = blank_unweighted(mean, weights), blank_unweighted(variance, weights)
    point = variance == 0
    sigma = jnp.where(point, 0, jnp.sqrt(jnp.where(point, 1, variance)))
    # Solved for deviations from the middle: a large common offset of the means costs no precision.
    middle = jax.lax.stop_gradient(weighted_mean(mean, weights))
    deviation = mean - middle[None]

    def one(below: Array, over: Array) -> Array:
        sign = jnp.where(over < below, -1, 1).astype(mean.dtype)
        return middle + sign * _solve(sign * deviation, sigma, jnp.minimum(below, over), weights)

    return jax.vmap(one)(below, over) if below.ndim else one(below, over)


def _solve(
    mean: Float[Array, " members *batch"],
    sigma: Float[Array, " members *batch"],
    level: Float[Array, ""],
    weights: Float[Array, " members"] | None,
) -> Float[Array, "*batch"]:
    fixed = jax.lax.stop_gradient((mean, sigma, level, weights))
    x = _bracketed(*fixed)
    # One more Newton step, of no length, that carries the gradient of the implicit function.
    density = jax.lax.stop_gradient(_density(x, mean, sigma, weights))
    excess = _share_below(x, mean, sigma, weights) - level
    return x - jnp.where(density > 0, (excess - jax.lax.stop_gradient(excess)) / jnp.where(density > 0, density, 1), 0)


def _bracketed(
    mean: Float[Array, " members *batch"],
    sigma: Float[Array, " members *batch"],
    level: Float[Array, ""],
    weights: Float[Array, " members"] | None,
) -> Float[Array, "*batch"]:
    alone = mean + sigma * ndtri(level)
    low = jnp.min(blank_unweighted(alone, weights, fill=jnp.inf), axis=0)
    high = jnp.max(blank_unweighted(alone, weights, fill=-jnp.inf), axis=0)
    eps = jnp.finfo(mean.dtype).eps
    least = jnp.min(blank_unweighted(sigma, weights, fill=jnp.inf), axis=0)
    scale = jnp.maximum(least, eps * (high - low))

    def at(x: Array) -> tuple[Array, Array]:
        return _share_below(x, mean, sigma, weights) - level, _density(x, mean, sigma, weights)

    def goes_on(state: tuple) -> Bool[Array, "*batch"]:
        _, _, before, x, excess, _ = state
        still = jnp.abs(x - before) > 2 * eps * jnp.maximum(jnp.abs(x), scale)
        return still & (jnp.abs(excess) > 4 * eps * level)

    # A step decides by what the last one computed and stored: computed anew, it may be rounded otherwise in each place
    # where it is used, and one part of the step would see the root on another side than the next.
    def step(state: tuple) -> tuple:
        low, high, before, x, excess, density = state
        low, high = jnp.where(excess < 0, x, low), jnp.where(excess < 0, high, x)
        newton = x - excess / density
        # A step that does not become shorter fast enough, as where no member has any density, gives way to a halving.
        useful = (low <= newton) & (newton <= high) & (jnp.abs(newton - x) <= 0.5 * jnp.abs(x - before))
        moved = jnp.where(useful, newton, low + 0.5 * (high - low))
        new = (low, high, x, moved, *at(moved))
        going_on = goes_on(state)
        return tuple(jnp.where(going_on, one, other) for one, other in zip(new, state, strict=True))

    x = low + 0.5 * (high - low)
    start = (low, high, jnp.full_like(x, jnp.inf), x, *at(x))
    return jax.lax.while_loop(lambda state: jnp.any(goes_on(state)), step, start)[3]


def _share_below(x: Array, mean: Array, sigma: Array, weights: Array | None) -> Float[Array, "*batch"]:
    point = sigma == 0
    smooth = ndtr((x[None] - mean) / jnp.where(point, 1, sigma))
    return weighted_mean(jnp.where(point, (x[None] >= mean).astype(mean.dtype), smooth), weights)


def _density(x: Array, mean: Array, sigma: Array, weights: Array | None) -> Float[Array, "*batch"]:
    point = sigma == 0
    safe = jnp.where(point, 1, sigma)
    return weighted_mean(jnp.where(point, 0, jax.scipy.stats.norm.pdf((x[None] - mean) / safe) / safe), weights)
