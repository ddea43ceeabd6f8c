"""Rounding outwards: an end at the score of a target must not fall short of the target, which may be a whole atom."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Shaped

from .._check import concrete
from ..uncertainty import Interval


def enclose(values: Shaped[ArrayLike, "..."], rounded: Float[Array, "..."]) -> Interval:
    """The closest numbers of the dtype of `rounded` at or below, and at or above, the values that were rounded to it.

    In 32-bit mode a target of NumPy's float64 is between two of them. While tracing it is one of them.
    """
    host = concrete(values)
    if host is None or host.dtype == rounded.dtype:
        return Interval(rounded, rounded)
    with np.errstate(over="ignore"):
        exact, near = host.astype(np.float64), host.astype(rounded.dtype)  # not of `rounded`, which may be traced
    infinity = near.dtype.type(np.inf)
    lower = np.where(near > exact, np.nextafter(near, -infinity), near)
    upper = np.where(near < exact, np.nextafter(near, infinity), near)
    if not (lower < upper).any():
        return Interval(rounded, rounded)
    return Interval(jnp.asarray(lower), jnp.asarray(upper))


@jax.jit
def difference_up(first: Float[Array, "..."], second: Float[Array, "..."]) -> Float[Array, "..."]:
    """`first - second`, rounded up: `second + result`, in any rounding, is then at least `first`."""
    found = first - second
    back = found - first
    missing = (first - (found - back)) - (second + back)  # exact: the error of the difference
    return _next_where(missing > 0, found)


@jax.jit
def distance_up(targets: Interval, predictions: Float[Array, "..."]) -> Float[Array, "..."]:
    """`|targets - predictions|` of targets between these ends, rounded up."""
    return jnp.maximum(difference_up(targets.upper, predictions), difference_up(predictions, targets.lower))


@jax.jit
def residuals_out(targets: Interval, predictions: Float[Array, "..."]) -> Interval:
    """`targets - predictions` of targets between these ends, rounded down and up."""
    return Interval(-difference_up(predictions, targets.lower), difference_up(targets.upper, predictions))


@jax.jit
def quotient_up(first: Float[Array, "..."], second: Float[Array, "..."]) -> Float[Array, "..."]:
    """`first / second` for positive `second`, rounded up: `result * second` is at least `first`."""
    found = first / second
    for _ in range(2):  # a division is less exact on accelerators
        found = _next_where(_is_below(found, second, first), found)
    return found


def _next_where(condition: Array, values: Array) -> Array:
    # The derivative is that of the values.
    fixed = jax.lax.stop_gradient(values)
    return values + jnp.where(condition, jnp.nextafter(fixed, jnp.full_like(fixed, jnp.inf)) - fixed, 0)


def _is_below(first: Array, second: Array, bound: Array) -> Array:
    """Whether `first * second < bound`, exactly, for a product that rounds to a neighbour of the bound."""
    info = jnp.finfo(first.dtype)
    high = lambda x: jax.lax.reduce_precision(x, info.nexp, (info.nmant - 1) // 2)
    product, a, b = first * second, high(first), high(second)
    # Products of halves are exact.
    missing = ((a * b - product) + a * (second - b) + (first - a) * b) + (first - a) * (second - b)
    return (product < bound) | ((product == bound) & (missing < 0))


def rounding_of_means(predictions: Float[Array, "members ..."], num_averaged: Array) -> Float[Array, "..."]:
    """By how much two means over members may differ that would be equal without rounding; zero of a single member."""
    largest = jnp.max(jnp.abs(predictions), axis=0)
    count = num_averaged.astype(largest.dtype)
    return largest * jnp.where(count > 1, jnp.log2(2 * count), 0) * jnp.finfo(largest.dtype).eps
