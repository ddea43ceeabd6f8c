import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._selection import Factors

Sums = Any
"""The accumulated sums over rows: a tree of arrays."""


class AbstractCurvature(eqx.Module):
    """The eigendecomposition of the generalised Gauss-Newton matrix of one member's weights.

    Where possible, no matrix is squared: rows are accumulated by QR decompositions of square roots. The condition
    number of a root is the square root of that of the matrix, so single precision suffices.
    """

    values: eqx.AbstractVar[Float[Array, " weights"]]

    @staticmethod
    @abc.abstractmethod
    def start(num_weights: int, shape: tuple[int, int], dtype: Any) -> Sums:
        """The initial sums; `shape` is that of a layer's matrix."""

    @staticmethod
    @abc.abstractmethod
    def add(sums: Sums, roots: Any, row_weights: Float[Array, " rows"]) -> Sums:
        """Adds rows to the sums; `roots` are Jacobians times a root of the second derivative of the likelihood."""

    @classmethod
    @abc.abstractmethod
    def finish(cls, sums: Sums) -> "AbstractCurvature":
        """The curvature of all rows."""

    @abc.abstractmethod
    def rotate(self, noise: Float[Array, " weights"]) -> Float[Array, " weights"]:
        """The eigenvectors times a vector: maps eigencoordinates to weights."""

    @abc.abstractmethod
    def covariance(self, jacobian: Any, precision: Float[Array, " weights"]) -> Float[Array, "out out"]:
        """The covariance of the outputs, given the precision of the weights along the eigenvectors."""

    @abc.abstractmethod
    def variance(self, precision: Float[Array, " weights"]) -> Float[Array, " weights"]:
        """The variance of each weight."""


def add_rows(root: Float[Array, "n n"], rows: Float[Array, "rows n"]) -> Float[Array, "n n"]:
    """A triangular root of `root' root + rows' rows`."""
    triangle = jnp.linalg.qr(jnp.concatenate([root, rows]), mode="r")
    return jax.lax.dynamic_slice_in_dim(triangle, 0, root.shape[0])


def decompose(root: Float[Array, "n n"]) -> tuple[Float[Array, " n"], Float[Array, "n n"]]:
    """The eigenvalues and eigenvectors of `root' root`."""
    _, singular, rows = jnp.linalg.svd(root)
    return singular**2, rows.T


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


CURVATURES: dict[str, type[AbstractCurvature]] = {
    "full": FullCurvature,
    "kron": KroneckerCurvature,
    "diag": DiagonalCurvature,
}
