from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu
from jaxtyping import AbstractArray

from .._check import path_text
from .._leaf_text import leaf_text

_WRITE = 'Write `Stacked[Model, "members"]`: the type of one member, then the names of the leading axes.'
_MOST = 4


def check_stacked_arguments(item: Any) -> tuple[Any, str]:
    """Raises unless `item` is the type and the axes of `Stacked[type, axes]`. Returns them."""
    if not isinstance(item, tuple) or len(item) != 2:
        raise TypeError(f"`Stacked` takes two arguments, got {leaf_text(item)}.\n{_WRITE}")
    model, axes = item
    if not isinstance(axes, str):
        raise TypeError(f"`Stacked` needs its axes as a string, got {axes!r}.\n{_WRITE}")
    names = axes.split()
    if not names:
        raise ValueError(f"`Stacked` needs at least one axis, got {axes!r}.\n{_WRITE}")
    for name in names:
        if name == "..." or name.lstrip("#?_").startswith("*"):
            raise ValueError(f"`Stacked` needs a fixed number of leading axes, got {name!r} in {axes!r}.\n{_WRITE}")
    return model, " ".join(names)


def check_member_type(is_a: Callable[[Any, Any], bool], model: Any) -> None:
    """Raises unless `is_a`, an extended `isinstance`, can check the member's type."""
    if isinstance(model, type) and issubclass(model, AbstractArray):
        raise TypeError(
            "`Stacked` is the type of a Module whose arrays are stacked, got an array type.\n"
            'Put the axis into the shape of the array instead: `Float[Array, "members features"]`.'
        )
    try:
        is_a(None, model)
    except TypeError as error:
        fix = "\nFor a class that does not exist yet, put the whole annotation in quotes." * isinstance(model, str)
        raise TypeError(
            f"`Stacked` needs the type of one member (a class, a runtime-checkable protocol, a union of these), got "
            f"{model!r}: {error}.{fix}"
        ) from error


def use_message() -> str:
    """The message for `Stacked` without arguments, or for making an instance."""
    return f"`Stacked` is for annotations and `isinstance`, always with its two arguments.\n{_WRITE}"


def not_stacked_message(tree: Any, num_axes: int, carries: Callable[[Any], bool]) -> str:
    """The reason why the arrays of a tree have no common leading axes."""
    leaves = [(path_text(path), leaf) for path, leaf in jtu.tree_flatten_with_path(tree)[0] if carries(leaf)]
    if not leaves:
        return f"this `{type(tree).__name__}` has no array leaf that could carry an axis"
    axes = "the leading axis" if num_axes == 1 else f"the {num_axes} leading axes"
    first: dict[tuple, str] = {}
    for path, leaf in leaves:
        first.setdefault(leaf.shape[:num_axes], f"{leaf_text(leaf)} at `{path}`")
    return f"its arrays have no common size of {axes}: {', '.join(list(first.values())[:_MOST])}"
