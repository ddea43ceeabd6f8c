from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Int

from .. import _axes, _keys
from .. import tree as _tree
from .._axes._check import check_member_axis
from .._check import check_integer_ids
from .._foreign import take_in
from .._pytree import PyTree
from .._typing import CallableEnsemble, Out, StatefulEnsemble, kind_of_members
from ..plan import AbstractPlan
from ..plan._map import call_members, map_members
from ._check_members import (
    attribute_message,
    check_callable,
    check_index_of_members,
    check_one_member,
    check_stacked_leaves,
    explain_call,
)
from ._parts import one_alone, with_flags, without_flags

M = TypeVar("M")

Where = Callable[[Any], Any]
"""Selects nodes of a model, as in `equinox.tree_at`."""


class Ensemble(_axes.AbstractPerMember, Generic[M]):
    """Many models of one architecture, stored as one Module whose arrays carry a leading `members` axis.

    Made by [`eqx_ensemble.build`][], [`eqx_ensemble.stack`][] or [`eqx_ensemble.from_stacked`][]. An `Ensemble` is
    a PyTree like any other: a field of a larger Module, an argument of `filter_jit`, `filter_grad` and
    `filter_vmap`, or the member of another ensemble.

    **Attributes:**

    - `stacked`: the model with the leaves that differ between members, each `(members, ...)`; `None` elsewhere, except
        for the flags `inference` of layers such as dropout. They are stored both here and in `shared`, so that
        `equinox.nn.inference_mode(ensemble)` sets both.
    - `shared`: the model with the leaves that all members use, such as activation functions and the nodes selected by
        `shared=` of the constructors; `None` elsewhere. Shared arrays are constants in
        [`eqx_ensemble.fit`][] and [`eqx_ensemble.train.make_step`][]: a trunk trained by all its members would couple
        them. `equinox.filter_grad` of a function of the ensemble does give them gradients, summed over the members:
        [both ways](../how-it-runs.md#shared-arrays). A zero marks an array of `stacked` that holds Python floats
        (a dropout rate for each member): indexing a member restores its float, and training does not change it.
    - `ids`: the members' stable ids `(members,)`, which determine their random streams. Indexing and concatenation keep
        them. They are an integer array leaf: arithmetic on all arrays changes them, and the next use of the ensemble
        then raises a `TypeError`. Select weights with `equinox.is_inexact_array`, not `equinox.is_array`.

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
    shared: M
    ids: Int[Array, " members"]

    def __init__(self, stacked: M, shared: M, ids: Int[Array, " members"]) -> None:
        self.stacked = with_flags(stacked, shared)
        self.shared = shared
        self.ids = ids

    def __check_init__(self) -> None:
        _keys.check_ids(self.ids)
        check_stacked_leaves(self.stacked, self.ids)

    def per_member(self) -> PyTree:
        """The leaves that differ between members, and the members' ids."""
        check_integer_ids(self.ids)
        return self.arrays, self.ids

    def one(self, part: PyTree) -> M:
        """The model of one member, given its part of `per_member()`."""
        stacked, _ = part
        return eqx.combine(stacked, self.shared)

    @property
    def arrays(self) -> M:
        """`stacked` without the flags that are also in `shared`: only arrays, each `(members, ...)`."""
        return without_flags(self.stacked, self.shared)

    @property
    def num_members(self) -> int:
        """The number of members."""
        if self.ids is None:  # gradients, or a filtered tree
            return check_member_axis(self.stacked, axis=0, name="Ensemble")
        check_integer_ids(self.ids)
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

    @overload
    def __call__(self: StatefulEnsemble[Out], x: Any, state: eqx.nn.State, /, *args: Any, **kwargs: Any) -> Out: ...
    @overload
    def __call__(self: CallableEnsemble[Out], *args: Any, **kwargs: Any) -> Out: ...
    def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
        """Calls every member: `(…)` in, `(members, …)` out.

        Inputs are shared by all members unless marked [`eqx_ensemble.Each`][]; a member sees one example unless the
        input is marked [`eqx_ensemble.Batch`][]. An `equinox.nn.State` always has one value per member.
        """
        check_callable(self.stacked)
        args = take_in(args, "args", name="Ensemble.__call__")
        kwargs = take_in(kwargs, "kwargs", name="Ensemble.__call__")

        def call(model: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(model, Ensemble):
                return model(*args, **kwargs)
            return _axes.over_batch(model, *args, **kwargs)

        with explain_call((args, kwargs)):
            return call_members(call, (self, *args), kwargs, name="Ensemble.__call__")

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
            return self.one((_tree.take(self.arrays, check_one_member(index)), None))
        stacked, ids = _tree.take(self.per_member(), index)
        if ids.ndim < self.ids.ndim:
            return one_alone(stacked, self.shared)
        return Ensemble(stacked, self.shared, ids)

    def __iter__(self) -> Iterator[M]:
        return iter(self.unstack())

    def unstack(self) -> list[M]:
        """The members as a list of ordinary models."""
        parts = _tree.unstack(self.per_member())
        return [one_alone(stacked, self.shared) for stacked, _ in parts]

    def map(self, fn: Callable[..., Out], *args: Any, plan: AbstractPlan | None = None, **kwargs: Any) -> Out:
        """Calls `fn(model, *args, **kwargs)` for every member, as [`eqx_ensemble.map_members`][] does."""
        return map_members(fn, plan=plan)(self, *args, **kwargs)

    def keys(self, key: Any, *, purpose: str = "call") -> _axes.Each:
        """Derives one key per member from one key, for calls such as `ensemble(x, key=ensemble.keys(key))`.

        The plain `key` would give all members the same dropout mask. The keys are
        [`eqx_ensemble.member_keys`][]`(key, ids, purpose=purpose)`; nested ensembles get one per inner member.
        """
        keys = _keys.member_keys(key, self.ids, purpose=purpose)
        if isinstance(self.stacked, Ensemble):
            keys = eqx.filter_vmap(lambda inner, key: inner.keys(key, purpose=purpose))(self.stacked, keys)
        return _axes.Each(keys)
