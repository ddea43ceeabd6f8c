import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from .._weighting import blank_masked
from ..uncertainty import Interval
from ._outward import difference_up, distance_up, rounding_of_means
from ._rank import fraction, rank_of, value_at_rank

_CHUNK = 256
"""The number of new rows compared with all held-out rows at a time."""


def fit_left_out(
    name: str,
    held_out: Array,
    targets: Interval,
    unseen: Bool[Array, "folds rows"],
    weights: Array | None,
    mask: Array | None,
    level: float,
    infinite: int,
) -> tuple[Array, Array, Array, Array]:
    """Residuals, weights of the members that held each row out, the rank of the quantile, and the mask of used rows."""
    rank = rank_of(name, fraction(level), held_out.size, mask, infinite=infinite)
    kept = jnp.ones(held_out.shape, bool) if mask is None else mask
    held_out, *ends = (blank_masked(x, mask) for x in (held_out, *targets))
    return *_residuals_and_shares(held_out, Interval(*ends), unseen, weights), rank, kept


@jax.jit
def _residuals_and_shares(
    held_out: Float[Array, " rows"],
    targets: Interval,
    unseen: Bool[Array, "folds rows"],
    weights: Float[Array, " folds"] | None,
) -> tuple[Float[Array, " rows"], Float[Array, "folds rows"]]:
    share = left_out_shares(unseen, jnp.ones(unseen.shape[0], held_out.dtype) if weights is None else weights)
    in_all = ~jnp.any(share > 0, axis=0)
    return jnp.where(in_all, jnp.inf, distance_up(targets, held_out)), share


def left_out_shares(unseen: Bool[Array, "folds rows"], weights: Float[Array, " folds"]) -> Float[Array, "folds rows"]:
    """The normalised weights of the members that held each row out; zero for rows without such a member."""
    share = jnp.where(unseen, weights[:, None], 0)
    total = jnp.sum(share, axis=0)
    return share / jnp.where(total == 0, 1, total)[None]


@jax.jit
def intervals(
    predictions: Float[Array, " times folds *batch"],
    residuals: Float[Array, " rows"],
    share: Float[Array, "folds rows"],
    rank: Int32[Array, ""],
    mask: Bool[Array, " rows"],
) -> Interval:
    """Quantiles over held-out rows of the prediction by members that held the row out, plus or minus its residual.

    Rounded outwards, also by the rounding of means over several members.
    """
    mean = jnp.mean(predictions, axis=0)
    flat = jnp.reshape(mean, (mean.shape[0], -1))
    used = jnp.any(share > 0, axis=1)
    flat = jnp.where(used[:, None], flat, 0)
    num_averaged = predictions.shape[0] * jnp.max(jnp.sum(share > 0, axis=0))

    def ends(of_row: Float[Array, " folds"]) -> tuple[Array, Array]:
        # A common offset is subtracted first: in sums of large products its rounding would differ between rows.
        offset = jnp.sum(jnp.where(used, of_row, 0)) / jnp.sum(used).astype(of_row.dtype)
        # The ends, of which the lower is negated: both are rounded up in each step.
        offsets = jnp.stack([-offset, offset])
        differences = difference_up(jnp.stack([-of_row, of_row]), jnp.broadcast_to(offsets[:, None], (2, of_row.size)))
        left_out = jnp.matmul(differences, share, precision=jax.lax.Precision.HIGHEST)
        at_rows = difference_up(jnp.broadcast_to(residuals, left_out.shape), -left_out)
        found = jax.vmap(value_at_rank, in_axes=(0, None, None))(at_rows, mask, rank)
        lower, upper = difference_up(found, -offsets) + rounding_of_means(of_row, num_averaged)
        return -lower, upper

    lower, upper = jax.lax.map(ends, flat.T, batch_size=_CHUNK)
    return Interval(jnp.reshape(lower, mean.shape[1:]), jnp.reshape(upper, mean.shape[1:]))
