import jax
import jax.numpy as jnp
from jax.scipy.special import ndtr
from jaxtyping import Array, ArrayLike, Float, Real

from .._check import check_level, check_moments, check_weights
from .._weighting import blank_unweighted, weighted_mean
from ._check import check_levels
from ._quantile import Interval


def gaussian_mixture_quantile(
    mean: Float[ArrayLike, " members *batch"],
    variance: Float[ArrayLike, " members *batch"],
    levels: Real[ArrayLike, "..."],
    *,
    weights: Real[ArrayLike, " members"] | None = None,
) -> Float[Array, "..."]:
    r"""Quantiles of the mixture of the members' Gaussians, entry by entry.

    The smallest $x$ with $\sum_m w_m \Phi((x - \mu_m) / \sigma_m) \ge \mathrm{level}$, by bisection to machine
    precision, which is robust to narrow, distant members, and monotone in the level. Levels above one half are compared
    with the upper tail: levels close to one are accurate. Levels closer to 0 or 1 than the dtype's smallest normal
    number have infinite quantiles. It is differentiated as an implicit function.

    **Arguments:**

    - `mean`, `variance`: `(members, *batch)`, of one shape. Members of variance zero are point masses.
    - `levels`: a number between 0 and 1, or several `(levels,)`.
    - `weights`: convex weights over members, `(members,)`; divided by their sum. Members of weight zero are ignored.

    **Returns:**

    `(*batch,)` for one level, `(levels, *batch)` for several.

    **Raises:**

    - `TypeError` for arrays that are not floating-point.
    - `ValueError` for levels that are not between 0 and 1, shapes that differ, negative variances (all where concrete),
        and invalid weights.

    ```python
    mean, variance = jnp.array([[-3.0], [3.0]]), jnp.ones((2, 1))
    ee.uncertainty.gaussian_mixture_quantile(mean, variance, jnp.array([0.25, 0.5]))
    # about [[-3.0], [0.0]]
    ```
    """
    name = "uncertainty.gaussian_mixture_quantile"
    means, variances = check_moments(name, mean, variance, weights=weights)
    below, over = check_levels(name, levels, means.dtype, ends=False)
    convex = check_weights(name, weights, means.shape[0], means.dtype)
    return _quantile(means, variances, below, over, convex)


def gaussian_mixture_interval(
    mean: Float[ArrayLike, " members *batch"],
    variance: Float[ArrayLike, " members *batch"],
    *,
    level: float = 0.9,
    weights: Real[ArrayLike, " members"] | None = None,
) -> Interval:
    r"""The central interval of the mixture of the members' Gaussians, entry by entry.

    From the quantile of level $(1 - \mathrm{level}) / 2$ to that of $(1 + \mathrm{level}) / 2$, computed by
    [`eqx_ensemble.uncertainty.gaussian_mixture_quantile`][]. Unlike the interval of a single Gaussian with the same
    mean and variance, [`eqx_ensemble.uncertainty.gaussian_interval`][], it is exact where members disagree.

    **Arguments:**

    - `mean`, `variance`: `(members, *batch)`, of one shape.
    - `level`: the probability inside, a Python number between 0 and 1.
    - `weights`: convex weights over members, `(members,)`; divided by their sum. Members of weight zero are ignored.

    **Returns:**

    A named tuple with `.lower` and `.upper`, `(*batch,)`; evaluate the interval with
    [`eqx_ensemble.scores.coverage`][].

    **Raises:**

    As [`eqx_ensemble.uncertainty.gaussian_mixture_quantile`][].

    ```python
    mean, variance = jnp.array([[-3.0], [3.0]]), jnp.ones((2, 1))
    ee.uncertainty.gaussian_mixture_interval(mean, variance, level=0.9)  # [-4.28], [4.28]
    ```
    """
    name = "uncertainty.gaussian_mixture_interval"
    means, variances = check_moments(name, mean, variance, weights=weights)
    check_level(name, level)
    convex = check_weights(name, weights, means.shape[0], means.dtype)
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
    # Solves for deviations from the mean: a large common offset of the means costs no precision.
    middle = jax.lax.stop_gradient(weighted_mean(jnp.where(jnp.isinf(mean), 0, mean), weights))
    one = lambda below, over: middle + _solve(mean - middle[None], sigma, below, over, weights)
    return jax.vmap(one)(below, over) if below.ndim else one(below, over)


