from collections.abc import Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .. import _axes, _check


def is_batches(data: Any) -> bool:
    """Whether `data` is an iterable of batches rather than a PyTree of arrays.

    A list of arrays is a PyTree; a list of anything else, such as `(x, y)` tuples, is a list of batches.
    """
    if isinstance(data, list):
        return bool(data) and not all(_axes.is_array(x) or isinstance(x, _axes.Each) for x in data)
    is_tree = _axes.is_array(data) or isinstance(data, tuple | dict | eqx.Module)
    return isinstance(data, Iterable) and not is_tree


def on_device(data: PyTree, num_members: int, *, argument: str, name: str) -> tuple[PyTree, int]:
    """A data set on the device, checked, and its number of rows.

    Arrays are `(rows, ...)`; those marked `Each` are `(members, rows, ...)`.
    """
    nodes, treedef = jax.tree.flatten(data, is_leaf=_axes.is_per_member)
    each = [(i, node.per_member()) for i, node in enumerate(nodes) if isinstance(node, _axes.Each)]
    marked = {i for i, _ in each}
    shared = jax.tree.unflatten(treedef, [None if i in marked else node for i, node in enumerate(nodes)])
    _check.numeric_data(data, argument=argument, name=name)
    for _, tree in each:
        _check.data_members(tree, num_members, argument=argument, name=name)
    rows = _check.rows_of_data(shared, [tree for _, tree in each], argument=argument, name=name)
    first = {i: _axes.Each(tree) for i, tree in each}
    nodes = [first.get(i, node) for i, node in enumerate(nodes)]
    return jax.tree.map(jnp.asarray, jax.tree.unflatten(treedef, nodes)), rows


def chosen_rows(rows: Any, num_members: int, num_rows: int, *, name: str) -> np.ndarray | None:
    """The members' own rows `(members, n)` of the data, as int32 on the host."""
    if rows is None:
        return None
    rows = np.asarray(rows.value if isinstance(rows, _axes.Each) else rows)
    _check.row_indices(rows, num_members, num_rows, name=name)
    return rows.astype(np.int32)
