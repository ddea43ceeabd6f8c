from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._pytree import PyTree
from ._check import check_chunk_weights, check_members


class ChunkWeights(NamedTuple):
    """The weights of a chunk and their sum, divided by `2**exponent`; `None` for equal weights."""

    weights: Float[Array, " members"] | None
    total: Float[Array, ""]
    exponent: Int[Array, ""]


def chunk_weights(predictions: PyTree, weights: Any, *, name: str) -> ChunkWeights | None:
    """The checked weights of a chunk; `None` if all are known to be zero.

    Concrete weights are divided by a power of two, which is exact, because float32 may not hold them: likelihoods, for
    example, are often below 1e-45.
    """
    count = check_members(predictions, name=name)
    if weights is None:
        return ChunkWeights(None, jnp.asarray(count).astype(float), jnp.int32(0))  # while exporting it may be a symbol
    weights = check_chunk_weights(weights, count, name=name)
    if not isinstance(weights, np.ndarray):
        return ChunkWeights(weights, jnp.sum(weights), jnp.int32(0))
    if not weights.any():
        return None
    scaled, exponent = scale_weights(weights)
    return ChunkWeights(jnp.asarray(scaled), jnp.asarray(scaled.sum()), jnp.int32(exponent))


def scale_weights(weights: np.ndarray) -> tuple[np.ndarray, int]:
    """Weights divided by the power of two that brings the largest into [1, 2), and its exponent."""
    exponent = int(np.frexp(weights.max())[1]) - 1
    return np.ldexp(weights, -exponent), exponent


def common_scale(first: Int[Array, ""], second: Int[Array, ""], dtype: Any) -> tuple[Int[Array, ""], Float[Array, "2"]]:
    """The larger of the exponents of two partials, and the factors that bring the weights of each to that scale."""
    exponents = jnp.stack([first, second])
    exponent = jnp.max(exponents)
    return exponent, jnp.ldexp(jnp.ones((), dtype), exponents - exponent)


def convex(weights: Array, dtype: Any) -> Array:
    """Normalises weights; equal weights if all are zero, which is only known at run time.

    The chunk or group of such members has weight zero itself.
    """
    weights = jnp.where(jnp.any(weights > 0), weights, jnp.ones_like(weights)).astype(dtype)
    # Values of weight zero are overwritten, so the gradient of such a weight would be wrong: it is set to zero.
    weights = jnp.where(weights == 0, 0, weights)
    return weights / jnp.sum(weights)
