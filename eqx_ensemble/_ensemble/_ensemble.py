import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast, overload

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, ArrayLike, Int

from .. import _axes, _keys
from .. import tree as _tree
from .._axes import check_member_axis
from .._by_name import reduce_shared
from .._check import MemberMismatchError, array_leaves, check_one_row_per_id, is_inside_transformation, is_readable
from .._foreign import take_in
from .._ids import Ids, IdsField, as_known, close_inner, open_all, stored_ids
from .._pytree import PyTree
from .._typing import CallableEnsemble, Out, StatefulEnsemble, kind_of_members
from ..plan import AbstractPlan
from ..plan._engine import call_members, map_members
from ..tree._engine import take_leaves


def check_one_mode(stacked: Any, shared: Any, path: str) -> None:
    """Raises if a layer's `inference` flag differs between `stacked` and `shared`."""
    if type(stacked) is bool and type(shared) is bool and stacked is not shared:
        raise ValueError(
            "An `Ensemble` needs one value of each layer's `inference`, which all members share.\n"
            f"  at `{path}`: expected {shared}, as in `shared`, got {stacked} in `stacked`\n"
            "Set both by `equinox.nn.inference_mode(ensemble, value=...)`."
        )


def check_index_of_members(index: Any) -> None:
    """Raises for a tuple, which would index into the members' arrays."""
    if isinstance(index, tuple):
        raise TypeError(
            f"An ensemble is indexed along its members only, got {index!r}.\n"
            "Write `ensemble[[0, 1]]` for two members, `ensemble[0][1]` for a member of a nested ensemble."
        )


_FUNCTIONS = {
    "fit": "`fit(ensemble, loss, optimiser, data, ...)`",
    "predict": "`predict(ensemble, x)`",
    "save": "`save(path, ensemble)`",
    "load": "`load(path, like)`",
}


def attribute_message(attribute: str, members: Any) -> str:
    """The message for a missing attribute, which may be one of the members or a function of the package."""
    if attribute in _FUNCTIONS:
        return f"An `Ensemble` has no method `{attribute}`: it is a function of the package, {_FUNCTIONS[attribute]}."
    if callable(getattr(type(members), attribute, None)):
        return (
            f"An `Ensemble` has no method `{attribute}`. To call that of every member: "
            f"`ensemble.map(lambda model, x: model.{attribute}(x), x)`; of one: `ensemble[0].{attribute}(x)`."
        )
    return (
        f"An `Ensemble` has no attribute `{attribute}`. What its members hold is in `ensemble.stacked`, with the "
        "leading members axis, or in a single member, `ensemble[0]`."
    )


@contextlib.contextmanager
def explain_call(inputs: Any) -> Iterator[None]:
    """Adds a note about the inputs of a member to its errors: the usual cause is an unmarked batch."""
    try:
        yield
    except (TypeError, ValueError, AssertionError) as error:  # Equinox asserts
        if not isinstance(error, MemberMismatchError):
            if isinstance(error, TypeError) and any(isinstance(x, np.ndarray) for x in jax.tree.leaves(inputs)):
                error.add_note(
                    "NumPy arrays are passed on as they are: where a member's annotations need JAX arrays, call it "
                    "with `jnp.asarray(x)`."
                )
            error.add_note(
                "An ensemble calls every member with one example. For a batch pass `Batch(x)`, for one "
                "input per member `Each(x)`."
            )
        raise


_Path = tuple[Any, ...]


def one_alone(stacked: PyTree, shared: PyTree) -> Any:
    """The model of one member, with its Python floats restored unless they are traced."""

    def number(x: Any, y: Any) -> Any:
        if x is None or type(y) is not float or not is_readable(x):
            return x
        # The shortest float that rounds to this one: 0.1, as given, not 0.10000000149.
        return float(str(np.asarray(x)[()]))

    stacked, shared = close_inner(stacked, shared)
    return eqx.combine(jax.tree.map(number, stacked, shared, is_leaf=lambda x: x is None), shared)


def _rows_of(per_member: tuple[PyTree, Any]) -> PyTree:
    """The leaves that differ between members, with the ids of ensembles within each member as leaves too."""
    stacked, ids = per_member
    return open_all(stacked, axes=ids.shape), ids


