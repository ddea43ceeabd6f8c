from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from ._curvature import AbstractCurvature, Sums


class DiagonalCurvature(AbstractCurvature):
    """The diagonal approximation; its eigenvectors are the unit vectors."""

    values: Float[Array, " weights"]

    @staticmethod
    def start(num_weights: int, shape: tuple[int, int], dtype: Any) -> Sums:
        """One zero per weight."""
        return jnp.zeros(num_weights, dtype)

    @staticmethod
    def add(sums: Sums, roots: Float[Array, "rows out weights"], row_weights: Float[Array, " rows"]) -> Sums:
        """Adds weighted squares."""
        return sums + jnp.einsum("r,row->w", row_weights, roots**2)

    @classmethod
    def finish(cls, sums: Sums) -> "DiagonalCurvature":
        """The sums are the eigenvalues."""
        return cls(sums)

    def rotate(self, noise: Float[Array, " weights"]) -> Float[Array, " weights"]:
        """The vector itself."""
        return noise

    def covariance(
        self, jacobian: Float[Array, "out weights"], precision: Float[Array, " weights"]
    ) -> Float[Array, "out out"]:
        """The sum over weights."""
        scaled = jacobian / jnp.sqrt(precision)[None]
        return scaled @ scaled.T

    def variance(self, precision: Float[Array, " weights"]) -> Float[Array, " weights"]:
        """The inverse of each precision."""
        return 1 / precision