def _solve(
    mean: Float[Array, " members *batch"],
    sigma: Float[Array, " members *batch"],
    below: Float[Array, ""],
    over: Float[Array, ""],
    weights: Float[Array, " members"] | None,
) -> Float[Array, "*batch"]:
    x = _bisect(*jax.lax.stop_gradient((mean, sigma, below, over, weights)))
    # A Newton step of length zero carries the gradient of the implicit function.
    density = jax.lax.stop_gradient(_density(x, mean, sigma, weights))
    excess = _tails(x, mean, sigma, weights)[0] - below
    return x - jnp.where(density > 0, (excess - jax.lax.stop_gradient(excess)) / jnp.where(density > 0, density, 1), 0)


def _bisect(
    mean: Float[Array, " members *batch"],
    sigma: Float[Array, " members *batch"],
    below: Float[Array, ""],
    over: Float[Array, ""],
    weights: Float[Array, " members"] | None,
) -> Float[Array, "*batch"]:
    """The smallest number that reaches the level, by a binary search over all numbers of the dtype.

    Newton's method could stop inside a narrow component, where its steps are short. The search compares the same
    numbers in the same order for every level, and each comparison is monotone in the level: quantiles are exactly
    monotone, despite rounding in the distribution function.
    """
    dtype = mean.dtype
    whole = jnp.int32 if dtype == jnp.float32 else jnp.int64
    largest = jnp.iinfo(whole).max

    # The bits of floating-point numbers, read as integers, have the order of the numbers, reversed for negative ones.
    def number(key: Array) -> Array:
        return jax.lax.bitcast_convert_type(jnp.where(key < 0, key ^ largest, key), dtype)

    infinity = jax.lax.bitcast_convert_type(jnp.asarray(jnp.inf, dtype), whole)

    def step(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = (low & high) + ((low ^ high) >> 1)  # the floor of the mean, without overflow
        lower, upper = _tails(number(middle), mean, sigma, weights)
        # The smaller tail is more accurate.
        short = jnp.where(lower <= upper, lower < below, upper > over)
        return jnp.where(short, middle, low), jnp.where(short, high, middle)

    shape = mean.shape[1:]
    start = jnp.broadcast_to(~infinity, shape), jnp.broadcast_to(infinity, shape)
    # One step more than the number of bits, for minus infinity.
    found = number(jax.lax.fori_loop(0, jnp.iinfo(whole).bits + 1, step, start)[1])
    unknown = jnp.any(jnp.isnan(mean) | jnp.isnan(sigma), axis=0)
    if weights is not None:
        unknown = unknown | jnp.any(jnp.isnan(weights))
    return jnp.where(unknown | jnp.isnan(below), jnp.nan, found)


def _tails(
    x: Float[Array, "*batch"], mean: Array, sigma: Array, weights: Array | None
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """The probabilities at or below `x`, and above it."""
    point = sigma == 0
    above = x[None] >= mean
    distance = (x[None] - mean) / jnp.where(point, 1, sigma)
    tail = jnp.where(point, 0, ndtr(jnp.where(above, -distance, distance)))
    lower = weighted_mean(jnp.where(above, 1 - tail, tail), weights)
    return lower, weighted_mean(jnp.where(above, tail, 1 - tail), weights)


def _density(x: Array, mean: Array, sigma: Array, weights: Array | None) -> Float[Array, "*batch"]:
    point = sigma == 0
    safe = jnp.where(point, 1, sigma)
    return weighted_mean(jnp.where(point, 0, jax.scipy.stats.norm.pdf((x[None] - mean) / safe) / safe), weights)
