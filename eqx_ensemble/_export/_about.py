from collections.abc import Iterator
from typing import Any

import jax.tree_util as jtu
from jax.export import Exported

from .._ensemble import Ensemble
from .._pytree import PyTree
from ..checkpoint._snapshot import versions


def about(program: Exported, ensemble: Ensemble[Any], *, symbolic_members: bool) -> dict[str, Any]:
    """The description of a program, for JSON."""
    (*leaves, x), _ = program.in_tree.unflatten(program.in_avals)
    return {
        "members": "any number" if symbolic_members else ensemble.num_members,
        "ids": ensemble.ids.tolist(),
        "inputs": describe_arrays(x, "x"),
        "outputs": describe_arrays(program.out_tree.unflatten(program.out_avals), "out"),
        "leaves": [entry for part in leaves for entry in describe_arrays(part)],
        "platforms": list(program.platforms),
        "calling_convention_version": program.calling_convention_version,
        "versions": versions(),
    }


def describe_arrays(tree: PyTree, root: str = "") -> list[dict[str, Any]]:
    """Name, dtype and shape of every array of a tree; symbolic sizes by their names."""
    return list(_entries(tree, root))


def _entries(tree: PyTree, root: str) -> Iterator[dict[str, Any]]:
    for path, aval in jtu.tree_flatten_with_path(tree)[0]:
        inside = jtu.keystr(path, simple=True, separator=".")
        shape = [size if isinstance(size, int) else str(size) for size in aval.shape]
        yield {"name": ".".join(filter(None, (root, inside))), "dtype": str(aval.dtype), "shape": shape}
