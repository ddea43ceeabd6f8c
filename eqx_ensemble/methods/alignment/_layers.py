"""The axes of Equinox layers that correspond to output and input units."""

from typing import Any

import equinox as eqx

from ._check import check_conv_groups, check_norm_groups

Named = tuple[Any, int]
"""A leaf and one of its axes."""

DENSE = (eqx.nn.Linear, eqx.nn.Conv, eqx.nn.ConvTranspose)
NORMS = (eqx.nn.LayerNorm, eqx.nn.RMSNorm, eqx.nn.GroupNorm, eqx.nn.BatchNorm)


def output_axes(layer: Any) -> list[Named] | None:
    """Axes of the units that a layer outputs or scales; `None` for an unknown layer."""
    match layer:
        case eqx.nn.Linear() | eqx.nn.Conv() | eqx.nn.ConvTranspose():
            check_conv_groups(layer, "outputs")
            found = [(layer.weight, 0), (layer.bias, 0)]
        case eqx.nn.LayerNorm() | eqx.nn.RMSNorm() | eqx.nn.GroupNorm() | eqx.nn.BatchNorm():
            check_norm_groups(layer)
            found = [(layer.weight, 0), (layer.bias, 0)]
        case eqx.nn.Embedding():
            found = [(layer.weight, 1)]
        case eqx.nn.PReLU():
            found = [(layer.negative_slope, 0)] if layer.negative_slope.shape else []
        case eqx.nn.MLP():
            return output_axes(layer.layers[-1])
        case eqx.nn.MultiheadAttention():
            return output_axes(layer.output_proj)
        case _:
            return None
    return [(leaf, axis) for leaf, axis in found if leaf is not None]


def input_axes(layer: Any) -> list[Named] | None:
    """Axes of the input units of a layer; `None` for an unknown layer."""
    match layer:
        case eqx.nn.Linear() | eqx.nn.Conv() | eqx.nn.ConvTranspose():
            check_conv_groups(layer, "inputs")
            return [(layer.weight, 1)]
        case eqx.nn.MLP():
            return input_axes(layer.layers[0])
        case eqx.nn.MultiheadAttention():
            return [(each.weight, 1) for each in (layer.query_proj, layer.key_proj, layer.value_proj)]
        case _:
            return None


def is_depthwise(layer: Any) -> bool:
    """Whether each output channel of a convolution depends on its own input channel only."""
    return isinstance(layer, eqx.nn.Conv) and layer.groups == layer.in_channels == layer.out_channels
