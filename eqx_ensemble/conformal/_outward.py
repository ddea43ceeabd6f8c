"""Rounding outwards: an end at the score of a target must not fall short of the target, which may be a whole atom."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.jit
def difference_up(first: Float[Array, "..."], second: Float[Array, "..."]) -> Float[Array, "..."]:
    """`first - second`, rounded up: `second + result`, in any rounding, is then at least `first`."""
    found = first - second
    back = found - first
    missing = (first - (found - back)) - (second + back)  # exact: the error of the difference
    return _next_where(missing > 0, found)


@jax.jit
def distance_up(first: Float[Array, "..."], second: Float[Array, "..."]) -> Float[Array, "..."]:
    """`|first - second|`, rounded up."""
    return jnp.maximum(difference_up(first, second), difference_up(second, first))


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
