"""The largest sum of losses that controls a risk, in exact arithmetic, and the threshold that reaches it."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from .._check import concrete
from ._rank import fraction


def largest_total(risk: float, bound: float, num_rows: int, mask: Array | None, dtype: jnp.dtype) -> Float[Array, ""]:
    """The largest sum of losses `S` with `(S + bound) / (n + 1) <= risk`, rounded down."""
    largest = Fraction(repr(float(bound)))
    total = lambda n: _round_down(fraction_of(risk, bound) * largest * (n + 1) - largest, dtype)
    host = None if mask is None else concrete(mask)
    if mask is None or host is not None:
        return jnp.asarray(total(num_rows if host is None else int(host.sum())))
    table = np.asarray([total(n) for n in range(num_rows + 1)])
    return jnp.asarray(table)[jnp.sum(mask)]


def fraction_of(risk: float, bound: float) -> Fraction:
    """The risk as an intended decimal fraction of the bound."""
    return fraction(float(risk) / float(bound))


def _round_down(value: Fraction, dtype: jnp.dtype) -> np.ndarray:
    rounded = np.asarray(float(value)).astype(dtype)
    if Fraction(float(rounded)) <= value:
        return rounded
    return np.asarray(np.nextafter(rounded, np.asarray(-np.inf).astype(dtype)))


@jax.jit
def first_on_grid(
    losses: Float[Array, "rows thresholds"],
    thresholds: Float[Array, " thresholds"],
    mask: Bool[Array, " rows"] | None,
    most: Float[Array, ""],
) -> Float[Array, ""]:
    """The first threshold whose losses sum to `most` or less, infinite if none does; NaN if a loss is NaN."""
    counted = losses if mask is None else jnp.where(mask[:, None], losses, 0)
    total = jnp.sum(counted, axis=0)
    found = jnp.min(jnp.where(total <= most, thresholds, jnp.inf))
    return jnp.where(jnp.any(jnp.isnan(total)), jnp.nan, found)


@jax.jit
def first_step(
    steps: Float[Array, "rows steps"],
    drops: Float[Array, "rows steps"],
    mask: Bool[Array, " rows"] | None,
    most: Float[Array, ""],
) -> Float[Array, ""]:
    """The first step above which the drops sum to `most` or less; minus infinity if all drops do."""
    heights = drops if mask is None else jnp.where(mask[:, None], drops, 0)
    at = jnp.where(heights == 0, -jnp.inf, steps)
    spoilt = jnp.any(jnp.isnan(heights)) | jnp.any(jnp.isnan(at))
    at, heights = jax.lax.sort((jnp.ravel(at), jnp.ravel(heights)), num_keys=1)
    # The remaining sum of losses at minus infinity, and at each step.
    left = jnp.append(jax.lax.cumsum(heights, reverse=True), 0)
    found = jnp.min(jnp.where(left <= most, jnp.append(-jnp.inf, at), jnp.inf))
    return jnp.where(spoilt, jnp.nan, found)
