from typing import Any

import equinox as eqx
import jax

from .._check import MemberMismatchError, is_traced
from ._statics import static_parts


def check_no_tracers(made: Any, *, name: str) -> None:
    """Raises if a function or a static field made by a constructor holds a tracer.

    Such an array belongs to one member but is not an output of `jax.vmap`: its use raises an error much later.
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(made)
    if any(is_traced(leaf) for _, leaf in paths):
        return  # inside another transformation, whose tracers are legitimate
    seen: set[int] = set()
    for path, leaf in paths:
        if not eqx.is_array_like(leaf):
            _search(leaf, jax.tree_util.keystr(path), name, seen)
    for node in jax.tree.leaves(made, is_leaf=lambda x: isinstance(x, eqx.Module)):
        if isinstance(node, eqx.Module):
            _search(node, type(node).__name__, name, seen)


def _search(value: Any, path: str, name: str, seen: set[int]) -> None:
    if is_traced(value):
        raise MemberMismatchError(
            f"`{name}` found an array of one member at `{path}`, where it cannot carry the members axis: a "
            "function closes over it, or a static field holds it.\nMake the array a field of a Module."
        )
    if id(value) in seen or eqx.is_array_like(value):
        return
    seen.add(id(value))
    for part, child in (static_parts(value) or {}).items():
        _search(child, f"{path}, {part if isinstance(part, str) else part[0]}", name, seen)
