from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Reduction = Literal["mean", "none"]


def reduce(
    rows: Float[Array, "*batch"], reduction: Reduction, mask: Bool[Array, "*batch"] | None = None
) -> Float[Array, "..."]:
    """The mean over rows, or the rows as they are; masked rows are NaN."""
    if reduction == "none":
        return rows if mask is None else jnp.where(mask, rows, jnp.nan)
    return masked_mean(rows, mask)


@partial(jax.jit, static_argnames="reduction")
def reduce_rows(
    rows: Float[Array, "*batch"], mask: Bool[Array, "*batch"] | None, reduction: Reduction
) -> Float[Array, "..."]:
    """`reduce`, compiled, of rows that were computed in blocks."""
    return reduce(rows, reduction, mask)


def masked_mean(rows: Float[Array, "*batch"], mask: Bool[Array, "*batch"] | None) -> Float[Array, ""]:
    """The mean over rows that are not masked."""
    if mask is None:
        return jnp.mean(rows)
    return jnp.sum(jnp.where(mask, rows, 0)) / jnp.sum(mask).astype(rows.dtype)
