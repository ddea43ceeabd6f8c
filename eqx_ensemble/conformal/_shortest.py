"""Signed residuals of out-of-bag means, and the shortest interval that contains a fraction of them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from .._weighting import blank_masked
from ._left_out import left_out_shares
from ._rank import fraction


@jax.jit
def residuals_and_share(
    held_out: Float[Array, " rows"],
    targets: Float[Array, " rows"],
    unseen: Bool[Array, "members rows"],
    weights: Float[Array, " members"],
    known: Bool[Array, " rows"],
) -> tuple[Float[Array, " rows"], Float[Array, " members"]]:
    """The residuals, and the members' weights in the mean, over known rows, of the out-of-bag means."""
    residuals = blank_masked(targets, known) - blank_masked(held_out, known)
    share = jnp.sum(jnp.where(known[None], left_out_shares(unseen, weights), 0), axis=1)
    total = jnp.sum(share)
    return residuals, jnp.where(total == 0, weights / jnp.sum(weights), share / jnp.where(total == 0, 1, total))


@partial(jax.jit, static_argnames="level")
def shortest(
    residuals: Float[Array, " rows"], known: Bool[Array, " rows"], level: float
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The ends of the shortest interval of neighbours; infinite if no residual is known, NaN if a known one is NaN."""
    exact, num_rows = fraction(level), residuals.size
    sizes = np.asarray([n * exact.numerator // exact.denominator for n in range(num_rows + 1)], np.int32)
    count = jnp.sum(known, dtype=jnp.int32)
    ordered = jnp.sort(jnp.where(known, residuals, jnp.inf))
    lower = jnp.arange(num_rows, dtype=jnp.int32)
    upper = lower + jnp.asarray(sizes)[count]
    ends = ordered[jnp.minimum(upper, num_rows - 1)]
    inside = upper < count
    first = jnp.argmin(jnp.where(inside, ends - jnp.where(inside, ordered, 0), jnp.inf))
    none = count == 0
    spoilt = jnp.any(jnp.isnan(residuals) & known)
    below = jnp.where(none, -jnp.inf, jnp.where(spoilt, jnp.nan, ordered[first]))
    return below, jnp.where(none, jnp.inf, jnp.where(spoilt, jnp.nan, ends[first]))
