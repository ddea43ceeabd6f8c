import abc
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from equinox import AbstractClassVar
from jaxtyping import Array

Layer = eqx.nn.Linear | eqx.nn.Conv

_is_none = lambda x: x is None


class AbstractJointLayer(eqx.Module):
    """A layer of a joint ensemble, written for one sub-member: the fields in `own` are those of this sub-member."""

    own: AbstractClassVar[tuple[str, ...]]

    @abc.abstractmethod
    def __call__(self, x: Any, *, key: Any = None) -> Array:
        """The output of one sub-member for one input."""

    @abc.abstractmethod
    def dense(self, index: int) -> Any:
        """The ordinary layer that computes the same for sub-member `index`, which this layer is."""


class RankOne(AbstractJointLayer):
    """A layer whose weight is multiplied by a rank-one matrix of the sub-member's own; the bias is its own, too."""

    own: ClassVar[tuple[str, ...]] = ("in_factors", "out_factors", "bias")
    layer: Any
    in_factors: Any
    out_factors: Any
    bias: Any

    def __call__(self, x: Any, *, key: Any = None) -> Array:
        """The product with the shared weight is one for all sub-members: no weight is ever multiplied out."""
        y = without_bias(self.layer)(x * self.in_factors) * self.out_factors
        return y if self.bias is None else y + self.bias.reshape(self.out_factors.shape)

    def dense(self, index: int) -> Any:
        """The layer with the weight multiplied out."""
        weight = self.layer.weight
        rows = self.out_factors.reshape((weight.shape[0],) + (1,) * (weight.ndim - 1))
        weight = weight * input_columns(self.layer, self.in_factors) * rows
        return with_weights(self.layer, weight, self.bias)


class Own(AbstractJointLayer):
    """A layer of which every sub-member has its own."""

    own: ClassVar[tuple[str, ...]] = ("layer",)
    layer: Any

    def __call__(self, x: Any, *, key: Any = None) -> Array:
        """The layer's output."""
        return self.layer(x)

    def dense(self, index: int) -> Any:
        """The layer itself."""
        return self.layer


class MaskInputs(AbstractJointLayer):
    """A layer that sees some of its input features, which are fixed for each sub-member."""

    own: ClassVar[tuple[str, ...]] = ("mask",)
    layer: Any
    mask: Any

    def __call__(self, x: Any, *, key: Any = None) -> Array:
        """The output for the features that are kept; nothing is rescaled."""
        return self.layer(jnp.where(self.mask, x, jnp.zeros((), x.dtype)))

    def dense(self, index: int) -> Any:
        """The layer with weights of zero for the other features."""
        weight = self.layer.weight
        weight = jnp.where(input_columns(self.layer, self.mask), weight, jnp.zeros((), weight.dtype))
        return with_weights(self.layer, weight, self.layer.bias)


def without_bias(layer: Any) -> Any:
    """A layer whose bias was taken out, ready to be called: convolutions add one whenever they were made with it."""
    adds_zero = isinstance(layer, eqx.nn.Conv) and layer.use_bias
    return eqx.tree_at(lambda x: x.bias, layer, 0.0, is_leaf=_is_none) if adds_zero else layer


def with_weights(layer: Any, weight: Array, bias: Array | None) -> Any:
    """A layer with another weight and bias, `None` for none."""
    return eqx.tree_at(lambda x: (x.weight, x.bias), layer, (weight, bias), is_leaf=_is_none)


def input_shape(layer: Layer) -> tuple[int, ...]:
    """The shape of one value for each input feature or channel, as it is multiplied with the layer's input."""
    if isinstance(layer, eqx.nn.Linear):
        return () if layer.in_features == "scalar" else (layer.in_features,)
    return (layer.in_channels,) + (1,) * layer.num_spatial_dims


def output_shape(layer: Layer) -> tuple[int, ...]:
    """The same for the output."""
    if isinstance(layer, eqx.nn.Linear):
        return () if layer.out_features == "scalar" else (layer.out_features,)
    return (layer.out_channels,) + (1,) * layer.num_spatial_dims


def input_columns(layer: Layer, values: Array) -> Array:
    """One value for each input channel `values`, as it is multiplied with the weight: each group has its channels."""
    weight = layer.weight
    groups = layer.groups if isinstance(layer, eqx.nn.Conv) else 1
    columns = jnp.repeat(values.reshape((groups, -1)), weight.shape[0] // groups, axis=0)
    return columns.reshape(columns.shape + (1,) * (weight.ndim - 2))


def redraw(layer: Layer, key: Any, *, in_size: Any = None, out_size: Any = None, groups: int = 1) -> Layer:
    """A new layer of the same kind with fresh weights, of other sizes if given, in `groups` times as many groups."""
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
