"""Sums over rows that lose no precision."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from .._weighting import sum_members

_BLOCK = 256  # rows in one partial sum


def root(values: Float[Array, "..."]) -> Float[Array, "..."]:
    """The square root, with gradient zero at zero: the gradient at a perfect fit is not NaN."""
    exact = values == 0
    return jnp.where(exact, 0, jnp.sqrt(jnp.where(exact, 1, values)))


def sum_by_segment(
    values: Shaped[Array, " rows"], segment: Int[Array, " rows"], num_segments: int, *, in_order: bool = False
) -> Shaped[Array, " segments"]:
    """The sum of each segment, from partial sums: small numbers are then not added to very large ones.

    With few segments, of blocks of rows; with many, of a tree over the rows sorted by segment (`in_order`: they are).
    """
    if values.size <= _BLOCK or jnp.issubdtype(values.dtype, jnp.integer):
        return jax.ops.segment_sum(values, segment, num_segments)
    if num_segments <= _BLOCK:
        num_blocks = -(-values.size // _BLOCK)
        block = segment + num_segments * (jnp.arange(values.size, dtype=segment.dtype) // _BLOCK)
        sums = jax.ops.segment_sum(values, block, num_segments * num_blocks)
        return sum_members(jnp.reshape(sums, (num_blocks, num_segments)))  # pairwise
    if not in_order:
        order = jnp.argsort(segment)
        values, segment = values[order], segment[order]
    # `where`, not a product: a NaN stays in its segment.
    join = lambda a, b: (jnp.where(a[1] == b[1], a[0] + b[0], b[0]), b[1])
    running, _ = jax.lax.associative_scan(join, (values, segment))
    every = jnp.arange(num_segments, dtype=segment.dtype)
    last = jnp.searchsorted(segment, every, side="right") - 1
    return jnp.where(segment[last] == every, running[last], 0)


def ties(ranked: Shaped[Array, " rows"]) -> tuple[Int[Array, " rows"], Int[Array, " rows"]]:
    """The first and the last row equal to each of the sorted rows."""
    group = running_sum(jnp.append(False, ranked[1:] != ranked[:-1]).astype(jnp.int32))
    # Scattered, not `cummax` and `cummin`, which take many passes.
    row, ends = jnp.arange(ranked.size, dtype=jnp.int32), jnp.full(ranked.size + 1, ranked.size, jnp.int32)
    first = ends.at[group].min(row, indices_are_sorted=True)
    return first[group], first[group + 1] - 1


def running_sum(values: Shaped[Array, " rows"]) -> Shaped[Array, " rows"]:
    """The cumulative sum, pairwise: on a CPU, `jnp.cumsum` takes twice as long."""
    # Without the barrier, XLA computes the last additions once for each reader.
    return jax.lax.optimization_barrier(jax.lax.associative_scan(jnp.add, values))
