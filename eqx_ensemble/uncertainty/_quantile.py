from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtr
from jaxtyping import Array, Float, Int32, Key

from .._boundary import array_function, kinds
from .._brief import brief_repr
from .._keys import root
from .._weighting import quantile_in_order, weighted_mean


class Interval(NamedTuple):
    """The ends of an interval for each entry: `lower` and `upper`, of the same shape."""

    lower: Float[Array, "..."]
    upper: Float[Array, "..."]

    def __repr__(self) -> str:
        return brief_repr(self)


@array_function
def gaussian_interval(mean: kinds.Points, variance: kinds.VarianceOrZero, *, level: float = 0.9) -> Interval:
    r"""The central interval of a Gaussian, $\mu \pm \sigma \, \Phi^{-1}((1 + \mathrm{level}) / 2)$.

    For an ensemble pass the result of [`eqx_ensemble.combine.gaussian`][].

    **Arguments:**

    - `mean`, `variance`: `(*batch,)`; with a `members` axis, one interval per member.
    - `level`: the probability inside, a Python number.

    **Returns:**

    [`eqx_ensemble.uncertainty.Interval`][], of the shape of `mean`.

    ```python
    ee.uncertainty.gaussian_interval(jnp.array([0.0]), jnp.array([1.0]), level=0.95)
    # [-1.96], [1.96]
    ```
    """
    from statistics import NormalDist  # here, because it takes a thirtieth of this library's import time

    # The small tail is exact in floating point; one minus the tail is not.
    half = jnp.sqrt(variance) * -NormalDist().inv_cdf((1 - level) / 2)
    return Interval(mean - half, mean + half)


@array_function(in_order="values")
def quantile(values: kinds.Members, levels: kinds.Levels, *, weights: kinds.Weights = None) -> Float[Array, "..."]:
    """Quantiles over members of their values as a weighted sample, entry by entry.

    The value at which the cumulative weight reaches the level; the midpoint to the next value if it equals the level.
    This is NumPy's `"averaged_inverted_cdf"`, definition 2 of Hyndman and Fan.

    **Arguments:**

    - `values`: floating-point, `(members, ...)`.
    - `levels`: a number from 0 to 1, or several `(levels,)`.
    - `weights`: over members, `(members,)`.

    **Returns:**

    `(...)` for one level, `(levels, ...)` for several; NaN where a member is NaN.

    ```python
    values = jnp.array([[1.0], [2.0], [3.0], [4.0]])
    ee.uncertainty.quantile(values, jnp.array([0.25, 0.9]))  # [[1.5], [4.0]]
    ```

    ??? cite
        [Hyndman and Fan 1996](https://doi.org/10.1080/00031305.1996.10473566)
    """
    return over_levels(lambda *one: _quantile(values, weights, *one), levels, values.dtype)


@array_function(in_order="values")
def interval(values: kinds.Members, *, level: float = 0.9, weights: kinds.Weights = None) -> Interval:
    """The central interval of the members' values as a weighted sample, entry by entry.

    Its ends are two values of [`eqx_ensemble.uncertainty.quantile`][]. It covers the members' values, without noise:
    for members that predict a variance see [`eqx_ensemble.uncertainty.gaussian_mixture_interval`][]. For fewer than
    `2 / (1 - level)` equally weighted members it is their full range.

    **Arguments:**

    - `values`: floating-point, `(members, ...)`.
    - `level`: the probability inside, a Python number.
    - `weights`: over members, `(members,)`.

    **Returns:**

    [`eqx_ensemble.uncertainty.Interval`][], of the shape of one member's values.

    ```python
    values = jnp.arange(10.0)[:, None]
    ee.uncertainty.interval(values, level=0.5)  # [2.0], [7.0]
    ```
    """
    ends = over_levels(lambda *one: _quantile(values, weights, *one), tails(level), values.dtype)
    return Interval(*ends)


@array_function
def gaussian_mixture_quantile(
    mean: kinds.Samples, variance: kinds.VariancesOrZero, levels: kinds.InnerLevels, *, weights: kinds.Weights = None
) -> Float[Array, "..."]:
    r"""Quantiles of the mixture of the members' Gaussians, entry by entry.

    The smallest $x$ with $\sum_m w_m \Phi((x - \mu_m) / \sigma_m) \ge \mathrm{level}$, by bisection to machine
    precision: it is monotone in the level, and accurate for levels close to one. It is differentiated as an implicit
    function.

    **Arguments:**

    - `mean`, `variance`: `(members, *batch)`. Members of variance zero are point masses.
    - `levels`: a number between 0 and 1, or several `(levels,)`.
    - `weights`: over members, `(members,)`.

    **Returns:**

    `(*batch,)` for one level, `(levels, *batch)` for several.

    ```python
    mean, variance = jnp.array([[-3.0], [3.0]]), jnp.ones((2, 1))
    ee.uncertainty.gaussian_mixture_quantile(mean, variance, jnp.array([0.25, 0.5]))
    # about [[-3.0], [0.0]]
    ```
    """
    return over_levels(lambda *one: _quantile_of_mixture(mean, variance, weights, *one), levels, mean.dtype)


