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
