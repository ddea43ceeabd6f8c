from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from .._code import code_of

ProgramKey = tuple[Any, ...]


def program_key(tree: Any) -> ProgramKey:
    """What distinguishes compiled programs beside the structure and the constants of their arguments.

    Constants are leaves other than arrays, and static fields. They are compared by Python's `==`, by which `4` and
    `4.0`, or `0.0` and `-0.0`, are equal; and functions and classes that are the same may have been edited since.
    """
    leaves, treedef = jax.tree.flatten(tree)
    classes: dict[type, None] = {}
    static = list(_static_values(treedef, classes))
    functions = [x for x in leaves if callable(x)] + [x for x in static if not isinstance(x, _NUMBERS)]
    numbers = enumerate(x for x in static if isinstance(x, _NUMBERS))
    return (*leaf_kinds(leaves), *((i, type(x), repr(x)) for i, x in numbers), code_of([*classes, *functions]))


def leaf_kinds(leaves: list[Any]) -> ProgramKey:
    """The positions, types and texts of the numbers among leaves."""
    return tuple(
        (i, type(x), repr(x))
        for i, x in enumerate(leaves)
        if isinstance(x, _NUMBERS) and not isinstance(x, np.generic)  # NumPy's are array leaves
    )


_NUMBERS = (int, float, complex)


def _static_values(treedef: Any, classes: dict[type, None]) -> Iterator[Any]:
    """The static values in a structure; the classes of its nodes are added to `classes`."""
    node = treedef.node_data()
    if node is not None:
        classes[node[0]] = None
        yield from _values(node[1])
        for child in treedef.children():
            yield from _static_values(child, classes)


def _values(value: Any) -> Iterator[Any]:
    """A static value, or those inside of tuples and lists."""
    if isinstance(value, tuple | list):
        for x in value:
            yield from _values(x)
    elif value is not None and not isinstance(value, str):
        yield value
