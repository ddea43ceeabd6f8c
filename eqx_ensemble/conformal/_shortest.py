"""Signed residuals of out-of-bag means, and the shortest interval that contains a fraction of them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from .._weighting import blank_masked
from ..uncertainty import Interval
from ._left_out import left_out_shares
from ._outward import residuals_out
from ._rank import fraction


@jax.jit
def residuals_and_share(
    held_out: Float[Array, " rows"],
    targets: Interval,
    unseen: Bool[Array, "members rows"],
    weights: Float[Array, " members"],
    known: Bool[Array, " rows"],
) -> tuple[Interval, Float[Array, " members"]]:
    """The residuals, rounded outwards, and the members' weights in the mean of out-of-bag means over known rows."""
    lower, upper, held_out = (blank_masked(x, known) for x in (*targets, held_out))
    residuals = residuals_out(Interval(lower, upper), held_out)
    share = jnp.sum(jnp.where(known[None], left_out_shares(unseen, weights), 0), axis=1)
    total = jnp.sum(share)
    return residuals, jnp.where(total == 0, weights / jnp.sum(weights), share / jnp.where(total == 0, 1, total))


@partial(jax.jit, static_argnames="level")
def shortest(
    residuals: Interval, known: Bool[Array, " rows"], level: float
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The ends of the shortest interval of neighbours; infinite if no residual is known, NaN if a known one is NaN."""
    exact, num_rows = fraction(level), known.size
    sizes = np.asarray([n * exact.numerator // exact.denominator for n in range(num_rows + 1)], np.int32)
    count = jnp.sum(known, dtype=jnp.int32)
    # The order of the rows is the same for both ends, up to ties.
    ordered, above = (jnp.sort(jnp.where(known, ends, jnp.inf)) for ends in residuals)
    lower = jnp.arange(num_rows, dtype=jnp.int32)
    upper = lower + jnp.asarray(sizes)[count]
    ends = above[jnp.minimum(upper, num_rows - 1)]
    inside = upper < count
    first = jnp.argmin(jnp.where(inside, ends - jnp.where(inside, ordered, 0), jnp.inf))
    none = count == 0
    spoilt = jnp.any(jnp.isnan(residuals.upper) & known)
    below = jnp.where(none, -jnp.inf, jnp.where(spoilt, jnp.nan, ordered[first]))
    return below, jnp.where(none, jnp.inf, jnp.where(spoilt, jnp.nan, ends[first]))