def with_flags(stacked: PyTree, shared: PyTree) -> PyTree:
    """Copies the layers' `inference` flags from the shared to the stacked part of a model.

    `equinox.nn.inference_mode` sets every attribute of that name, but cannot set one that is `None`.
    """

    def put(path: _Path, x: Any, y: Any) -> Any:
        if not _is_inference(path) or y is None or _axes.is_array(y):
            return x
        check_one_mode(x, y, jtu.keystr(path))
        return y if x is None else x

    if not any(type(y) is bool for y in jax.tree.leaves(shared)):  # fast, in C++; most models have no flag
        return stacked
    return jtu.tree_map_with_path(put, stacked, shared, is_leaf=lambda x: x is None)


def without_flags(stacked: PyTree, shared: PyTree) -> PyTree:
    """Removes the flags that `with_flags` added to the stacked part of a model."""

    def cut(path: _Path, x: Any, y: Any) -> Any:
        if not _is_inference(path) or x is None or y is None:
            return x
        check_one_mode(x, y, jtu.keystr(path))
        return None

    # Within `jax.jit` a flag is a traced scalar, whereas per-member arrays have an axis.
    if all(_axes.is_array(x) and x.ndim > 0 for x in jax.tree.leaves(stacked)):
        return stacked
    return jtu.tree_map_with_path(cut, stacked, shared, is_leaf=lambda x: x is None)


def _is_inference(path: _Path) -> bool:
    return path[-1:] == (jtu.GetAttrKey("inference"),)


M = TypeVar("M")
N = TypeVar("N", bound=eqx.Module)

Where = Callable[[Any], Any]
"""Selects nodes of a model, as in `equinox.tree_at`."""


