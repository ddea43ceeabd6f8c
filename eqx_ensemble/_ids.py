"""The ids of members in the structure of a tree, where no operation on arrays can change them.

`jax.grad`, `jax.tree.map` and optimisers treat all arrays of a tree as weights. Ids whose values are known are
therefore no leaves; only ids that are traced are an array like any other.
"""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ._check import is_traced

Path = tuple[Any, ...]


@jtu.register_static
class Ids:
    """Known ids `(members,)`, a node without leaves. The hash is computed once: every call hashes structures."""

    __slots__ = ("__weakref__", "_array", "_hash", "values")

    def __init__(self, values: Any) -> None:
        self.values = np.array(values, np.int32)
        self.values.flags.writeable = False
        self._hash = hash((self.values.shape, self.values.tobytes()))
        is_free = isinstance(values, jax.Array) and not values.committed and values.dtype == np.int32
        self._array: jax.Array | None = values if is_free else None

    @property
    def array(self) -> jax.Array:
        """The ids as an array of JAX, with known values also inside of `jax.jit`, which is bound to no device."""
        if self._array is None or self._array.is_deleted():  # as by a donation
            with jax.ensure_compile_time_eval():
                self._array = jnp.asarray(self.values)
        return self._array

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Ids) and self._hash == other._hash and np.array_equal(self.values, other.values)

    def __reduce__(self) -> Any:
        return Ids, (self.values,)

    def __repr__(self) -> str:
        return f"Ids({np.array2string(self.values, separator=', ', threshold=16)})"


class IdsField:
    """The field `ids` of a Module: it holds `Ids` or an array, and its value is an array.

    By default the Module holds one model of all members, in the fields `stacked` and `shared`.
    """

    def __init__(self, *, of_model: bool = True) -> None:
        self.of_model = of_model

    def __get__(self, module: Any, owner: Any = None) -> Any:
        if module is None or "ids" not in vars(module):
            raise AttributeError("ids")  # of the class: the field has no default
        ids = vars(module)["ids"]
        return ids.array if isinstance(ids, Ids) else ids

    def __set__(self, module: Any, value: Any) -> None:
        vars(module)["ids"] = value


def has_ids(node: Any) -> bool:
    """Whether a node is a Module with ids of one model, such as an ensemble."""
    field = _field(type(node))
    return field is not None and field.of_model


@ft.lru_cache(maxsize=512)
def _field(cls: type) -> IdsField | None:
    found = (vars(base).get("ids") for base in cls.__mro__)
    return next((x for x in found if isinstance(x, IdsField)), None)


def stored_ids(node: Any) -> Any:
    """What such a Module holds: `Ids`, an array, or what another function of leaves has put there."""
    return vars(node)["ids"]


def as_known(ids: Any) -> Any:
    """Ids as `Ids` if they are a vector of integers and this process knows their values, else as they are."""
    is_known = _is_readable(ids) and ids.ndim == 1 and jnp.issubdtype(ids.dtype, jnp.integer)
    return Ids(ids) if is_known else ids


def _is_readable(ids: Any) -> bool:
    if not isinstance(ids, jax.Array) or is_traced(ids):
        return isinstance(ids, np.ndarray)
    return not ids.is_deleted() and (ids.is_fully_addressable or ids.is_fully_replicated)


def _replace(node: Any, ids: Any) -> Any:
    """The same Module, not checked, with other ids."""
    if ids is stored_ids(node):
        return node
    keyed, treedef = _fields(node)
    return jtu.tree_unflatten(treedef, [ids if key[0].name == "ids" else x for key, x in keyed])


def _fields(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
    return jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)


def holds_ids(node: Any) -> bool:
    """Whether a node is a Module with ids, of a model or of something else, such as a training state."""
    return _field(type(node)) is not None


def _is_state(node: Any) -> bool:
    return holds_ids(node) and not has_ids(node)


