from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu

from .. import _check


def map_columns(fn: Callable[[list], Any], columns: _check.Columns) -> Any:
    """One tree from many: `fn` of the leaves at each path. Places tied in every tree get one result, and stay tied."""
    done: dict[tuple, Any] = {}
    results = []
    for leaves in columns.leaves:
        key = tuple(id(leaf) for leaf in leaves)
        if key not in done:
            done[key] = fn(leaves)
        results.append(done[key])
    return jtu.tree_unflatten(columns.treedef, results)
