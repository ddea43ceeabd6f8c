import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.tree_util as jtu

from .._check import is_member_array, path_text
from ._manifest import TABLE
from ._static_text import static_text

STATIC = ": "
"""The separator between the path of a node and the name of one of its static fields."""


def saved_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree in order, with distinct paths."""
    taken = {TABLE: 0}
    leaves = []
    for keys, leaf in jtu.tree_flatten_with_path(tree)[0]:
        path = path_text(keys)
        number = taken[path] = taken.get(path, -1) + 1  # a custom node may give two children the same name
        leaves.append((path if number == 0 else f"{path}#{number}", leaf))
    return leaves


def is_array_like(leaf: Any) -> bool:
    """Whether a leaf is an array or the shape of one."""
    return is_member_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def is_number(leaf: Any) -> bool:
    """Whether a leaf is saved as a Python number."""
    return type(leaf) in (bool, int, float, complex)


def structure(tree: Any) -> dict[str, str]:
    """Everything in a tree except its arrays and numbers, as readable text by path.

    These are the types of nodes with their static fields, and leaves that are neither arrays nor numbers, each as
    [`static_text`][eqx_ensemble.checkpoint._static_text.static_text].
    """
    return dict(_visit((), tree))


def _visit(path: tuple, node: Any) -> Iterator[tuple[str, str]]:
    keyed, _ = jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    if len(keyed) == 1 and keyed[0][0] == ():
        if not (is_array_like(node) or is_number(node)):
            yield path_text(path), static_text(node)
        return
    where = path_text(path)
    yield where, "None" if node is None else type(node).__name__
    if dataclasses.is_dataclass(node):
        for field in dataclasses.fields(node):
            if field.metadata.get("static", False):
                yield f"{where}{STATIC}{field.name}", static_text(getattr(node, field.name, None))
    for keys, child in keyed:
        yield from _visit(path + keys, child)


def unlike(saved: dict[str, str], expected: dict[str, str]) -> list[str]:
    """The paths at which two structures differ.

    Static fields that only one of them has are ignored, because versions of a class differ by them.
    """
    paths = [*saved, *(path for path in expected if path not in saved)]
    differ = [path for path in paths if saved.get(path) != expected.get(path)]
    return [path for path in differ if (path in saved and path in expected) or STATIC not in path]
