"""The `Ensemble`, and trees that hold members: which of their arrays have the axis, and how to cut and join them."""

import functools as ft
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ._caller import caller
from ._check import MemberMismatchError, attribute_error
from ._leaves import array_leaves, is_key
from ._marks import Shared
from ._pytree import PyTree
from .tree._engine import CONCATENATE_RULES, check_index, compare_trees

M = TypeVar("M")

_is_none = lambda x: x is None


class Ensemble(eqx.Module, Generic[M]):
    """Many models of one architecture as one Module, whose arrays have a leading `members` axis.

    `stacked` is an ordinary Module, as `equinox.filter_vmap(make)(keys)` returns it: transformations, optimisers and
    `equinox.tree_at` work on it as on any other.

    **Attributes:**

    - `stacked`: the members, each array `(members, ...)`, except for the arrays that they share.
    - `axes`: the axis of the members in each leaf of `stacked`: 0, and `None` for shared arrays and what is no array.

    ```python
    ensemble = ee.build(lambda key: eqx.nn.MLP(13, 1, 50, 2, key=key), 8, key=key)
    ensemble(jnp.ones(13)).shape  # (8, 1): every member sees the same input
    ensemble(ee.Each(jnp.ones((8, 13)))).shape  # (8, 1): one input per member
    ensemble(ee.Batch(jnp.ones((32, 13)))).shape  # (8, 32, 1): members, batch, out
    ensemble[3]  # an ordinary eqx.nn.MLP
    ensemble[[0, 5]], ensemble[2:]  # smaller ensembles
    ```
    """

    stacked: M
    # Of each leaf, `None` included: filtering a tree replaces leaves by `None`, and keeps their number.
    axes: tuple[int | None, ...] = eqx.field(static=True)

    def __init__(self, stacked: M, axes: tuple[int | None, ...] | None = None) -> None:
        leaves = jax.tree.leaves(stacked, is_leaf=_is_none)
        self.stacked = stacked
        self.axes = tuple(0 if eqx.is_array(x) else None for x in leaves) if axes is None else axes
        sizes: dict[Any, str] = {}
        for (path, x), axis in zip(
            jax.tree_util.tree_flatten_with_path(stacked, is_leaf=_is_none)[0], self.axes, strict=True
        ):
            if is_key(x) and str(jax.random.key_impl(x)) != "threefry2x32":
                raise TypeError(
                    f"Members need threefry keys; at `{jax.tree_util.keystr(path)}`: a key of "
                    f"{str(jax.random.key_impl(x))!r}, which draws differently under `jax.vmap`.\n"
                    "Use `jax.random.key(seed, impl='threefry2x32')`."
                )
            if axis == 0 and eqx.is_array(x):
                sizes.setdefault(x.shape[:1], f"`{jax.tree_util.keystr(path)}`: {x.shape}")
        if len(sizes) != 1 or () in sizes:
            found = ", ".join(sizes.values()) or "no array"
            raise MemberMismatchError(
                f"`Ensemble` needs arrays `(members, ...)` with one number of members; got {found}.\n"
                "`stack([model, ...])` makes an ensemble of models; `from_stacked(model, shared=...)` leaves some of "
                "their arrays without the axis."
            )

    def in_axes(self) -> "Ensemble[M]":
        """`axes` as a tree like the ensemble, for `in_axes` of `equinox.filter_vmap`."""
        leaves, treedef = jax.tree.flatten(self, is_leaf=_is_none)
        return jax.tree.unflatten(
            treedef, [None if x is None else axis for x, axis in zip(leaves, self.axes, strict=True)]
        )

    @property
    def num_members(self) -> int:
        """The number of members."""
        leaves = zip(jax.tree.leaves(self.stacked, is_leaf=_is_none), self.axes, strict=True)
        sizes = {np.shape(x)[:1] for x, axis in leaves if axis == 0 and x is not None}
        if len(sizes) != 1 or () in sizes:
            raise MemberMismatchError(
                "An `Ensemble` inside `jax.vmap` or `jax.lax.scan` is sliced along its members, and is no ensemble.\n"
                "Write `map_members(fn)(ensemble, x)`: there `fn` gets the model of one member."
            )
        return next(iter(sizes))[0]

    def __len__(self) -> int:
        return self.num_members

    def __pdoc__(self, **_: Any) -> Any:
        """The short form; print `stacked` for all leaves."""
        from wadler_lindig import TextDoc

        leaves = zip(jax.tree.leaves(self.stacked, is_leaf=_is_none), self.axes, strict=False)
        sizes = {x.shape[:1] for x, axis in leaves if axis == 0 and eqx.is_array(x)}
        count = f"num_members={sizes.pop()[0]}" if len(sizes) == 1 and () not in sizes else "..."
        return TextDoc(f"Ensemble[{type(self.stacked).__name__}]({count})")

    if not TYPE_CHECKING:  # which must not take every name for an attribute

        def __getattr__(self, name: str) -> Any:
            of_model = " ".join(dir(vars(self).get("stacked")))
            elsewhere = {f"ensemble.stacked.{name}": of_model, "ensemble.unstack()": "members models estimators"}
            elsewhere["run[run.ranking(k)]"] = "hyper history status table predict"
            raise attribute_error(self, name, elsewhere)

    def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
        """Calls every member: `(...)` in, `(members, ...)` out.

        Every member sees the same example, unless the input is marked [`eqx_ensemble.Each`][] or
        [`eqx_ensemble.Batch`][]. An `equinox.nn.State` has one value per member.
        """
        from ._map import call_members

        return call_members(self, *args, **kwargs)

    @overload
    def __getitem__(self, index: int | np.integer) -> M: ...
    @overload
    def __getitem__(self, index: Any) -> "Ensemble[M]": ...
    def __getitem__(self, index: Any) -> "M | Ensemble[M]":
        """One member for an integer; a smaller ensemble for a slice, a list of integers or a mask."""
        taken = take(self, index)
        return taken.stacked if np.ndim(index) == 0 and not isinstance(index, slice) else taken

    def __iter__(self) -> Iterator[M]:
        return (self[i] for i in range(self.num_members))

    def unstack(self) -> list[M]:
        """The members as a list of ordinary models."""
        return list(self)


