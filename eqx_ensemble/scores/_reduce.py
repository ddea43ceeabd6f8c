from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Reduction = Literal["mean", "none"]

RowWeights = Bool[Array, "*batch"] | Float[Array, "*batch"]
"""Row weights: the booleans of a mask, or non-negative numbers."""


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
