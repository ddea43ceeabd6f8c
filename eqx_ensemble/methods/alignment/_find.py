from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu

from ..._axes import is_array
from ._check import check_model
from ._layers import DENSE, NORMS, is_depthwise
from ._units import Entry, Heads, Units

_KEEP_UNITS = (eqx.nn.Dropout, eqx.nn.Identity, eqx.nn.Lambda, eqx.nn.Pool, eqx.nn.AdaptivePool)
_SEARCHED = (eqx.nn.MLP, eqx.nn.MultiheadAttention, eqx.nn.Sequential)

Where = Callable[[Any], Any]


def find_units(model: Any) -> list[Units | Heads]:
    """Finds the hidden units of a model between layers of known types.

    Found are the units between the layers of each `equinox.nn.MLP` and `equinox.nn.Sequential` anywhere in the model,
    and the heads of each `equinox.nn.MultiheadAttention`. Units between other layers and residual streams are not
    found: add them, as in `find_units(model) + [Units(...)]`. Also not found are the units of an MLP with `scan=True`
    or a learnt activation, and inputs of grouped convolutions and of layers of other types.

    **Arguments:**

    - `model`: a model, or an [`eqx_ensemble.Ensemble`][].

    **Returns:** a list of [`eqx_ensemble.methods.alignment.Units`][] and [`eqx_ensemble.methods.alignment.Heads`][],
    possibly empty.

    **Raises:** `TypeError` for anything else.

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
        elif is_depthwise(layer) or _is_plain_norm(layer, size):
            outputs = [*outputs, where]
        else:
            outputs, size = (), 0
    return found


def _is_plain_norm(layer: Any, size: int) -> bool:
    """Whether a norm treats all its units in the same way."""
    return isinstance(layer, NORMS) and (not isinstance(layer, eqx.nn.GroupNorm) or layer.groups in (1, size))


def _heads(layer: eqx.nn.MultiheadAttention, where: Where) -> Heads:
    of = lambda name: lambda model: getattr(where(model), name)
    qk = Units([of("query_proj"), of("key_proj")])
    return Heads(layer.num_heads, qk=qk, vo=Units([of("value_proj")], inputs=[of("output_proj")]))
