from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu

from ..._axes import is_array
from ..._check import check_positive_int
from ._check import check_conv_groups, check_entries, check_heads, check_model, check_norm_groups

# The axes of Equinox layers that correspond to output and input units.

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


Entry = Callable[[Any], Any] | tuple[Callable[[Any], Any], int]
"""A function that selects a layer of a model; or a function that selects an array, and one of its axes."""


class Units(eqx.Module):
    """Hidden units that may be permuted: the layers that output them, and the layers that take them as input.

    Channels and the entries of a residual stream are units too. Layers of Equinox are selected as in `equinox.tree_at`,
    for others arrays, each with its axis: `(lambda model: model.scale, 0)`.

    **Arguments:**

    - `outputs`: all layers that output these units or have one value per unit: the preceding layer, norms, depthwise
        convolutions; for a residual stream, every layer that adds to it.
    - `inputs`: all layers that take these units as input.
    - `size`: the number of units; by default that of the first entry of `outputs`. A smaller number permutes blocks.

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
        self.outputs = check_entries(outputs, "outputs")
        self.inputs = check_entries(inputs, "inputs")
        self.size = None if size is None else check_positive_int(size, "size")


class Heads(eqx.Module):
    """Attention heads that may be permuted as a whole, and the units inside each head.

    With rotary position embeddings, units inside a head cannot be permuted: use `Units(..., size=num_heads)`.

    **Arguments:**

    - `num_heads`: the number of heads. Axes must be ordered by head.
    - `qk`: the [`eqx_ensemble.methods.alignment.Units`][] of queries and keys, which share one order.
    - `vo`: the units of the values, which are inputs of the layer after the heads.

    ```python
    alignment = ee.methods.alignment
    heads = alignment.Heads(
        4,
        qk=alignment.Units([lambda m: m.query, lambda m: m.key]),
        vo=alignment.Units([lambda m: m.value], inputs=[lambda m: m.output]),
    )
    ```
    """

    num_heads: int = eqx.field(static=True)
    qk: Units
    vo: Units

    def __init__(self, num_heads: int, *, qk: Units, vo: Units) -> None:
        self.num_heads = check_positive_int(num_heads, "num_heads")
        check_heads(qk, vo, Units)
        self.qk = qk
        self.vo = vo


_KEEP_UNITS = (eqx.nn.Dropout, eqx.nn.Identity, eqx.nn.Lambda, eqx.nn.Pool, eqx.nn.AdaptivePool)
_SEARCHED = (eqx.nn.MLP, eqx.nn.MultiheadAttention, eqx.nn.Sequential)

Where = Callable[[Any], Any]


def find_units(model: Any) -> list[Units | Heads]:
    """Finds the hidden units of each `equinox.nn.MLP` and `Sequential`, and the heads of each `MultiheadAttention`.

    Add others, such as residual streams: `find_units(model) + [Units(...)]`. An MLP with `scan=True` or a learnt
    activation, and inputs of grouped convolutions, are not found either.

    **Arguments:**

    - `model`: a model, or an [`eqx_ensemble.Ensemble`][].

    **Returns:** a list of [`eqx_ensemble.methods.alignment.Units`][] and [`eqx_ensemble.methods.alignment.Heads`][].

    ```python
    model = eqx.nn.MLP(3, 1, 16, 2, key=key)
    len(ee.methods.alignment.find_units(model))  # 2, one for each hidden layer
    ```
    """
    model = check_model(model)
    found: list[Units | Heads] = []
    nodes, _ = jtu.tree_flatten_with_path(model, is_leaf=lambda x: isinstance(x, _SEARCHED))
    for path, node in nodes:
        where = _at(path)
        if isinstance(node, eqx.nn.MultiheadAttention):
            found.append(_heads(node, where))
        elif isinstance(node, _SEARCHED):
            layers = list(_chain(node, where))
            found += _between(layers)
            found += [_heads(layer, where) for layer, where in layers if isinstance(layer, eqx.nn.MultiheadAttention)]
    return found


def _at(path: tuple) -> Where:
    """The function that selects the node at a path."""

    def where(model: Any) -> Any:
        for key in path:
            model = getattr(model, key.name) if isinstance(key, jtu.GetAttrKey) else _item(model, key)
        return model

    return where


def _item(node: Any, key: Any) -> Any:
    if isinstance(key, jtu.SequenceKey):
        return node[key.idx]
    if isinstance(key, jtu.DictKey):
        return node[key.key]
    return jax.tree.leaves(node, is_leaf=lambda x: x is not node)[key.key]


def _chain(node: Any, where: Where) -> Iterator[tuple[Any, Where]]:
    """The layers of nested sequences in order, each with a function that selects it."""
    if isinstance(node, eqx.nn.MLP):
        # With `scan` or a learnt activation, one array holds all hidden layers.
        if node.scan or any(is_array(x) for x in jax.tree.leaves(node.activation)):
            yield node, where
            return
        for i, layer in enumerate(node.layers):
            yield layer, lambda model, i=i: where(model).layers[i]
    elif isinstance(node, eqx.nn.Sequential):
        for i, layer in enumerate(node.layers):
            yield from _chain(layer, lambda model, i=i: where(model).layers[i])
    else:
        yield node, where


def _between(layers: list[tuple[Any, Where]]) -> list[Units | Heads]:
    """Units between consecutive dense layers. An unknown layer between two dense layers excludes their units."""
    found: list[Units | Heads] = []
    outputs: Sequence[Entry] = ()
    size = 0
    for layer, where in layers:
        if isinstance(layer, DENSE) and getattr(layer, "groups", 1) == 1:
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
    return isinstance(layer, NORMS) and (not isinstance(layer, eqx.nn.GroupNorm) or layer.groups in (1, size))


def _heads(layer: eqx.nn.MultiheadAttention, where: Where) -> Heads:
    of = lambda name: lambda model: getattr(where(model), name)
    qk = Units([of("query_proj"), of("key_proj")])
    return Heads(layer.num_heads, qk=qk, vo=Units([of("value_proj")], inputs=[of("output_proj")]))
