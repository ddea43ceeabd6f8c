from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from ._curvature import AbstractCurvature, Sums, add_rows, decompose
from ._selection import Factors


class KroneckerCurvature(AbstractCurvature):
    """The Kronecker product of matrices for a layer's outputs and inputs, by their eigenvectors.

    `sum_n B_n x a_n a_n'` over rows is replaced by `mean_n B_n x sum_n a_n a_n'` (KFAC).
    """

    values: Float[Array, " weights"]
    of_outputs: Float[Array, "units units"]
    of_inputs: Float[Array, "inputs inputs"]

    @staticmethod
    def start(num_weights: int, shape: tuple[int, int], dtype: Any) -> Sums:
        """Zero triangular roots, and a zero count."""
        units, inputs = shape
        return jnp.zeros((units, units), dtype), jnp.zeros((inputs, inputs), dtype), jnp.zeros((), dtype)

    @staticmethod
    def add(sums: Sums, roots: Factors, row_weights: Float[Array, " rows"]) -> Sums:
        """Updates the triangular roots of both sums, and the number of rows."""
        outputs, inputs, count = sums
        scale = jnp.sqrt(row_weights)
        of_rows = (scale[:, None, None] * roots.outputs).reshape(-1, outputs.shape[0])
        added = jnp.sum(row_weights)
        return add_rows(outputs, of_rows), add_rows(inputs, scale[:, None] * roots.inputs), count + added

    @classmethod
    def finish(cls, sums: Sums) -> "KroneckerCurvature":
        """The eigenvalues are the products of those of the factors."""
        outputs, inputs, count = sums
        of_outputs, left = decompose(outputs / jnp.sqrt(count))
        of_inputs, right = decompose(inputs)
        return cls(jnp.outer(of_outputs, of_inputs).ravel(), left, right)

    def rotate(self, noise: Float[Array, " weights"]) -> Float[Array, " weights"]:
        """Both sets of eigenvectors times the vector as a matrix."""
        return (self.of_outputs @ self._matrix(noise) @ self.of_inputs.T).ravel()

    def covariance(self, jacobian: Factors, precision: Float[Array, " weights"]) -> Float[Array, "out out"]:
        """The sum over pairs of eigenvectors, those of the inputs first."""
        along = self.of_inputs.T @ jacobian.inputs
        variances = jnp.sum(along[None] ** 2 / self._matrix(precision), axis=1)
        scaled = (jacobian.outputs @ self.of_outputs) * jnp.sqrt(variances)[None]
        return scaled @ scaled.T

    def variance(self, precision: Float[Array, " weights"]) -> Float[Array, " weights"]:
        """The diagonal of the inverse."""
        return (self.of_outputs**2 @ (1 / self._matrix(precision)) @ (self.of_inputs**2).T).ravel()

    def _matrix(self, vector: Float[Array, " weights"]) -> Float[Array, "units inputs"]:
        return vector.reshape(self.of_outputs.shape[0], -1)
