import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..._pytree import PyTree

Call = Callable[[PyTree], Float[Array, " out"]]
"""The flattened outputs of a model for one row."""


class Factors(NamedTuple):
    """The Jacobian of a linear layer's weights for one row: the outer product of two factors.

    `outputs` `(out, units)` is the derivative of the model's outputs with respect to those of the layer, `inputs`
    `(inputs,)` the input of the layer, with a one appended if it has a bias.
    """

    outputs: Float[Array, "out units"]
    inputs: Float[Array, " inputs"]


class AbstractSelection(eqx.Module):
    """The selected weights of one member, as one vector."""

    @abc.abstractmethod
    def vector(self, model: PyTree) -> Float[Array, " weights"]:
        """The values of the weights, at least float32."""

    @abc.abstractmethod
    def insert(self, model: PyTree, vector: Float[Array, " weights"]) -> PyTree:
        """Replaces the values in the model, cast to its dtypes."""

    @abc.abstractmethod
    def linearise(self, call: Call, model: PyTree, num_outputs: int) -> tuple[Float[Array, " out"], Any]:
        """The outputs for one row, and their Jacobian with respect to the vector."""


class Leaves(AbstractSelection):
    """All entries of some leaves, or those at `indices` of their concatenation."""

    positions: tuple[int, ...] = eqx.field(static=True)
    indices: Int[Array, " weights"] | None

    def vector(self, model: PyTree) -> Float[Array, " weights"]:
        """The leaves as one vector."""
        flat = self._flat(model)
        return flat if self.indices is None else flat[self.indices]

    def insert(self, model: PyTree, vector: Float[Array, " weights"]) -> PyTree:
        """Replaces the leaves in the model."""
        flat = vector if self.indices is None else self._flat(model).at[self.indices].set(vector)
        leaves, treedef = jax.tree.flatten(model)
        start = 0
        for position in self.positions:
            old = jnp.asarray(leaves[position])
            leaves[position] = flat[start : start + old.size].reshape(old.shape).astype(old.dtype)
            start += old.size
        return jax.tree.unflatten(treedef, leaves)

    def linearise(
        self, call: Call, model: PyTree, num_outputs: int
    ) -> tuple[Float[Array, " out"], Float[Array, "out weights"]]:
        """The full Jacobian, by reverse mode, or by forward mode if weights are fewer than outputs."""
        vector = self.vector(model)
        outputs = lambda vector: call(self.insert(model, vector)).astype(vector.dtype)
        if vector.size < num_outputs:
            found, push = jax.linearize(outputs, vector)
            return found, jax.vmap(push, out_axes=1)(jnp.eye(vector.size, dtype=vector.dtype))
        found, pull = jax.vjp(outputs, vector)
        return found, jax.vmap(pull)(jnp.eye(num_outputs, dtype=vector.dtype))[0]

    def _flat(self, model: PyTree) -> Float[Array, " entries"]:
        leaves = jax.tree.leaves(model)
        own = [jnp.asarray(leaves[position]) for position in self.positions]
        dtype = widest(own)
        return jnp.concatenate([leaf.astype(dtype).ravel() for leaf in own])


class Layer(AbstractSelection):
    """The weights of one linear layer, with the bias as an additional column."""

    position: int = eqx.field(static=True)

    def vector(self, model: PyTree) -> Float[Array, " weights"]:
        """The matrix `(units, inputs)`, row by row, with the bias as its last column."""
        layer = self._find(model)
        dtype = widest([x for x in (layer.weight, layer.bias) if x is not None])
        columns = [layer.weight.astype(dtype)]
        if layer.bias is not None:
            columns.append(layer.bias.astype(dtype).reshape(-1, 1))
        return jnp.concatenate(columns, axis=1).ravel()

    def insert(self, model: PyTree, vector: Float[Array, " weights"]) -> PyTree:
        """Replaces matrix and bias in the model."""
        layer = self._find(model)
        units, inputs = layer.weight.shape
        matrix = vector.reshape(units, -1)
        weight = matrix[:, :inputs].astype(layer.weight.dtype)
        bias = None if layer.bias is None else matrix[:, inputs].reshape(layer.bias.shape).astype(layer.bias.dtype)
        return self._put(model, weight, bias)

    def linearise(self, call: Call, model: PyTree, num_outputs: int) -> tuple[Float[Array, " out"], Factors]:
        """Computes the factors by two perturbations, without forming the full Jacobian.

        The derivative with respect to an offset of the layer's outputs is the first factor. Adding `ratio k'` to the
        matrix changes the layer's outputs by `ratio` times the inner product of `k` and the inputs, so the derivative
        with respect to `k` at 0 is the inputs times a known number.
        """
        layer = self._find(model)
        dtype, (units, inputs) = self.vector(model).dtype, layer.weight.shape
        ratio = jnp.asarray(np.cos(np.arange(units)), dtype)  # not constant, since models may ignore a common shift

        def outputs(offset: Array, direction: Array) -> Array:
            weight = layer.weight + jnp.outer(ratio, direction).astype(layer.weight.dtype)
            shape = () if layer.out_features == "scalar" else (units,)
            bias = offset.reshape(shape).astype(layer.weight.dtype)
            bias = bias if layer.bias is None else layer.bias + bias.astype(layer.bias.dtype)
            return call(self._put(model, weight, bias)).astype(dtype)

        found, pull = jax.vjp(outputs, jnp.zeros(units, dtype), jnp.zeros(inputs, dtype))
        of_outputs = jax.vmap(lambda row: pull(row)[0])(jnp.eye(num_outputs, dtype=dtype))
        along = of_outputs @ ratio
        square = along @ along
        received = pull(along)[1] / jnp.where(square > 0, square, 1)
        if layer.bias is not None:
            received = jnp.append(received, jnp.ones((), dtype))
        return found, Factors(of_outputs, received)

    def _find(self, model: PyTree) -> eqx.nn.Linear:
        return jax.tree.leaves(model, is_leaf=is_linear)[self.position]

    def _put(self, model: PyTree, weight: Array, bias: Array | None) -> PyTree:
        nodes, treedef = jax.tree.flatten(model, is_leaf=is_linear)
        get = lambda layer: (layer.weight, layer.bias)
        nodes[self.position] = eqx.tree_at(get, nodes[self.position], (weight, bias), is_leaf=lambda x: x is None)
        return jax.tree.unflatten(treedef, nodes)


def is_linear(node: Any) -> bool:
    """Whether a node is a linear layer."""
    return isinstance(node, eqx.nn.Linear)


def widest(leaves: list[Any]) -> jnp.dtype:
    """The dtype to compute in: float64 if any leaf is, else float32."""
    return jnp.dtype(jnp.float64 if any(leaf.dtype == jnp.float64 for leaf in leaves) else jnp.float32)


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
