from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

Reduction = Literal["mean", "none"]


def reduce(rows: Float[Array, "*batch"], reduction: Reduction) -> Float[Array, "..."]:
    """The mean over rows, or the rows as they are."""
    return jnp.mean(rows) if reduction == "mean" else rows
