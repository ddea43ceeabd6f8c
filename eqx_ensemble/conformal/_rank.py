"""The rank of the quantile among the sorted scores, in exact arithmetic."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from .._check import concrete
from ._check import warn_of_infinite


def fraction(level: float) -> Fraction:
    """The intended decimal fraction: 0.9 is 9/10, which floats cannot represent."""
    return Fraction(float(level)).limit_denominator(10**9)


def rank_of(name: str, level: Fraction, num_rows: int, mask: Array | None, *, infinite: int = 0) -> Int32[Array, ""]:
    r"""$\lceil (n + 1) \mathrm{level} \rceil$ for the $n$ unmasked rows; warns if no finite score has this rank."""
    kept = num_rows if mask is None else _count_kept(mask)
    if kept is not None:
        warn_of_infinite(name, _rank(level, kept), kept, infinite, level)
    return rank_among(level, num_rows, mask)


def rank_among(level: Fraction, num_rows: int, mask: Array | None) -> Int32[Array, ""]:
    """`rank_of` without the warning."""
    if mask is None or (count := _count_kept(mask)) is not None:
        return jnp.asarray(_rank(level, num_rows if mask is None else count), jnp.int32)
    return jnp.asarray(ranks_by_count(level, num_rows))[jnp.sum(mask)]


def ranks_by_count(level: Fraction, num_rows: int) -> np.ndarray:
    """The rank for every number of rows from 0 to `num_rows`."""
    return np.asarray([_rank(level, kept) for kept in range(num_rows + 1)], np.int32)


def _rank(level: Fraction, num_rows: int) -> int:
    return max(-(-(num_rows + 1) * level.numerator // level.denominator), 1)


def _count_kept(mask: Array) -> int | None:
    """The number of unmasked rows; `None` while tracing."""
    host = concrete(mask)
    return None if host is None else int(host.sum())


def value_at_rank(
    scores: Float[Array, " rows"], mask: Bool[Array, " rows"] | None, rank: Int32[Array, ""]
) -> Float[Array, ""]:
    """The score of a rank among unmasked rows, infinite beyond the last; NaN if any is NaN."""
    count = scores.size if mask is None else jnp.sum(mask, dtype=jnp.int32)
    counted = scores if mask is None else jnp.where(mask, scores, jnp.inf)
    found = jnp.sort(counted)[jnp.clip(rank - 1, 0, scores.size - 1)]
    found = jnp.where(rank > count, jnp.inf, found)
    return jnp.where(jnp.any(jnp.isnan(counted)), jnp.nan, found)


value_at_rank_jit = jax.jit(value_at_rank)


@jax.jit
def pair_at_rank(
    scores: Float[Array, " rows"],
    ties: Float[Array, " rows"],
    mask: Bool[Array, " rows"] | None,
    rank: Int32[Array, ""],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """`value_at_rank` for scores whose ties are ordered by `ties`, and the value of `ties` at that rank."""
    counted = scores if mask is None else jnp.where(mask, scores, jnp.inf)
    _, in_order = jax.lax.sort((counted, ties), num_keys=2)
    return value_at_rank(scores, mask, rank), in_order[jnp.clip(rank - 1, 0, scores.size - 1)]
