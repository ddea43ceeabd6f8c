from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._pytree import PyTree
from ._check import check_chunk_weights, check_members


def chunk_weights(predictions: PyTree, weights: Any, *, name: str) -> tuple[Any, Array | None]:
    """The checked weights of a chunk, and their sum; `None` for the sum if all weights are known to be zero."""
    count = check_members(predictions, name=name)
    if weights is None:
        return None, jnp.asarray(np.float64(count))
    weights = check_chunk_weights(weights, count, name=name)
    if isinstance(weights, np.ndarray):
        return jnp.asarray(weights), jnp.asarray(weights.sum()) if weights.any() else None
    return weights, jnp.sum(weights)


def convex(weights: Array, dtype: Any) -> Array:
    """Normalises weights; equal weights if all are zero, which is only known at run time.

    The chunk or group of such members has weight zero itself.
    """
    weights = jnp.where(jnp.any(weights > 0), weights, jnp.ones_like(weights)).astype(dtype)
    # Values of weight zero are overwritten, so the gradient of such a weight would be wrong: it is set to zero.
    weights = jnp.where(weights == 0, 0, weights)
    return weights / jnp.sum(weights)
