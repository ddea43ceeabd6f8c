from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar, overload

import jax
import jax.tree_util as jtu
import numpy as np

from .. import _check, _leaves
from ._check import check_index, check_leading_axes


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


T = TypeVar("T")

# Compiled once per leaf shape, with the index as an argument: an index that is a constant, as in `jnp.unstack`, makes
# XLA compile a program per member.
_member = jax.jit(lambda leaf, index: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False))
_members = jax.jit(lambda leaf, rows: leaf.at[rows].get(mode="clip"))


def num_members(tree: Any) -> int:
    """The number of members of a stacked tree: the size of the leading axis, on which all array leaves must agree.

    **Arguments:**

    - `tree`: a stacked PyTree, each of its arrays of shape `(members, ...)`.

    **Returns:** the number of members, a Python int, also under `jax.jit`.

    **Raises:** `MemberMismatchError` if array leaves disagree or have no axis; `ValueError` if there is no array leaf
    or no member.

    ```python
    ee.tree.num_members({"w": jnp.ones((5, 3)), "b": jnp.ones(5)})  # 5
    ```
    """
    return check_leading_axes(tree)[0]


@overload
def unstack(tree: T) -> list[T]: ...


@overload
def unstack(tree: T, *, num_axes: Literal[1]) -> list[T]: ...


@overload
def unstack(tree: Any, *, num_axes: int) -> list[Any]: ...


def unstack(tree: Any, *, num_axes: int = 1) -> list[Any]:
    """Splits a stacked tree into its members.

    Member `i` has `leaf[i]` for each array leaf; other leaves are shared. NumPy arrays stay NumPy arrays (views).

    **Arguments:**

    - `tree`: a stacked PyTree, each of its arrays of shape `(members, ...)`.
    - `num_axes`: the number of leading axes to split: 2 for members within populations, for example.

    **Returns:** a list of trees, one per member; for several axes, nested lists.

    **Raises:** `MemberMismatchError` if array leaves disagree on the leading axes; `ValueError` if there is no array
    leaf.

    ```python
    first, second = ee.tree.unstack({"w": jnp.ones((2, 3)), "name": "net"})
    first["w"].shape  # (3,)
    ```
    """
    num_axes = _check.check_positive_int(num_axes, "num_axes")
    sizes = check_leading_axes(tree, num_axes)
    leaves, treedef = jtu.tree_flatten(tree)
    return _unstack(leaves, treedef, sizes)


def _unstack(leaves: list, treedef: Any, sizes: tuple[int, ...]) -> list:
    rows: dict[int, list] = {}  # by identity of the leaf: tied leaves stay tied in every member
    for leaf in leaves:
        if id(leaf) not in rows:
            is_array = _leaves.is_member_array(leaf)
            rows[id(leaf)] = [_take_one(leaf, i) if is_array else leaf for i in range(sizes[0])]
    members = [[rows[id(leaf)][i] for leaf in leaves] for i in range(sizes[0])]
    if len(sizes) > 1:
        return [_unstack(member, treedef, sizes[1:]) for member in members]
    return [jtu.tree_unflatten(treedef, member) for member in members]


def take(tree: T, index: Any) -> T:
    """Takes one or several members of a stacked tree.

    For an int, the member without the axis: `leaf[index]` for every array leaf. For `k` members, a smaller stacked tree
    with arrays `(k, ...)`, in the given order. Other leaves are kept.

    **Arguments:**

    - `tree`: a stacked PyTree, each of its arrays of shape `(members, ...)`.
    - `index`: an int, or a slice, list, tuple or one-dimensional array of ints, or a boolean mask `(members,)`. Traced
        integers are clamped to the range.

    **Returns:** a member, or a stacked tree.

    **Raises:** `IndexError` or `TypeError` for any other index; `ValueError` for an empty selection;
    `MemberMismatchError` if array leaves disagree on the number of members.

    ```python
    stacked = {"w": jnp.arange(6.0).reshape(3, 2)}
    ee.tree.take(stacked, -1)  # {"w": [4., 5.]}
    ee.tree.take(stacked, [2, 0])  # {"w": [[4., 5.], [0., 1.]]}
    ```
    """
    rows = check_index(index, check_leading_axes(tree)[0])
    pick = _take_one if np.ndim(rows) == 0 else _take_many
    return _map_tied(lambda leaf: pick(leaf, rows), tree)


def _take_one(leaf: Any, index: Any) -> Any:
    if isinstance(leaf, np.ndarray) and isinstance(index, int):
        return leaf[index]
    return _member(leaf, index)


def _take_many(leaf: Any, rows: Any) -> Any:
    if isinstance(leaf, np.ndarray) and isinstance(rows, np.ndarray):
        return leaf[rows]
    return _members(leaf, rows)


def _map_tied(fn: Callable[[Any], Any], tree: T) -> T:
    """Maps over the array leaves; an array that occurs twice is mapped once, so that tied leaves stay tied."""
    leaves, treedef = jtu.tree_flatten(tree)
    done = {id(leaf): fn(leaf) if _leaves.is_member_array(leaf) else leaf for leaf in leaves}
    return jtu.tree_unflatten(treedef, [done[id(leaf)] for leaf in leaves])
