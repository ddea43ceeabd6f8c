from collections import Counter
from collections.abc import Iterable, Mapping, Set
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._caller import caller
from .._check import MemberMismatchError
from .._foreign import from_foreign
from .._leaf_text import leaf_text
from .._leaves import is_member_array, is_traced, path_text
from ._statics import static_parts


def check_no_tracers(made: Any) -> None:
    """Raises if a function or a static field made by a constructor holds a tracer.

    Such an array belongs to one member but is not an output of `jax.vmap`: its use raises an error much later.
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(made)
    if any(is_traced(leaf) for _, leaf in paths):
        return  # inside another transformation, whose tracers are legitimate
    seen: set[int] = set()
    for path, leaf in paths:
        if not eqx.is_array_like(leaf):
            _search(leaf, jax.tree_util.keystr(path), seen)
    for node in jax.tree.leaves(made, is_leaf=lambda x: isinstance(x, eqx.Module)):
        if isinstance(node, eqx.Module):
            _search(node, type(node).__name__, seen)


def _search(value: Any, path: str, seen: set[int]) -> None:
    if is_traced(value):
        raise MemberMismatchError(
            f"`{caller()}` found an array of one member at `{path}`, where it cannot carry the members axis: a "
            "function closes over it, or a static field holds it.\nMake the array a field of a Module."
        )
    if id(value) in seen or eqx.is_array_like(value):
        return
    seen.add(id(value))
    for part, child in (static_parts(value) or {}).items():
        _search(child, f"{path}, {part if isinstance(part, str) else part[0]}", seen)


_MOST_LINES = 8
_NO_AXIS = "A tree that was never stacked has no `members` axis: stack a list of members first."


def check_leading_axes(tree: Any, num_axes: int = 1) -> tuple[int, ...]:
    """The sizes of the first `num_axes` axes, on which all array leaves of `tree` must agree.

    **Raises:** `ValueError` if there is no array leaf, a leaf without so many axes, or an axis of size 0;
    `MemberMismatchError` if the leaves disagree.
    """
    keyed = jtu.tree_flatten_with_path(tree)[0]
    arrays = [(path_text(path), leaf) for path, leaf in keyed if is_member_array(leaf)]
    axis = "leading `members` axis" if num_axes == 1 else f"{num_axes} leading axes"
    if not arrays:
        raise ValueError(
            f"`{caller()}` needs a stacked tree; this `{type(tree).__name__}` has no array leaf.\n{_NO_AXIS}"
        )
    flat = [f"  at `{path}`: {leaf_text(leaf)}" for path, leaf in arrays if leaf.ndim < num_axes]
    if flat:
        lines = [f"`{caller()}` needs array leaves with the {axis}; some have too few axes.", *_trim(flat), _NO_AXIS]
        raise MemberMismatchError("\n".join(lines))
    sizes = Counter(leaf.shape[:num_axes] for _, leaf in arrays)
    common = sizes.most_common(1)[0][0]
    if len(sizes) > 1:
        expected = common[0] if num_axes == 1 else common
        wrong = [(path, leaf) for path, leaf in arrays if leaf.shape[:num_axes] != common]
        lines = [
            f"`{caller()}` needs array leaves that agree on the {axis}; {sizes[common]} of {len(arrays)} have "
            f"{expected}."
        ]
        lines += _trim([f"  at `{path}`: expected {expected}, got {leaf_text(leaf)}" for path, leaf in wrong])
        raise MemberMismatchError("\n".join([*lines, _NO_AXIS]))
    if 0 in common:
        raise ValueError(f"`{caller()}` needs at least one member; the {axis} of `{arrays[0][0]}` is empty.")
    return common


def _trim(lines: list[str]) -> list[str]:
    more = len(lines) - _MOST_LINES
    return lines if more <= 0 else [*lines[:_MOST_LINES], f"  and {more} more"]


def check_index(index: Any, num_members: int) -> Any:
    """Checks an index of members on the host: JAX would clamp it silently.

    **Returns:** a Python int >= 0 for one member; a NumPy array of ints >= 0 for a selection (slice, list, integer
    array or boolean mask); a traced integer index unchanged.
    """
    own: Any = from_foreign(index, "index")
    if isinstance(own, list | tuple) and any(map(is_traced, own)):
        own = jnp.stack(list(map(jnp.asarray, own)))
    if is_traced(own):
        if np.ndim(own) > 1 or not jnp.issubdtype(jnp.result_type(own), jnp.integer):
            got = f"got {leaf_text(own)}: a mask selects a number of members unknown to jit"
            raise TypeError(f"`{caller()}`: expected traced integers, {got}.")
        return own
    own = np.asarray(own) if isinstance(own, jax.Array | list | tuple) else own
    own = own.astype(int) if isinstance(own, np.ndarray) and own.size == 0 else own
    try:
        rows = np.arange(num_members)[own]
    except (IndexError, TypeError) as error:
        kind = type(error)
        raise kind(f"`{caller()}`: {error}.\n{_INDEX}") from None
    if rows.ndim > 1 or own is ...:
        raise TypeError(f"`{caller()}`: got the index {leaf_text(own)}.\n{_INDEX}")
    if rows.size == 0:
        raise ValueError(f"`{caller()}`: the index selects no member; an ensemble needs at least one.")
    return int(rows) if rows.ndim == 0 else rows.astype(np.int32)


_INDEX = "Use the position of a member, such as `0`, a slice, or a list or array of one axis of positions or of bools."


def check_distinct(rows: np.ndarray) -> None:
    """Raises for a repeated member, for which the result would depend on the order of writes."""
    values, counts = np.unique(rows, return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"`{caller()}`: member {values[counts > 1][0]} is given twice; each member once at most.")


def check_trees(trees: Any, *, noun: str = "tree") -> list:
    """Raises `TypeError` for a single tree, `ValueError` for an empty sequence. Returns the trees as a list."""
    single = isinstance(trees, (eqx.Module, Mapping, Set, str, bytes)) or is_member_array(trees)
    single = single or (isinstance(trees, tuple) and type(trees) is not tuple)  # a namedtuple is one tree
    if single or not isinstance(trees, Iterable):
        raise TypeError(
            f"`{caller()}` needs a sequence of {noun}s (a list, tuple or iterator), got one `{type(trees).__name__}`.\n"
            f"Put the {noun}s in a list, one per member; a {noun} that is already stacked needs no stacking."
        )
    listed = list(trees)
    if not listed:
        raise ValueError(f"`{caller()}` needs at least one {noun}, got an empty sequence.")
    return listed
