"""Which axes of the arrays of a model share one order of hidden units."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.tree_util as jtu

from ..._caller import caller
from ..._check import check_positive_int, kind_text
from ..._ensemble import Ensemble

Where = Callable[[Any], Any]

Entry = Where | tuple[Where, int]
"""A function that selects a layer of a model; or a function that selects an array, and one of its axes."""


class Units(eqx.Module):
    """Hidden units that may be permuted: the layers that output them, and the layers that take them as input.

    Channels, attention heads and the entries of a residual stream are units too. Layers of Equinox are selected as in
    `equinox.tree_at`, for others arrays, each with its axis: `(lambda model: model.scale, 0)`.

    **Arguments:**

    - `outputs`: all layers that output these units or have one value per unit: the preceding layer, norms, depthwise
        convolutions; for a residual stream, every layer that adds to it.
    - `inputs`: all layers that take these units as input.
    - `size`: the number of units; by default that of the first entry of `outputs`. A smaller number permutes blocks,
        such as attention heads.

    ```python
    units = ee.methods.alignment.Units(
        outputs=[lambda model: model.conv, lambda model: model.norm],
        inputs=[lambda model: model.linear],
    )
    ```
    """

    outputs: tuple[Entry, ...]
    inputs: tuple[Entry, ...]
    size: int | None = eqx.field(static=True)

    def __init__(self, outputs: Sequence[Entry], inputs: Sequence[Entry] = (), *, size: int | None = None) -> None:
        self.outputs, self.inputs = tuple(outputs), tuple(inputs)
        self.size = None if size is None else check_positive_int(size, "size")


class Axis(NamedTuple):
    """An axis of an array with `repeat` entries per unit."""

    path: tuple
    axis: int
    repeat: int


class Group(NamedTuple):
    """Axes that share one order of `size` units, and the BatchNorms whose statistics share it."""

    name: str
    size: int
    axes: tuple[Axis, ...]
    batch_norms: tuple[eqx.nn.BatchNorm, ...]


class _Leaf(NamedTuple):
    path: tuple
    shape: tuple[int, ...]


def resolve(units: Sequence[Units], model: Any) -> list[Group]:
    """Resolves units to axes of the arrays of a model."""
    drawn = jtu.tree_map_with_path(lambda path, x: _Leaf(path, x.shape) if eqx.is_array(x) else x, model)
    return [_group(each, drawn, f"units[{i}]") for i, each in enumerate(units)]


def _group(units: Units, model: Any, name: str) -> Group:
    found, norms = [], []
    for axes_of, entries in ((_output_axes, units.outputs), (_input_axes, units.inputs)):
        for entry in entries:
            if isinstance(entry, tuple):
                leaf = entry[0](model)
                found.append((leaf, entry[1] % len(leaf.shape)))
                continue
            layer = entry(model)
            axes = axes_of(layer)
            if axes is None:
                raise TypeError(
                    f"`{caller()}` cannot infer the axes of {kind_text(layer)}, in `{name}`.\n"
                    "Select its arrays, each with its axis: `(lambda model: model.layer.weight, 0)`."
                )
            found += [(leaf, axis) for leaf, axis in axes if leaf is not None]
            norms += [layer] if isinstance(layer, eqx.nn.BatchNorm) else []
    size = units.size or (found[0][0].shape[found[0][1]] if found else norms[0].input_size)
    lengths = [leaf.shape[axis] for leaf, axis in found] + [norm.input_size for norm in norms]
    if any(length % size for length in lengths):
        raise ValueError(
            f"`{caller()}` needs axes with a whole number of entries for each of the {size} units in `{name}`, got "
            f"{lengths}.\nDo these layers share the units?"
        )
    axes = [Axis(leaf.path, axis, leaf.shape[axis] // size) for leaf, axis in found]
    return Group(name, size, tuple(dict.fromkeys(axes)), tuple(norms))


def _output_axes(layer: Any) -> list[tuple[Any, int]] | None:
    """Axes of the units that a layer outputs or scales; `None` for an unknown layer."""
    match layer:
        case eqx.nn.Linear() | eqx.nn.Conv() | eqx.nn.ConvTranspose():
            return [(layer.weight, 0), (layer.bias, 0)]
        case eqx.nn.LayerNorm() | eqx.nn.RMSNorm() | eqx.nn.GroupNorm() | eqx.nn.BatchNorm():
            return [(layer.weight, 0), (layer.bias, 0)]
        case eqx.nn.Embedding():
            return [(layer.weight, 1)]
        case eqx.nn.PReLU():
            return [(layer.negative_slope, 0)] if layer.negative_slope.shape else []
        case eqx.nn.MLP():
            return _output_axes(layer.layers[-1])
        case eqx.nn.MultiheadAttention():
            return _output_axes(layer.output_proj)
        case _:
            return None


def _input_axes(layer: Any) -> list[tuple[Any, int]] | None:
    """Axes of the input units of a layer; `None` for an unknown layer."""
    match layer:
        case eqx.nn.Linear() | eqx.nn.Conv() | eqx.nn.ConvTranspose():
            return [(layer.weight, 1)]
        case eqx.nn.MLP():
            return _input_axes(layer.layers[0])
        case eqx.nn.MultiheadAttention():
            return [(each.weight, 1) for each in (layer.query_proj, layer.key_proj, layer.value_proj)]
        case _:
            return None


_DENSE = (eqx.nn.Linear, eqx.nn.Conv, eqx.nn.ConvTranspose)
_NORMS = (eqx.nn.LayerNorm, eqx.nn.RMSNorm, eqx.nn.GroupNorm, eqx.nn.BatchNorm)
_KEEP_UNITS = (eqx.nn.Dropout, eqx.nn.Identity, eqx.nn.Lambda, eqx.nn.Pool, eqx.nn.AdaptivePool)
_SEARCHED = (eqx.nn.MLP, eqx.nn.MultiheadAttention, eqx.nn.Sequential)


def find_units(model: Any) -> list[Units]:
    """Finds the hidden units of each `equinox.nn.MLP` and `Sequential`, and the heads of each `MultiheadAttention`.

    Add others, such as residual streams: `find_units(model) + [Units(...)]`. An MLP with `scan=True` or a learnt
    activation, and inputs of grouped convolutions, are not found either.

    **Arguments:**

    - `model`: a model, or an [`eqx_ensemble.Ensemble`][].

    **Returns:** a list of [`eqx_ensemble.methods.alignment.Units`][].

    ```python
    model = eqx.nn.MLP(3, 1, 16, 2, key=key)
    len(ee.methods.alignment.find_units(model))  # 2, one for each hidden layer
    ```
    """
    model = model[0] if isinstance(model, Ensemble) else model
    found: list[Units] = []
    nodes, _ = jtu.tree_flatten_with_path(model, is_leaf=lambda x: isinstance(x, _SEARCHED))
    for path, node in nodes:
        if isinstance(node, _SEARCHED):
            layers = list(_chain(node, _at(path)))
            found += _between(layers)
            found += [_heads(layer, own) for layer, own in layers if isinstance(layer, eqx.nn.MultiheadAttention)]
    return found


def _at(path: tuple) -> Where:
    """The function that selects the node at a path."""

    def where(model: Any) -> Any:
        for key in path:
            if isinstance(key, jtu.GetAttrKey):
                model = getattr(model, key.name)
            else:
                model = model[key.idx if isinstance(key, jtu.SequenceKey) else key.key]
        return model

    return where


def _chain(node: Any, where: Where) -> Iterator[tuple[Any, Where]]:
    """The layers of nested sequences in order, each with a function that selects it."""
    if isinstance(node, eqx.nn.MLP):
        # With `scan` or a learnt activation, one array holds all hidden layers.
        if node.scan or any(eqx.is_array(x) for x in jax.tree.leaves(node.activation)):
            yield node, where
            return
        for i, layer in enumerate(node.layers):
            yield layer, lambda model, i=i: where(model).layers[i]
    elif isinstance(node, eqx.nn.Sequential):
        for i, layer in enumerate(node.layers):
            yield from _chain(layer, lambda model, i=i: where(model).layers[i])
    else:
        yield node, where


def _between(layers: list[tuple[Any, Where]]) -> list[Units]:
    """Units between consecutive dense layers. An unknown layer between two dense layers excludes their units."""
    found: list[Units] = []
    outputs: Sequence[Entry] = ()
    size = 0
    for layer, where in layers:
        if isinstance(layer, _DENSE) and getattr(layer, "groups", 1) == 1:
            if outputs and size > 1 and layer.weight.shape[1] % size == 0:
                found.append(Units(outputs, [where]))
            outputs, size = [where], layer.weight.shape[0]
        elif isinstance(layer, eqx.nn.Embedding):
            outputs, size = [where], layer.weight.shape[1]
        elif not outputs or isinstance(layer, _KEEP_UNITS):
            continue
        elif _is_depthwise(layer) or _is_plain_norm(layer, size):
            outputs = [*outputs, where]
        else:
            outputs, size = (), 0
    return found


def _is_depthwise(layer: Any) -> bool:
    return isinstance(layer, eqx.nn.Conv) and layer.groups == layer.in_channels == layer.out_channels


def _is_plain_norm(layer: Any, size: int) -> bool:
    """Whether a norm treats all its units in the same way."""
    return isinstance(layer, _NORMS) and (not isinstance(layer, eqx.nn.GroupNorm) or layer.groups in (1, size))


def _heads(layer: eqx.nn.MultiheadAttention, where: Where) -> Units:
    of = lambda name: lambda model: getattr(where(model), name)
    own = [of("query_proj"), of("key_proj"), of("value_proj")]
    return Units(own, [of("output_proj")], size=layer.num_heads)
