import abc
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from equinox import AbstractClassVar
from jaxtyping import Array

Layer = eqx.nn.Linear | eqx.nn.Conv

_is_none = lambda x: x is None


class AbstractJointLayer(eqx.Module):
    """A layer of a joint ensemble, written for one sub-member; the fields in `own` have one value per sub-member."""

    own: AbstractClassVar[tuple[str, ...]]

    @abc.abstractmethod
    def __call__(self, x: Any, *, key: Any = None) -> Array:
        """The output of one sub-member for one input."""

    @abc.abstractmethod
    def dense(self, index: int) -> Any:
        """The equivalent ordinary layer of this sub-member, whose position is `index`."""


class RankOne(AbstractJointLayer):
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


class Own(AbstractJointLayer):
    """A separate layer for each sub-member."""

    own: ClassVar[tuple[str, ...]] = ("layer",)
    layer: Any

    def __call__(self, x: Any, *, key: Any = None) -> Array:
        """The layer's output."""
        return self.layer(x)

    def dense(self, index: int) -> Any:
        """The layer itself."""
        return self.layer


class MaskInputs(AbstractJointLayer):
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


def without_bias(layer: Any) -> Any:
    """Makes a layer without its bias callable: a convolution with `use_bias` adds its bias unconditionally."""
    adds_zero = isinstance(layer, eqx.nn.Conv) and layer.use_bias
    return eqx.tree_at(lambda x: x.bias, layer, 0.0, is_leaf=_is_none) if adds_zero else layer


def with_weights(layer: Any, weight: Array, bias: Array | None) -> Any:
    """Replaces the weight and bias of a layer; `None` removes the bias."""
    return eqx.tree_at(lambda x: (x.weight, x.bias), layer, (weight, bias), is_leaf=_is_none)


def input_shape(layer: Layer) -> tuple[int, ...]:
    """The shape of one value per input feature or channel that broadcasts against the input of a layer."""
    if isinstance(layer, eqx.nn.Linear):
        return () if layer.in_features == "scalar" else (layer.in_features,)
    return (layer.in_channels,) + (1,) * layer.num_spatial_dims


def output_shape(layer: Layer) -> tuple[int, ...]:
    """The shape of one value per output feature or channel that broadcasts against the output of a layer."""
    if isinstance(layer, eqx.nn.Linear):
        return () if layer.out_features == "scalar" else (layer.out_features,)
    return (layer.out_channels,) + (1,) * layer.num_spatial_dims


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
