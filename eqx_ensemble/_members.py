"""Trees that hold members: which of their arrays have the leading `members` axis, and how to cut and join them."""

import functools as ft
from collections.abc import Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ._caller import caller
from ._check import MemberMismatchError, array_leaves, is_key
from ._ensemble import Ensemble
from ._marks import Shared
from ._pytree import PyTree
from .tree._engine import CONCATENATE_RULES, check_index, compare_trees

T = TypeVar("T")


def axes_of(tree: PyTree) -> PyTree:
    """The axis of the members in every array of a tree: 0, and `None` for the arrays that an ensemble shares."""

    def own(x: Any) -> Any:
        if isinstance(x, Ensemble):
            return x.in_axes()
        return jax.tree.map(lambda _: None, x) if isinstance(x, Shared) else 0 if eqx.is_array(x) else None

    return jax.tree.map(own, tree, is_leaf=lambda x: isinstance(x, Ensemble | Shared))


def split(tree: PyTree) -> tuple[PyTree, PyTree]:
    """Splits a tree into its arrays with one value per member, and everything else."""
    return eqx.partition(tree, jax.tree.map(lambda axis: axis == 0, axes_of(tree), is_leaf=lambda x: x is None))


def num_members(tree: PyTree) -> int:
    """The number of members, on which all arrays agree."""
    sizes = {x.shape[:1] for x in jax.tree.leaves(split(tree)[0])}
    if len(sizes) != 1 or sizes == {()}:
        raise MemberMismatchError(
            f"`{caller()}` needs arrays that agree on the number of members, got {sorted(sizes)}.\n"
            "Stack a list of models first: `stack(models)`."
        )
    return next(iter(sizes))[0]


def take(tree: T, index: Any) -> T:
    """The members at an index: one for an integer, several for a slice, a list, an array or a mask."""
    own, rest = split(tree)
    index = check_index(index, num_members(own))
    return eqx.combine(jax.tree.map(lambda x: _take(x, index), own), rest)


def _take(x: Any, index: Any) -> Any:
    return x[index] if isinstance(x, np.ndarray) and not isinstance(index, jax.Array) else _take_compiled(x, index)


# With the index as an argument: one program per shape, not per member.
_take_compiled = jax.jit(lambda x, index: x.at[index].get(mode="clip"))


def join(trees: Sequence[T]) -> T:
    """Concatenates the members of trees; whatever they share must be equal."""
    parts = [split(tree) for tree in trees]
    compare_trees([own for own, _ in parts], rules=CONCATENATE_RULES)
    compare_trees([rest for _, rest in parts], rules=CONCATENATE_RULES)
    for _, rest in parts[1:]:
        check_equal_shared(parts[0][1], rest)
    put = lambda *xs: np.concatenate(xs) if isinstance(xs[0], np.ndarray) else jnp.concatenate(xs)
    return eqx.combine(jax.tree.map(put, *(own for own, _ in parts)), parts[0][1])


def check_equal_shared(first: PyTree, other: PyTree) -> None:
    """Raises unless the arrays that members share are equal in two trees."""
    value = lambda x: np.asarray(jax.random.key_data(x) if is_key(x) else x)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(first), jax.tree.leaves(other), strict=True):
        if eqx.is_array(x) and x is not y and not np.array_equal(value(x), value(y), equal_nan=not is_key(x)):
            raise MemberMismatchError(
                f"`{caller()}` needs ensembles that share equal arrays; those at `{jax.tree_util.keystr(path)}` differ."
            )


def check_ensemble(ensemble: Any) -> None:
    """Raises unless it is an ensemble."""
    if not isinstance(ensemble, Ensemble):
        fix = "`stack(models)` makes one of a list of models, `from_stacked(model)` of a stacked Module."
        raise TypeError(f"An `Ensemble` is needed, got `{type(ensemble).__name__}`.\n{fix}")


@ft.lru_cache(maxsize=64)
def _is_stateful(structure: Any) -> bool:
    """Whether there is a `StateIndex` in a tree of this structure (remembered: it takes long)."""
    is_index = lambda x: isinstance(x, eqx.nn.StateIndex)
    tree = jax.tree.unflatten(structure, [None] * structure.num_leaves)
    return any(map(is_index, jax.tree.leaves(tree, is_leaf=lambda x: x is None or is_index(x))))


def check_model_state(ensemble: Ensemble, state: Any) -> None:
    """Raises if members are stateful and no state is given, or one of other members."""
    if state is None and _is_stateful(jax.tree.structure(ensemble)):
        raise TypeError(
            "The members are stateful (for example they contain BatchNorm), but no `state` was given.\n"
            "Build with `ensemble, state = build(eqx.nn.make_with_state(Model), ...)` and pass `state=state`."
        )
    for path, x in array_leaves(state):
        if x.shape[:1] != (ensemble.num_members,):
            raise MemberMismatchError(
                f"`state` needs one value per member; at `{path}`: expected ({ensemble.num_members}, ...), got "
                f"{x.shape}.\nIndex the state as the ensemble: `tree.take(state, index)`."
            )
