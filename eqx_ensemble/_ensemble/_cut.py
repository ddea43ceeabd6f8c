import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .. import _axes, _keys
from .. import tree as _tree
from .._caller import caller
from .._check import MemberMismatchError, array_leaves, is_key, is_member_array, is_traced
from .._ids import Ids, as_known, close_all, open_all, without_ids
from .._pytree import PyTree
from ..tree._engine import CONCATENATE_RULES, Rules, check_index, compare_trees, map_columns, take_leaves
from ._ensemble import Ensemble, check_index_of_members

# Members of anything: ensembles, states, runs, and trees in which some nodes hold one value per member.

T = TypeVar("T")

_FIX = "Only what one call could have made is concatenated: the same options, and as many steps."
_FIXES: dict[str, str] = dict.fromkeys(("structure", "shape", "dtype", "hidden", "float", "static"), _FIX)
_OF_ENSEMBLES = CONCATENATE_RULES._replace(needs="ensembles of the same kind of member", noun="ensemble")
_OF_OTHERS = Rules(needs="members that share the same", noun="number", fixes=_FIXES)


_OUTSIDE = "Leave it out of `shared` if it differs between members."


def check_equal_shared(trees: Sequence[Any], fix: str = _OUTSIDE) -> None:
    """Raises unless the shared arrays of all trees are equal."""
    first = dict(array_leaves(trees[0]))
    for i, tree in enumerate(trees[1:], start=1):
        for path, x in array_leaves(tree):
            y = first.get(path)
            if x is y or is_traced(x) or is_traced(y):
                continue
            if y is None or not _same_array(x, y):
                values = "" if y is None or np.ndim(x) else f": expected {y}, got {x}"
                raise MemberMismatchError(
                    f"`{caller()}` keeps one copy of what members share; the shared array at `{path}` of number {i} "
                    f"differs from that of number 0{values}.\n{fix}"
                )


def _same_array(x: Any, y: Any) -> bool:
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if is_key(x):
        x, y = jax.random.key_data(x), jax.random.key_data(y)
    return np.array_equal(np.asarray(x), np.asarray(y), equal_nan=np.issubdtype(np.asarray(x).dtype, np.inexact))


def take(tree: T, index: Any) -> T:
    """The members at `index`, not an integer, of all that has members in a tree; the rest of it is shared.

    That is every `Ensemble`, `Each`, `equinox.nn.State` and Module with the marks of `_axes`.
    """
    own, rest = _split(tree)
    if not array_leaves(own):
        return tree
    rows = check_index(index, _tree.num_members(own))
    own = jax.tree.map(lambda x: x[rows] if _is_text(x) else x, take_leaves(own, rows))
    followers = _followers(tree).items()
    return _close(own, rest, {n: rule.take(tree, rows) if rule.take else getattr(tree, n) for n, rule in followers})


def take_several(tree: T, index: Any, word: str) -> T:
    """`tree[index]` of a Module with marks, the word for which is given; an integer is refused."""
    check_index_of_members(index)
    positions = check_index(index, len(ids_of(tree)))
    if np.ndim(positions) == 0:
        raise TypeError(
            f"`{caller()}` takes several members, not {index!r}.\n"
            f"Write `{word}[i:i+1]` for a {word} of one; its model is `{word}.ensemble[i]`."
        )
    if is_traced(positions) and _followers(tree):
        raise TypeError(f"`{caller()}` needs a concrete index, because a {word} holds results on the host.")
    taken = take(tree, positions)
    _keys.check_ids(ids_of(taken))
    return taken


def join(trees: Sequence[T]) -> T:
    """Concatenates all that has members in trees that agree otherwise."""
    first = trees[0]
    followers = {name: rule.join(trees) for name, rule in _followers(first).items()}
    owns, rests = zip(*map(_split, trees), strict=True)
    if isinstance(first, Ensemble):  # compared as models first, so that a message has the paths of one
        compare_trees(
            [eqx.combine(own.stacked, rest.shared) for own, rest in zip(owns, rests, strict=True)], rules=_OF_ENSEMBLES
        )
        check_equal_shared([rest.shared for rest in rests])
    else:
        compare_trees(list(rests), rules=_OF_OTHERS)
        check_equal_shared(rests, _FIX)
        states: list[Any] = [getattr(tree, "train_state", tree) for tree in trees]
        if hasattr(states[0], "ensemble"):  # has once what members train together
            check_equal_shared([state.ensemble.shared for state in states])
    texts, owns = zip(*(eqx.partition(own, _is_text) for own in owns), strict=True)
    for own in owns:
        _tree.num_members(own)
    own = map_columns(_join_column, compare_trees(list(owns), rules=CONCATENATE_RULES))
    if jax.tree.leaves(texts):  # or `jax.tree.map` would refuse constants that are equivalent, but not equal
        own = eqx.combine(own, jax.tree.map(lambda *xs: np.concatenate(xs), *texts))
    return _close(own, rests[0], followers)


