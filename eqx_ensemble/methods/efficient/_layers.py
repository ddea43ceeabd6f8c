"""Layers of sub-members, in the place of ordinary ones."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from ..._keys import own_key
from .._layers import AbstractSubstitute, Layer, with_weights, without_bias

AXIS = "submembers"
"""The named axis over which sub-members are mapped; layers of a joint forward pass communicate over it."""


class RankOne(AbstractSubstitute):
    """A layer whose shared weight is multiplied by a rank-one matrix per sub-member, with one bias per sub-member."""

    own: ClassVar[tuple[str, ...]] = ("in_factors", "out_factors", "bias")
    layer: Any
    in_factors: Any
    out_factors: Any
    bias: Any

    def __call__(self, x: Any, *, key: Any = None) -> Array:
        """Scales inputs and outputs, so that the weights of a sub-member are not materialised."""
        y = without_bias(self.layer)(x * self.in_factors) * self.out_factors
        return y if self.bias is None else y + self.bias.reshape(self.out_factors.shape)

    def dense(self, index: int) -> Any:
        """The layer with the materialised weight."""
        weight = self.layer.weight
        rows = self.out_factors.reshape((weight.shape[0],) + (1,) * (weight.ndim - 1))
        weight = weight * input_columns(self.layer, self.in_factors) * rows
        return with_weights(self.layer, weight, self.bias)


class Own(AbstractSubstitute):
    """A separate layer for each sub-member."""

    own: ClassVar[tuple[str, ...]] = ("layer",)
    layer: Any

    def __call__(self, x: Any, *, key: Any = None) -> Array:
        """The layer's output."""
        return self.layer(x)

    def dense(self, index: int) -> Any:
        """The layer itself."""
        return self.layer


class MaskInputs(AbstractSubstitute):
    """A layer with a fixed mask of its input features for each sub-member."""

    own: ClassVar[tuple[str, ...]] = ("mask",)
    layer: Any
    mask: Any

    def __call__(self, x: Any, *, key: Any = None) -> Array:
        """The output for the unmasked features, without rescaling."""
        return self.layer(jnp.where(self.mask, x, jnp.zeros((), x.dtype)))

    def dense(self, index: int) -> Any:
        """The layer with zero weights for the masked features."""
        weight = self.layer.weight
        weight = jnp.where(input_columns(self.layer, self.mask), weight, jnp.zeros((), weight.dtype))
        return with_weights(self.layer, weight, self.layer.bias)


class GroupedLinear(AbstractSubstitute):
    """A grouped linear layer, with a block-diagonal weight."""

    own: ClassVar[tuple[str, ...]] = ("weight", "bias")
    weight: Any
    bias: Any

    def __call__(self, x: Any, *, key: Any = None) -> Array:
        """The concatenated outputs of all groups."""
        y = jnp.einsum("goi,gi->go", self.weight, x.reshape((self.weight.shape[0], -1))).reshape(-1)
        return y if self.bias is None else y + self.bias

    def dense(self, index: int) -> Any:
        """The layer with the full block-diagonal weight."""
        weight = jax.scipy.linalg.block_diag(*self.weight)
        use_bias = self.bias is not None
        layer = eqx.nn.Linear(weight.shape[1], weight.shape[0], use_bias, weight.dtype, key=own_key())
        return with_weights(layer, weight, self.bias)


class JoinInputs(AbstractSubstitute):
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
        layer = redraw(self.layer, own_key(), in_size=self.size)
        return with_weights(layer, parts.sum(axis=1), self.layer.bias)


class SelectOutput(AbstractSubstitute):
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
        layer = redraw(self.layer, own_key(), out_size=self.size)
        return with_weights(layer, part(self.layer.weight), None if self.layer.bias is None else part(self.layer.bias))


def input_columns(layer: Layer, values: Array) -> Array:
    """Reshapes one value per input channel to broadcast against the weight of a layer, group by group."""
    weight = layer.weight
    groups = layer.groups if isinstance(layer, eqx.nn.Conv) else 1
    columns = jnp.repeat(values.reshape((groups, -1)), weight.shape[0] // groups, axis=0)
    return columns.reshape(columns.shape + (1,) * (weight.ndim - 2))


def redraw(layer: Layer, key: Any, *, in_size: Any = None, out_size: Any = None, groups: int = 1) -> Layer:
    """A new layer of the same type with new random weights, other sizes if given, and `groups` times as many groups."""
    options: dict[str, Any] = {"use_bias": layer.use_bias, "dtype": layer.weight.dtype, "key": key}
    if isinstance(layer, eqx.nn.Linear):
        size = lambda new, old: old if new is None else new
        return eqx.nn.Linear(size(in_size, layer.in_features), size(out_size, layer.out_features), **options)
    kind: Any = type(layer)
    return kind(
        *((layer.num_spatial_dims,) if kind is eqx.nn.Conv else ()),
        in_size or layer.in_channels,
        out_size or layer.out_channels,
        layer.kernel_size,
        layer.stride,
        layer.padding,
        layer.dilation,
        layer.groups * groups,
        padding_mode=layer.padding_mode,
        **options,
    )
