from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from ._curvature import AbstractCurvature, Sums, add_rows, decompose


class FullCurvature(AbstractCurvature):
    """The full matrix; the columns of `vectors` `(weights, weights)` are the eigenvectors."""

    values: Float[Array, " weights"]
    vectors: Float[Array, "weights weights"]

    @staticmethod
    def start(num_weights: int, shape: tuple[int, int], dtype: Any) -> Sums:
        """A zero triangular root."""
        return jnp.zeros((num_weights, num_weights), dtype)

    @staticmethod
    def add(sums: Sums, roots: Float[Array, "rows out weights"], row_weights: Float[Array, " rows"]) -> Sums:
        """Updates the triangular root of the sum."""
        scaled = jnp.sqrt(row_weights)[:, None, None] * roots
        return add_rows(sums, scaled.reshape(-1, scaled.shape[-1]))

    @classmethod
    def finish(cls, sums: Sums) -> "FullCurvature":
        """The eigenvectors are the singular vectors of the root."""
        return cls(*decompose(sums))

    def rotate(self, noise: Float[Array, " weights"]) -> Float[Array, " weights"]:
        """The eigenvectors times a vector."""
        return self.vectors @ noise

    def covariance(
        self, jacobian: Float[Array, "out weights"], precision: Float[Array, " weights"]
    ) -> Float[Array, "out out"]:
        """The sum over eigenvectors."""
        scaled = (jacobian @ self.vectors) / jnp.sqrt(precision)[None]
        return scaled @ scaled.T

    def variance(self, precision: Float[Array, " weights"]) -> Float[Array, " weights"]:
        """The diagonal of the inverse."""
        return jnp.sum(self.vectors**2 / precision[None], axis=1)
