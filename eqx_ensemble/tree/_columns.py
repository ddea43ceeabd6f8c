from collections.abc import Callable
from typing import Any, NamedTuple

import jax.tree_util as jtu


class Columns(NamedTuple):
    """The leaves of all trees for each path, and the structure of the first tree."""

    paths: list[str]
    leaves: list[list]
    treedef: Any


def map_columns(fn: Callable[[list], Any], columns: Columns) -> Any:
    """One tree from many: `fn` of the leaves at each path. Leaves tied in every tree get one result, and stay tied."""
    done: dict[tuple, Any] = {}
    results = []
    for leaves in columns.leaves:
        key = tuple(id(leaf) for leaf in leaves)
        if key not in done:
            done[key] = fn(leaves)
        results.append(done[key])
    return jtu.tree_unflatten(columns.treedef, results)
