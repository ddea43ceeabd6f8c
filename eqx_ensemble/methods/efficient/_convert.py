from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax

from ..._check import check_optional_function
from ...train import Frozen
from ._check import check_layers
from ._layers import Layer

M = TypeVar("M")

Select = Callable[[Any], Any] | type | None
"""The layers to convert: nodes as in `equinox.tree_at`, all of a type, or all; the latter two skip frozen layers."""

_is_layer = lambda x: isinstance(x, Layer)


def select_layers(
    model: Any, where: Select, *, least: int = 1, name: str
) -> tuple[Callable[[Any], list[Any]], list[Any]]:
    """Returns a function that finds the layers in a tree, and the layers of the model in the order of its fields."""
    check_optional_function(where, "where", name=name, example="lambda model: model.layers[1:]")
    kind = where if isinstance(where, type) else Layer

    def find(tree: Any) -> list[Any]:
        if where is None or isinstance(where, type):
            nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Layer | Frozen))
            return [x for x in nodes if isinstance(x, Layer) and isinstance(x, kind)]
        return jax.tree.leaves(where(tree), is_leaf=lambda x: _is_layer(x) or isinstance(x, eqx.Module))

    layers = find(model)
    check_layers(layers, model, least=least, name=name)
    return find, layers


def replace_layers(model: M, find: Callable[[Any], list[Any]], layers: list[Any]) -> M:
    """Replaces the selected layers of a model."""
    return eqx.tree_at(find, model, layers)
