from typing import Any, ClassVar

import equinox as eqx
import jax
from jaxtyping import Array

from ._layers import AbstractJointLayer, redraw, with_weights

AXIS = "submembers"
"""The named axis over which sub-members are mapped; layers of a joint forward pass communicate over it."""


class JoinInputs(AbstractJointLayer):
    """A first layer that takes the concatenated inputs of all sub-members."""

    own: ClassVar[tuple[str, ...]] = ()
    layer: Any
    num_submembers: int = eqx.field(static=True)
    size: Any = eqx.field(static=True)

    def __call__(self, x: Any, *, key: Any = None) -> Array:
        """The output, which is the same for all sub-members, so that the following layers are computed once."""
        together = jax.lax.all_gather(x, AXIS)
        return self.layer(together.reshape((-1, *x.shape[1:])))

    def dense(self, index: int) -> Any:
        """The layer for equal inputs: its weight is summed over the parts."""
        weight = self.layer.weight
        parts = weight.reshape((weight.shape[0], self.num_submembers, -1, *weight.shape[2:]))
        layer = redraw(self.layer, jax.random.key(0), in_size=self.size)
        return with_weights(layer, parts.sum(axis=1), self.layer.bias)


class SelectOutput(AbstractJointLayer):
    """A last layer whose output has one part per sub-member."""

    own: ClassVar[tuple[str, ...]] = ()
    layer: Any
    num_submembers: int = eqx.field(static=True)
    size: Any = eqx.field(static=True)

    def __call__(self, x: Any, *, key: Any = None) -> Array:
        """The output of this sub-member."""
        y = self.layer(x)
        parts = y.reshape((self.num_submembers, *(() if self.size == "scalar" else (self.size,)), *y.shape[1:]))
        return parts[jax.lax.axis_index(AXIS)]

    def dense(self, index: int) -> Any:
        """The layer with the weight of this sub-member."""
        part = lambda x: x.reshape((self.num_submembers, -1, *x.shape[1:]))[index]
        layer = redraw(self.layer, jax.random.key(0), out_size=self.size)
        return with_weights(layer, part(self.layer.weight), None if self.layer.bias is None else part(self.layer.bias))
