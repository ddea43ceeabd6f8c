from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Reduction = Literal["mean", "none"]

RowWeights = Bool[Array, "*batch"] | Float[Array, "*batch"]
"""How much each row counts: booleans, which are those of a mask, or numbers of zero or more."""


def reduce(
    rows: Float[Array, "*batch"], reduction: Reduction, row_weights: RowWeights | None = None
) -> Float[Array, "..."]:
    """The mean over rows, or the rows as they are; rows that do not count are NaN."""
    if reduction == "none":
        return rows if row_weights is None else jnp.where(counts(row_weights), rows, jnp.nan)
    return mean_of_rows(rows, row_weights)


@partial(jax.jit, static_argnames="reduction")
def reduce_rows(
    rows: Float[Array, "*batch"], row_weights: RowWeights | None, reduction: Reduction
) -> Float[Array, "..."]:
    """`reduce`, compiled, of rows that were computed in blocks."""
    return reduce(rows, reduction, row_weights)


def mean_of_rows(rows: Float[Array, "*batch"], row_weights: RowWeights | None) -> Float[Array, ""]:
    """The weighted mean over rows that count."""
    if row_weights is None:
        return jnp.mean(rows)
    return jnp.sum(weigh(rows, row_weights)) / total_weight(row_weights, rows.dtype)


def weigh(rows: Float[Array, "*batch"], row_weights: RowWeights | None) -> Float[Array, "*batch"]:
    """The rows times their weights; zero where they do not count, whatever they hold."""
    if row_weights is None:
        return rows
    return jnp.where(counts(row_weights), rows if row_weights.dtype == bool else rows * row_weights, 0)


def total_weight(row_weights: RowWeights, dtype: jnp.dtype) -> Float[Array, ""]:
    """The sum of the weights of all rows."""
    return jnp.sum(row_weights).astype(dtype)


def counts(row_weights: RowWeights) -> Bool[Array, "*batch"]:
    """Which rows count."""
    return row_weights if row_weights.dtype == bool else row_weights != 0


def root(values: Float[Array, "..."]) -> Float[Array, "..."]:
    """The square root, with gradient zero at zero: a perfect fit must not give a NaN gradient."""
    exact = values == 0
    return jnp.where(exact, 0, jnp.sqrt(jnp.where(exact, 1, values)))
