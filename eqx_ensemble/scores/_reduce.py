from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from .._weighting import sum_members

Reduction = Literal["mean", "none"]

RowWeights = Bool[Array, "*batch"] | Float[Array, "*batch"]
"""Row weights: the booleans of a mask, or non-negative numbers."""

_BLOCK = 256
"""The number of rows in one partial sum."""


def reduce(
    rows: Float[Array, "*batch"], reduction: Reduction, row_weights: RowWeights | None = None
) -> Float[Array, "..."]:
    """The mean over rows, or the values of all rows, NaN for ignored ones."""
    if reduction == "none":
        return rows if row_weights is None else jnp.where(counts(row_weights), rows, jnp.nan)
    return mean_of_rows(rows, row_weights)


@partial(jax.jit, static_argnames="reduction")
def reduce_rows(
    rows: Float[Array, "*batch"], row_weights: RowWeights | None, reduction: Reduction
) -> Float[Array, "..."]:
    """Compiled `reduce`, for rows that were computed in blocks."""
    return reduce(rows, reduction, row_weights)


def mean_of_rows(rows: Float[Array, "*batch"], row_weights: RowWeights | None) -> Float[Array, ""]:
    """The weighted mean over rows."""
    if row_weights is None:
        return jnp.mean(rows)
    return jnp.sum(weigh(rows, row_weights)) / total_weight(row_weights, rows.dtype)


def weigh(rows: Float[Array, "*batch"], row_weights: RowWeights | None) -> Float[Array, "*batch"]:
    """The rows times their weights; zero for ignored rows, even if they contain NaN."""
    if row_weights is None:
        return rows
    return jnp.where(counts(row_weights), rows if row_weights.dtype == bool else rows * row_weights, 0)


def total_weight(row_weights: RowWeights, dtype: jnp.dtype) -> Float[Array, ""]:
    """The sum of the weights of all rows."""
    return jnp.sum(row_weights).astype(dtype)


def counts(row_weights: RowWeights) -> Bool[Array, "*batch"]:
    """Whether each row has a nonzero weight."""
    return row_weights if row_weights.dtype == bool else row_weights != 0


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