class Ensemble(_axes.AbstractPerMember, Generic[M]):
    """Many models of one architecture, stored as one Module whose arrays have a leading `members` axis.

    It is a PyTree: a field of a larger Module, an argument of `filter_jit`, `filter_grad` and `filter_vmap`, or the
    member of another ensemble.

    **Attributes:**

    - `stacked`: the model with the leaves that differ between members, each `(members, ...)`, and the flags `inference`
        of layers; `None` elsewhere.
    - `shared`: the model with the leaves that all members use, such as activation functions and [shared
        arrays](../how-it-runs.md#shared-arrays); `None` elsewhere. A zero marks Python floats in `stacked` (a dropout
        rate per member), which training does not change and indexing restores.
    - `ids`: the members' ids `(members,)`, which determine their random streams. They are part of the tree's structure:
        gradients, optimisers and `jax.tree.map` ignore them, and your function under `equinox.filter_jit` is compiled
        again for other ids. Inside it, `ensemble[index]` with a traced index has an array of ids.

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
    shared: M = eqx.field(metadata=_axes.SHARED)
    ids: Int[Array, " members"] = cast(Any, IdsField())

    def __init__(self, stacked: M, shared: M, ids: Int[ArrayLike, " members"]) -> None:
        _keys.check_ids(ids)
        self.stacked, self.shared = close_inner(with_flags(stacked, shared), shared)
        self.ids = as_known(ids)

    def __check_init__(self) -> None:
        if array_leaves(self.stacked) and (found := check_member_axis(self.stacked, axis=0)) != self.ids.shape[0]:
            raise MemberMismatchError(f"`Ensemble` needs one id per member: {found} members, {self.ids.shape[0]} ids.")

    def per_member(self) -> PyTree:
        """The leaves that differ between members, and the members' ids."""
        arrays, ids = self.arrays, self.ids
        check_one_row_per_id(arrays, ids)
        return arrays, ids

    def one(self, part: PyTree) -> M:
        """The model of one member, given its part of `per_member()`."""
        stacked, _ = part
        return eqx.combine(stacked, self.shared)

    def to_stacked(self) -> M:
        """The members as one plain Module, for `equinox.filter_vmap`, with `in_axes` if arrays are shared.

        The way back is [`eqx_ensemble.from_stacked`][] with `ids=` and `shared=`.
        """
        return eqx.combine(self.arrays, self.shared)

    @property
    def arrays(self) -> M:
        """`stacked` without the flags that are also in `shared`: only arrays, each `(members, ...)`."""
        return without_flags(self.stacked, self.shared)

    @property
    def num_members(self) -> int:
        """The number of members."""
        ids = stored_ids(self)
        if isinstance(ids, Ids) and not is_inside_transformation():
            return len(ids.values)
        if ids is None:  # filtered out, inside a compiled function
            return check_member_axis(self.stacked, axis=0)
        check_one_row_per_id(self.stacked, self.ids)
        return self.ids.shape[0]

    if not TYPE_CHECKING:  # type checkers know the attributes

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(attribute_message(name, vars(self).get("stacked")))

    def __pdoc__(self, **_: Any) -> Any:
        """The short form in `repr`, `equinox.tree_pformat` and run-time type errors; print `stacked` for all leaves."""
        sizes = {x.shape[:1] for x in jax.tree.leaves((self.stacked, self.ids)) if _axes.is_array(x)}
        count = f"num_members={sizes.pop()[0]}" if len(sizes) == 1 and sizes != {()} else "..."
        from wadler_lindig import TextDoc

        return TextDoc(f"{kind_of_members(self)}({count})")

    def __len__(self) -> int:
        return self.num_members

    __reduce__: ClassVar[Any] = reduce_shared

    @overload
    def __call__(self: StatefulEnsemble[Out], x: Any, state: eqx.nn.State, /, *args: Any, **kwargs: Any) -> Out: ...
    @overload
    def __call__(self: CallableEnsemble[Out], *args: Any, **kwargs: Any) -> Out: ...
    def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
        """Calls every member: `(…)` in, `(members, …)` out.

        Every member sees the same example, unless the input is marked [`eqx_ensemble.Each`][] or
        [`eqx_ensemble.Batch`][]. An `equinox.nn.State` has one value per member.
        """
        if not callable(self.stacked):
            raise TypeError(
                f"The members of this ensemble are of type {type(self.stacked).__name__} and cannot be called."
            )
        args = take_in(args, "args")
        kwargs = take_in(kwargs, "kwargs")

        def call(model: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(model, Ensemble):
                return model(*args, **kwargs)
            return _axes.over_batch(model, *args, **kwargs)

        with explain_call((args, kwargs)):
            return call_members(call, (self, *args), kwargs)

    @overload
    def __getitem__(self, index: int | np.integer) -> M: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int] | Sequence[bool] | np.ndarray) -> "Ensemble[M]": ...
    @overload
    def __getitem__(self, index: jax.Array) -> Any: ...
    def __getitem__(self, index: Any) -> "M | Ensemble[M]":
        """One member for an integer; a smaller ensemble for a slice, a list of integers or a mask."""
        check_index_of_members(index)
        if self.ids is None:  # as above
            if isinstance(index, slice | list) or getattr(index, "ndim", 0) > 0:
                raise TypeError(
                    "This `Ensemble` holds no member ids, as its ids were computed by a compiled function and then "
                    "filtered out: index it with one integer, or take several members with `tree.take(tree, index)`."
                )
            return self.one((_tree.take(self.arrays, index), None))
        stacked, ids = take_leaves(_rows_of(self.per_member()), index)
        if ids.ndim < self.ids.ndim:
            return one_alone(stacked, self.shared)
        _keys.check_distinct_ids(ids, _keys.COPIES_KEEP_IDS)
        return Ensemble(stacked, self.shared, ids)

    def __iter__(self) -> Iterator[M]:
        return iter(self.unstack())

    def unstack(self) -> list[M]:
        """The members as a list of ordinary models."""
        parts = _tree.unstack(_rows_of(self.per_member()))
        return [one_alone(stacked, self.shared) for stacked, _ in parts]

    @overload
    def map(
        self, fn: Callable[..., N], *args: Any, plan: AbstractPlan | None = None, **kwargs: Any
    ) -> "Ensemble[N]": ...
    @overload
    def map(self, fn: Callable[..., Out], *args: Any, plan: AbstractPlan | None = None, **kwargs: Any) -> Out: ...
    def map(self, fn: Callable[..., Any], *args: Any, plan: AbstractPlan | None = None, **kwargs: Any) -> Any:
        """Calls `fn(model, *args, **kwargs)` for every member, as [`eqx_ensemble.map_members`][] does."""
        return map_members(fn, plan=plan)(self, *args, **kwargs)

    def keys(self, key: Any, *, purpose: str = "call") -> _axes.Each:
        """One key per member, for `ensemble(x, key=ensemble.keys(key))`: the same `key` would give all the same dropout
        mask.

        The keys are [`eqx_ensemble.member_keys`][]`(key, ids, purpose=purpose)`; nested ensembles get one per inner
        member.
        """
        keys = _keys.member_keys(key, self.ids, purpose=purpose)
        if isinstance(self.stacked, Ensemble):
            keys = eqx.filter_vmap(lambda inner, key: inner.keys(key, purpose=purpose))(self.stacked, keys)
        return _axes.Each(keys)
