import abc
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Sums = Any
"""What is summed over the rows: a tree of arrays."""


class AbstractCurvature(eqx.Module):
    """The generalised Gauss-Newton matrix of one member's weights, by its eigenvalues and eigenvectors.

    No matrix is squared where it can be avoided: rows are summed by QR decompositions of their roots, whose singular
    values have half the condition of the eigenvalues, so that single precision suffices.
    """

    values: eqx.AbstractVar[Float[Array, " weights"]]

    @staticmethod
    @abc.abstractmethod
    def start(num_weights: int, shape: tuple[int, int], dtype: Any) -> Sums:
        """The sums over no rows; `shape` is that of a layer's matrix."""

    @staticmethod
    @abc.abstractmethod
    def add(sums: Sums, roots: Any, row_weights: Float[Array, " rows"]) -> Sums:
        """The sums with more rows: their Jacobians, multiplied by a root of the likelihood's second derivative."""

    @classmethod
    @abc.abstractmethod
    def finish(cls, sums: Sums) -> "AbstractCurvature":
        """The curvature of all rows."""

    @abc.abstractmethod
    def rotate(self, noise: Float[Array, " weights"]) -> Float[Array, " weights"]:
        """The eigenvectors times a vector: from coordinates along them to weights."""

    @abc.abstractmethod
    def covariance(self, jacobian: Any, precision: Float[Array, " weights"]) -> Float[Array, "out out"]:
        """The covariance of the outputs, for weights with this precision along the eigenvectors."""

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
