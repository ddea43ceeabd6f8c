from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._layers import AbstractConvertedLayer, output_shape, with_weights, without_bias


class LowRank(AbstractConvertedLayer):
    """A frozen layer plus a product of two small matrices: `W x + scale * up (down x)`.

    `kept` is the mask of the columns within a member's own rank; `None` if all members have one rank.
    """

    own: ClassVar[tuple[str, ...]] = ("down", "up", "kept", "scale")
    layer: Any
    bias: Any
    down: Any
    up: Any
    kept: Any
    scale: Any

    def __call__(self, x: Any, *, key: Any = None) -> Array:
        """The output in the dtype of the frozen layer; the matrices are multiplied in theirs."""
        y = multiply(self.layer, x)
        x = x.astype(self.down.dtype)
        if isinstance(self.layer, eqx.nn.Linear):
            hidden = self.down @ jnp.atleast_1d(x)
        else:
            hidden = without_bias(with_weights(self.layer, self.down, None))(x)
        return add_bias(y + self.change(hidden).reshape(y.shape).astype(y.dtype), self.bias)

    def change(self, hidden: Array) -> Array:
        """The scaled product of `up` and `hidden`, whose leading axis is the rank."""
        if self.kept is not None:
            hidden = hidden * align(self.kept, hidden.ndim).astype(hidden.dtype)
        return jnp.asarray(self.scale).astype(hidden.dtype) * jnp.tensordot(self.up, hidden, axes=1)

    def dense(self, index: int) -> Any:
        """The layer with the product added to its weight."""
        weight = self.layer.weight
        return with_weights(self.layer, weight + self.change(self.down).astype(weight.dtype), self.bias)


class Scale(AbstractConvertedLayer):
    """A frozen layer whose outputs, features or channels, are multiplied by factors."""

    own: ClassVar[tuple[str, ...]] = ("factors",)
    layer: Any
    bias: Any
    factors: Any

    def __call__(self, x: Any, *, key: Any = None) -> Array:
        """The scaled output in the dtype of the frozen layer."""
        y = add_bias(multiply(self.layer, x), self.bias)
        return (y.astype(self.factors.dtype) * self.factors.reshape(output_shape(self.layer))).astype(y.dtype)

    def dense(self, index: int) -> Any:
        """The layer with scaled weight and bias."""

        def scale(x: Any) -> Any:
            return None if x is None else (align(self.factors, x.ndim) * x.astype(self.factors.dtype)).astype(x.dtype)

        return with_weights(self.layer, scale(self.layer.weight), scale(self.bias))


def align(x: Array, ndim: int) -> Array:
    """One value per feature or channel, to broadcast along the leading axis of an array of `ndim` axes."""
    return x.reshape(x.shape[:1] + (1,) * (ndim - 1))


# Under `vmap` over members, a shared matrix times one vector per member is one matrix product. XLA for CPUs merges the
# transposition that follows into the product, and then computes it up to five times slower; the barrier prevents this.
# With it, `W` is read once for all members: 16 members take 1.6 times one, for one row and a width of 1024.
def multiply(layer: Any, x: Any) -> Array:
    """The output of a layer without a bias, as an array of its own."""
    return jax.lax.optimization_barrier(without_bias(layer)(x))


def add_bias(y: Array, bias: Any) -> Array:
    """Adds the bias of a layer, if any, to an output of it."""
    return y if bias is None else y + bias.reshape(y.shape if y.ndim < 2 else bias.shape)
