from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

Kinds = tuple[tuple[int, type, str], ...]
"""Where the numbers of a tree are, with their types and texts."""


def number_kinds(tree: Any) -> Kinds:
    """What tells the constants of two trees apart that Python's `==` does not: `4` and `4.0`, `0.0` and `-0.0`.

    A compiled program is found by its arguments' structure and constants, compared by `==`; it needs these in addition.
    Constants are leaves that are no arrays, and static fields.
    """
    leaves, treedef = jax.tree.flatten(tree)
    return (*leaf_kinds(leaves), *((i, type(x), repr(x)) for i, x in enumerate(_static_numbers(treedef))))


def leaf_kinds(leaves: list[Any]) -> Kinds:
    """`number_kinds` of leaves alone, which takes a fraction of the time."""
    return tuple(
        (i, type(x), repr(x))
        for i, x in enumerate(leaves)
        if isinstance(x, int | float | complex) and not isinstance(x, np.generic)  # which are arrays, as leaves
    )


def _static_numbers(treedef: Any) -> Iterator[Any]:
    node = treedef.node_data()
    if node is not None:
        yield from _numbers(node[1])
        for child in treedef.children():
            yield from _static_numbers(child)


def _numbers(value: Any) -> Iterator[Any]:
    """The numbers in a value of a node, or of a static field."""
    if isinstance(value, int | float | complex):
        yield value
    elif isinstance(value, tuple | list):
        for x in value:
            yield from _numbers(x)