def _map_states(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Replaces the ids of training states by `fn(ids)`."""
    if not _are_inside(jax.tree.structure(tree)):
        return tree
    return jax.tree.map(lambda x: _replace(x, fn(stored_ids(x))) if _is_state(x) else x, tree, is_leaf=_is_state)


def open_ids(tree: Any) -> Any:
    """A Module with its own known ids, not those of Modules inside it, as an array leaf; other trees as they are."""
    if not holds_ids(tree) or not isinstance(stored_ids(tree), Ids):
        return tree
    return _replace(tree, stored_ids(tree).array)


def map_modules(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Replaces the outermost Modules with ids by `fn(module)`; a tree without any stays the same object."""
    if not modules_in(tree):
        return tree
    return jax.tree.map(lambda x: fn(x) if has_ids(x) else x, tree, is_leaf=has_ids)


def modules_in(tree: Any) -> list[Any]:
    """The outermost Modules with ids."""
    if not _are_inside(jax.tree.structure(tree)):  # of nearly all models, and much faster
        return []
    return [x for x in jax.tree.leaves(tree, is_leaf=has_ids) if has_ids(x)]


def _are_inside(treedef: Any) -> bool:
    try:
        return _are_in_structure(treedef)
    except Exception:  # static fields that cannot be hashed or compared
        return True


@ft.lru_cache(maxsize=64)  # entries may hold ids
def _are_in_structure(treedef: Any) -> bool:
    node = treedef.node_data()
    return node is not None and (_field(node[0]) is not None or any(map(_are_inside, treedef.children())))


def open_own(tree: Any, flags: Any, ids: Any) -> tuple[Any, Any]:
    """A tree and flags of its leaves, with the ids of Modules as leaves where they are `ids`."""
    is_own = lambda node: Ids(ids) == stored_ids(node)
    tree = map_modules(lambda x: open_ids(x) if is_own(x) else x, tree)
    return tree, map_modules(lambda x: _replace(x, ids=True) if is_own(x) else x, flags)


def open_stacked(tree: Any) -> Any:
    """A tree whose arrays are `(members, ...)`, with all ids as leaves; `close_all` reverses it.

    Ids of which there is another number than members are those of Modules within each member, and stay.
    """
    if not modules_in(tree):
        return tree
    shapes = {np.shape(x)[:1] for x in jax.tree.leaves(tree) if isinstance(x, jax.Array | np.ndarray)}
    is_own = lambda node: isinstance(ids := stored_ids(node), Ids) and shapes <= {ids.values.shape}
    return map_modules(lambda node: open_all(node) if is_own(node) else node, tree)


# Ids of Modules within the members of others, as leaves, have the axes of these too. They are in the stacked part of a
# member; known ids are in both parts, which are trees of one structure.


def open_all(tree: Any, is_saved: Callable[[Path], bool] = lambda _: True, axes: tuple[int, ...] = ()) -> Any:
    """A tree with all known ids as leaves, with `axes` and the axes of the Modules around them in front.

    Only where `is_saved` of the path; not in Modules without ids.
    """
    return _open_all(_map_states(lambda ids: ids.array if isinstance(ids, Ids) else ids, tree), is_saved, axes, ())


def _open_all(tree: Any, is_saved: Callable[[Path], bool], axes: tuple[int, ...], start: Path) -> Any:
    def open_one(path: Path, node: Any) -> Any:
        if not has_ids(node):
            return node
        path, ids = (*start, *path), stored_ids(node)
        if isinstance(ids, Ids) and is_saved((*path, jtu.GetAttrKey("ids"))):
            ids = np.broadcast_to(ids.values, (*axes, *ids.values.shape))
        if not isinstance(ids, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            return node
        stacked = lambda key, x: _open_all(x, is_saved, ids.shape, (*path, *key))
        return _map_fields(_replace(node, ids), stacked, lambda _, x: without_ids(x))

    return jtu.tree_map_with_path(open_one, tree, is_leaf=has_ids) if modules_in(tree) else tree


def without_ids(tree: Any) -> Any:
    """A tree with `None` in the place of all known ids."""

    def remove(node: Any) -> Any:
        node = _replace(node, None) if isinstance(stored_ids(node), Ids) else node
        return _map_fields(node, lambda _, x: without_ids(x), lambda _, x: without_ids(x))

    return map_modules(remove, tree)


def _map_fields(node: Any, stacked: Callable[[Path, Any], Any], shared: Callable[[Path, Any], Any]) -> Any:
    fns = {"stacked": stacked, "shared": shared}
    keyed, treedef = _fields(node)
    return jtu.tree_unflatten(treedef, [fns[key[0].name](key, x) if key[0].name in fns else x for key, x in keyed])


def close_all(tree: Any) -> Any:
    """A tree with all ids known that can be; those within members if they are equal in all members."""
    tree = _map_states(as_known, tree)
    return map_modules(lambda node: _close_parts([_replace(node, as_known(stored_ids(node)))])[0], tree)


def close_inner(*parts: Any) -> list[Any]:
    """The stacked and the shared part of a model with the ids of Modules inside it known in both, as in `close_all`."""
    if not modules_in(parts[0]):  # as in nearly all models
        return list(parts)
    groups = [_close_group(group) for group in zip(*map(modules_in, parts), strict=True)]
    columns = [iter(column) for column in zip(*groups, strict=True)]
    return [map_modules(lambda _, left=left: next(left), part) for left, part in zip(columns, parts, strict=True)]


def _close_group(nodes: Sequence[Any]) -> list[Any]:
    """The parts of one Module."""
    held = [stored_ids(node) for node in nodes]
    leaf = next((x for x in held if x is not None and not isinstance(x, Ids)), None)
    known = next((x for x in held if isinstance(x, Ids)), None) if leaf is None else _of_all(leaf)
    if isinstance(known, Ids):
        ids = [known] * len(held)
    else:
        ids = [None if isinstance(x, Ids) else jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in held]
    return _close_parts([_replace(node, x) for node, x in zip(nodes, ids, strict=True)])


def _close_parts(nodes: Sequence[Any]) -> list[Any]:
    left = iter(close_inner(*(x for node in nodes for x in (node.stacked, node.shared))))
    return [_map_fields(node, lambda *_: next(left), lambda *_: next(left)) for node in nodes]


def _of_all(ids: Any) -> Any:
    """Ids `(..., inner)` as those of each member, if they are known and equal in all members."""
    if not _is_readable(ids) or ids.ndim < 2:
        return as_known(ids)
    rows = np.asarray(ids).reshape(-1, ids.shape[-1])
    return as_known(rows[0]) if (rows == rows[0]).all() else ids