def with_ids(tree: T, ids: Any) -> T:
    """The same members with the ids `ids`, NumPy integers `(members,)`."""

    def change(node: Any) -> Any:
        if not _axes.has_marks(node):
            return node
        own = lambda x: as_known(np.asarray(ids)) if isinstance(x, Ids) else jnp.asarray(ids, x.dtype)
        return _map_fields(lambda name, x: own(x) if name == "ids" else change(x), node)

    rules = {name: rule.renumber for name, rule in _followers(tree).items() if rule.renumber}
    if not rules:
        return change(tree)
    new = dict(zip(np.asarray(ids_of(tree)).tolist(), ids.tolist(), strict=True))
    return dataclasses.replace(change(tree), **{name: renumber(tree, new) for name, renumber in rules.items()})


def ids_of(tree: Any) -> Any:
    """The ids of an ensemble, a training state or a run; `None` for anything else."""
    if not _axes.has_marks(tree):
        return None
    return tree.ids if hasattr(tree, "ids") else getattr(getattr(tree, "ensemble", None), "ids", None)


def _split(tree: PyTree) -> tuple[Any, Any]:
    """The parts with one value per member, the axis in front, and all others; followers are in neither."""
    tree = jax.tree.map(_open, tree, is_leaf=_has_members)
    return eqx.partition(tree, jax.tree.map(_is_own, tree, is_leaf=_has_members))


def _open(node: Any) -> Any:
    if isinstance(node, _axes.Each):
        return _axes.Each(node.per_member())
    if isinstance(node, Ids):  # of a training state
        return node.array
    if not _axes.has_marks(node):
        return node
    if isinstance(node, Ensemble):  # without the flags, which are traced scalars inside `jax.jit`
        stacked = open_all(node.arrays, axes=(node.num_members,))
        fields = {"stacked": stacked, "shared": without_ids(node.shared), "ids": node.ids}
        return _map_fields(lambda name, _: fields[name], node)
    followers = _followers(node)
    return _map_fields(lambda name, x: None if name in followers else _open(x), node)


def _is_own(node: Any) -> Any:
    """Whether a node holds one value per member; a tree for a Module with marks."""
    if not _axes.has_marks(node):
        return _has_members(node)
    marks = _axes.marks_of(type(node))
    own = lambda x: _is_own(x) if _axes.has_marks(x) else True
    return _map_fields(lambda name, x: False if name in marks else own(x), node)


def _close(own: Any, rest: Any, followers: dict[str, Any]) -> Any:
    close = lambda x: Ensemble(x.stacked, x.shared, x.ids) if isinstance(x, Ensemble) else x
    tree = close_all(jax.tree.map(close, eqx.combine(own, rest), is_leaf=lambda x: isinstance(x, Ensemble)))
    return dataclasses.replace(tree, **followers) if followers else tree


def _followers(tree: Any) -> dict[str, _axes.Follower]:
    marks = _axes.marks_of(type(tree)) if _axes.has_marks(tree) else {}
    return {name: mark for name, mark in marks.items() if isinstance(mark, _axes.Follower)}


def _map_fields(fn: Callable[[str, Any], Any], node: Any) -> Any:
    """A Module with other values in its fields, not checked."""
    keyed, treedef = jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    return jtu.tree_unflatten(treedef, [fn(path[0].name, x) for path, x in keyed])


def _has_members(node: Any) -> bool:
    return isinstance(node, Ensemble | _axes.Each | eqx.nn.State) or _axes.has_marks(node)


def _is_text(x: Any) -> bool:
    return isinstance(x, np.ndarray) and not is_member_array(x)


def _join_column(leaves: list) -> Any:
    if not is_member_array(leaves[0]):
        return leaves[0]
    return (np if all(isinstance(x, np.ndarray) for x in leaves) else jnp).concatenate(leaves)