@array_function
def gaussian_mixture_interval(
    mean: kinds.Samples, variance: kinds.VariancesOrZero, *, level: float = 0.9, weights: kinds.Weights = None
) -> Interval:
    """The central interval of the mixture of the members' Gaussians, entry by entry.

    Unlike [`eqx_ensemble.uncertainty.gaussian_interval`][] of the mixture's mean and variance, it is exact where
    members disagree.

    **Arguments:**

    - `mean`, `variance`: `(members, *batch)`.
    - `level`: the probability inside, a Python number.
    - `weights`: over members, `(members,)`.

    **Returns:**

    [`eqx_ensemble.uncertainty.Interval`][] of arrays `(*batch,)`.

    ```python
    mean, variance = jnp.array([[-3.0], [3.0]]), jnp.ones((2, 1))
    ee.uncertainty.gaussian_mixture_interval(mean, variance, level=0.9)  # [-4.28], [4.28]
    ```
    """
    one = lambda *one: _quantile_of_mixture(mean, variance, weights, *one)
    return Interval(*over_levels(one, tails(level), mean.dtype))


def tails(level: float) -> tuple[np.ndarray, np.ndarray]:
    """The levels of the ends of a central interval, and their distances to one."""
    tail = (1 - level) / 2
    return np.array([tail, 1 - tail]), np.array([1 - tail, tail])


def over_levels(fn: Callable[[Array, Array], Array], levels: Any, dtype: Any) -> Array:
    """`fn` of a level and its distance to one; for each of several."""
    below, over = (jnp.asarray(x, dtype) for x in levels)
    return jax.vmap(fn)(below, over) if below.ndim else fn(below, over)


def _quantile(
    ordered: Float[Array, "members ..."], own: Float[Array, "members ..."] | None, level: Array, over: Array
) -> Float[Array, "..."]:
    return jnp.where(jnp.isnan(ordered[-1]), jnp.nan, quantile_in_order(ordered, own, level, over))


def _quantile_of_mixture(
    mean: Float[Array, " members *batch"],
    variance: Float[Array, " members *batch"],
    weights: Float[Array, " members"] | None,
    below: Float[Array, ""],
    over: Float[Array, ""],
) -> Float[Array, "*batch"]:
    point = variance == 0
    sigma = jnp.where(point, 0, jnp.sqrt(jnp.where(point, 1, variance)))
    # Solves for deviations from the mean: a large common offset of the means costs no precision.
    middle = jax.lax.stop_gradient(weighted_mean(jnp.where(jnp.isinf(mean), 0, mean), weights))
    return middle + _solve(mean - middle[None], sigma, below, over, weights)


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


@array_function
def sample_gaussian_mixture(
    mean: kinds.Samples,
    variance: kinds.VariancesOrZero,
    num_samples: int,
    *,
    joint: bool = False,
    weights: kinds.Weights = None,
    key: Any,
) -> Float[Array, " samples *batch"]:
    """Samples the mixture of the members' Gaussians: draws a member by its weight, then a value from its Gaussian.

    **Arguments:**

    - `mean`, `variance`: `(members, *batch)`.
    - `num_samples`: the number of samples.
    - `joint`: whether all entries of a sample come from the same member; otherwise each entry draws a member
        independently, with the same marginal distributions.
    - `weights`: over members, `(members,)`.
    - `key`: one threefry key, typed or legacy.

    **Returns:**

    Samples `(samples, *batch)`, differentiable in mean and variance (not in the weights).

    ```python
    mean, variance = jnp.array([[-3.0], [3.0]]), jnp.ones((2, 1))
    ee.uncertainty.sample_gaussian_mixture(mean, variance, 9, key=key).shape  # (9, 1)
    ```
    """
    which, noise = jax.random.split(root(key))
    members = _members(mean.shape[0], weights, (num_samples, *mean.shape[1:]), joint, which)
    point = variance == 0
    sigma = jnp.where(point, 0, jnp.sqrt(jnp.where(point, 1, variance)))
    drawn = jax.random.normal(noise, members.shape, mean.dtype)
    return jnp.take_along_axis(mean, members, axis=0) + jnp.take_along_axis(sigma, members, axis=0) * drawn


@array_function
def sample_class_mixture(
    logits: kinds.Logits, num_samples: int, *, joint: bool = False, weights: kinds.Weights = None, key: Any
) -> Int32[Array, " samples *batch"]:
    """Samples labels from the mixture of the members: draws a member by its weight, then a class by its probabilities.

    **Arguments:**

    - `logits`: `(members, *batch, classes)`.
    - `num_samples`, `joint`, `weights`, `key`: as for [`eqx_ensemble.uncertainty.sample_gaussian_mixture`][].

    **Returns:**

    Labels `(samples, *batch)`, from 0 to classes - 1.

    ```python
    logits = jnp.log(jnp.array([[[0.9, 0.1]], [[0.5, 0.5]]]))
    jnp.mean(ee.uncertainty.sample_class_mixture(logits, 1000, key=key))  # about 0.3
    ```
    """
    which, noise = jax.random.split(root(key))
    shape = (num_samples, *logits.shape[1:-1])
    members = _members(logits.shape[0], weights, shape, joint, which)

    def one(sample: tuple[Array, Array]) -> Array:
        members, key = sample
        chosen = jnp.take_along_axis(logits, members[None, ..., None], axis=0)[0]
        return jax.random.categorical(key, chosen, axis=-1)

    # One sample at a time: the logits of all samples would be large.
    return jax.lax.map(one, (members, jax.random.split(noise, num_samples))).astype(jnp.int32)


def _members(
    num_members: int,
    weights: Float[Array, " members"] | None,
    shape: tuple[Any, ...],
    joint: bool,  # noqa: FBT001
    key: Key[Array, ""],
) -> Int32[Array, " samples *batch"]:
    """The member from which each entry of each sample is drawn."""
    drawn = (shape[0],) + (1,) * (len(shape) - 1) if joint else shape
    if weights is None:
        members = jax.random.randint(key, drawn, 0, num_members)
    else:
        members = jax.random.choice(key, num_members, drawn, p=weights)
    return jnp.broadcast_to(members.astype(jnp.int32), shape)
