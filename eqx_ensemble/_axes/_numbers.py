from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

Kinds = tuple[tuple[int, type, str], ...]
"""The positions, types and texts of the numbers in a tree."""


def number_kinds(tree: Any) -> Kinds:
    """Distinguishes constants that are equal by Python's `==`: `4` and `4.0`, `0.0` and `-0.0`.

    Compiled programs are cached by the structure and constants of their arguments, compared by `==`; these kinds
    complete the cache key. Constants are leaves other than arrays, and static fields.
    """
    leaves, treedef = jax.tree.flatten(tree)
    return (*leaf_kinds(leaves), *((i, type(x), repr(x)) for i, x in enumerate(_static_numbers(treedef))))


def leaf_kinds(leaves: list[Any]) -> Kinds:
    """`number_kinds` of leaves alone, which takes a fraction of the time."""
    return tuple(
        (i, type(x), repr(x))
        for i, x in enumerate(leaves)
        if isinstance(x, int | float | complex) and not isinstance(x, np.generic)  # NumPy's are array leaves
    )


def _static_numbers(treedef: Any) -> Iterator[Any]:
    node = treedef.node_data()
    if node is not None:
        yield from _numbers(node[1])
        for child in treedef.children():
            yield from _static_numbers(child)


def _numbers(value: Any) -> Iterator[Any]:
    """The numbers in a static value, also inside tuples and lists."""
    if isinstance(value, int | float | complex):
        yield value
    elif isinstance(value, tuple | list):
        for x in value:
            yield from _numbers(x)
