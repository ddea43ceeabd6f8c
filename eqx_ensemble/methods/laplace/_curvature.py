import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

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
