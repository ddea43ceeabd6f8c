"""Linear layers and convolutions of a model: their selection, and layers that replace them."""

import abc
import collections
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from equinox import AbstractClassVar
from jaxtyping import Array

from .._caller import caller
from .._leaf_text import leaf_text
from .._leaves import is_member_array, kind_text
from .._pytree import PyTree
from ..train import Frozen

Layer = eqx.nn.Linear | eqx.nn.Conv

_TIED = eqx.nn.Shared | eqx.nn.WeightNorm | eqx.nn.SpectralNorm
_KNOWN = (eqx.nn.Linear, eqx.nn.Conv, eqx.nn.Conv1d, eqx.nn.Conv2d, eqx.nn.Conv3d)

_is_none = lambda x: x is None


class AbstractSubstitute(eqx.Module):
    """A layer in the place of another, written for one member of those that share the model.

    The fields in `own` have one value per member (of a joint ensemble, per sub-member); others are shared.
    """

    own: AbstractClassVar[tuple[str, ...]]

    @abc.abstractmethod
    def __call__(self, x: Any, *, key: Any = None) -> Array:
        """The output of one member for one input."""

    @abc.abstractmethod
    def dense(self, index: int) -> Any:
        """The equivalent ordinary layer of this member, whose position is `index`."""


def is_substitute(x: Any) -> bool:
    """Whether a node is a layer in the place of another."""
    return isinstance(x, AbstractSubstitute)


def own_flags(model: PyTree) -> PyTree:
    """For every leaf of a model with substitutes, whether it has one value per member."""

    def of_node(node: Any) -> Any:
        none = jax.tree.map(lambda _: False, node)
        if not is_substitute(node) or not node.own:
            return none
        fields = [name for name in node.own if getattr(node, name) is not None]
        own = [jax.tree.map(lambda _: True, getattr(node, name)) for name in fields]
        return eqx.tree_at(lambda x: [getattr(x, name) for name in fields], none, own)

    return jax.tree.map(of_node, model, is_leaf=is_substitute)


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


def check_module(model: Any) -> None:
    """Raises unless `model` is a Module that can be called."""
    if not isinstance(model, eqx.Module) or not callable(model):
        fix = "\nPass a model that it makes, `make(key)`." if callable(model) else ""
        raise TypeError(f"`{caller()}` needs an Equinox Module that can be called, got {kind_text(model)}.{fix}")


def check_layers(layers: list[Any], model: Any, *, least: int) -> None:
    """Raises unless linear layers or convolutions of one model are selected, each once, and none is tied."""
    fix = "`where` is a type such as `eqx.nn.Linear`, or a function such as `lambda model: model.layers[1:]`."
    if len(layers) < least:
        wanted = "a linear layer or convolution" if least == 1 else f"at least {least} linear layers or convolutions"
        raise ValueError(f"`{caller()}` needs {wanted}; {len(layers)} selected.\n{fix}")
    for layer in layers:
        if not isinstance(layer, Layer):
            raise TypeError(
                f"`{caller()}` needs `where` to select linear layers or convolutions, got {kind_text(layer)}.\n{fix}"
            )
        _check_weight(layer)
    times = collections.Counter(id(x) for x in jax.tree.leaves(model) if is_member_array(x))
    tied = any(times[id(layer.weight)] > 1 for layer in layers)
    for node in jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, _TIED)):
        inside = jax.tree.leaves(node, is_leaf=lambda x: isinstance(x, Layer)) if isinstance(node, _TIED) else []
        tied |= any(layer is x for x in inside for layer in layers) or isinstance(node, eqx.nn.Shared)
    if tied:
        raise ValueError(
            f"`{caller()}` needs layers whose weights are their own: weights that are tied, by `eqx.nn.Shared`, "
            "`WeightNorm`, `SpectralNorm` or one array in two places, cannot be converted.\n"
            "Select other layers by `where`, or a model without the tie."
        )
    if len(set(map(id, layers))) < len(layers):
        raise ValueError(f"`{caller()}` needs `where` to select each layer once.\n{fix}")


def _check_weight(layer: Any) -> None:
    """Raises unless a layer has the floating-point weight of one model."""
    weight, ndim = layer.weight, 2 if isinstance(layer, eqx.nn.Linear) else layer.num_spatial_dims + 2
    if not is_member_array(weight) or weight.ndim != ndim:
        got = leaf_text(weight) if is_member_array(weight) else kind_text(weight)
        raise ValueError(
            f"`{caller()}` needs the layers of ONE model; expected a weight of {ndim} axes, got {got}.\n"
            "Convert a model before stacking it: inside the function that `build` calls."
        )
    if not jnp.issubdtype(weight.dtype, jnp.floating):
        raise TypeError(f"`{caller()}` needs real floating-point weights, got {leaf_text(weight)}.")


def check_known(layers: list[Any]) -> None:
    """Raises for subclasses of linear layers and convolutions, which may compute something else."""
    for layer in layers:
        if type(layer) not in _KNOWN:
            raise TypeError(
                f"`{caller()}` supports `eqx.nn.Linear`, `eqx.nn.Conv` and `Conv1d` to `Conv3d`, not other subclasses; "
                f"got {kind_text(layer)}.\nSelect other layers by `where`."
            )


def check_groups(layer: Any) -> None:
    """Raises for a grouped convolution."""
    if isinstance(layer, eqx.nn.Conv) and layer.groups > 1:
        raise ValueError(
            f"`{caller()}` needs layers without groups, got `groups={layer.groups}`, which "
            "separate their channels.\nSelect other layers by `where`."
        )


Select = Callable[[Any], Any] | type | None
"""Nodes as in `equinox.tree_at`, all of a type, or all; of other Modules, the layers inside that are not frozen."""


def select_layers(model: Any, where: Select, *, least: int = 1) -> tuple[Callable[[Any], list[Any]], list[Any]]:
    """Returns a function that finds the layers in a tree, and the layers of the model in the order of its fields."""
    find = lambda tree: [layer for node in select_nodes(tree, where) for layer in _layers_of(node)]
    layers = find(model)
    check_layers(layers, model, least=least)
    return find, layers


def select_nodes(tree: Any, where: Select) -> list[Any]:
    """The nodes of a tree that `where` selects, in the order of its fields; by default, the tree."""
    if where is None:
        return [tree]
    if isinstance(where, type):
        nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, where | Frozen))
        return [x for x in nodes if isinstance(x, where)]
    return jax.tree.leaves(where(tree), is_leaf=lambda x: isinstance(x, eqx.Module))


def _layers_of(node: Any) -> list[Any]:
    """The layers inside a Module; anything else as it is."""
    if isinstance(node, Layer) or not isinstance(node, eqx.Module):
        return [node]
    inside = jax.tree.leaves(node, is_leaf=lambda x: isinstance(x, Layer | Frozen))
    return [x for x in inside if isinstance(x, Layer)]