T = TypeVar("T")


def axes_of(tree: PyTree) -> PyTree:
    """The axis of the members in every array of a tree: 0, and `None` for the arrays that an ensemble shares."""

    def own(x: Any) -> Any:
        if isinstance(x, Ensemble):
            return x.in_axes()
        return jax.tree.map(lambda _: None, x) if isinstance(x, Shared) else 0 if eqx.is_array(x) else None

    return jax.tree.map(own, tree, is_leaf=lambda x: isinstance(x, Ensemble | Shared))


def split_own(tree: PyTree) -> tuple[PyTree, PyTree]:
    """Splits a tree into its arrays with one value per member, and everything else."""
    return eqx.partition(tree, jax.tree.map(lambda axis: axis == 0, axes_of(tree), is_leaf=lambda x: x is None))


def num_members(tree: PyTree) -> int:
    """The number of members, on which all arrays agree."""
    sizes = {x.shape[:1] for x in jax.tree.leaves(split_own(tree)[0])}
    if len(sizes) != 1 or sizes == {()}:
        raise MemberMismatchError(
            f"`{caller()}` needs arrays that agree on the number of members, got {sorted(sizes)}.\n"
            "Stack a list of models first: `stack(models)`."
        )
    return next(iter(sizes))[0]


def take(tree: T, index: Any) -> T:
    """The members at an index: one for an integer, several for a slice, a list, an array or a mask."""
    own, rest = split_own(tree)
    index = check_index(index, num_members(own))
    return eqx.combine(jax.tree.map(lambda x: _take(x, index), own), rest)


def _take(x: Any, index: Any) -> Any:
    return x[index] if isinstance(x, np.ndarray) and not isinstance(index, jax.Array) else _take_compiled(x, index)


# With the index as an argument: one program per shape, not per member.
_take_compiled = jax.jit(lambda x, index: x.at[index].get(mode="clip"))


def join(trees: Sequence[T]) -> T:
    """Concatenates the members of trees; whatever they share must be equal."""
    parts = [split_own(tree) for tree in trees]
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
