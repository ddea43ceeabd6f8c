import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ._caller import caller
from ._check import MemberMismatchError
from ._ensemble import Ensemble, axes_of, take
from ._foreign import from_foreign_tree
from ._leaves import is_key
from ._marks import Each, over_batch
from ._pytree import PyTree
from .plan import AnyPlan, Vmap, as_plan


def is_per_member(x: Any) -> bool:
    """Whether a node holds one value per member."""
    return isinstance(x, Ensemble | Each | eqx.nn.State)


def view(x: Any) -> Any:
    """What one member sees of a node whose arrays have been mapped."""
    return x.stacked if isinstance(x, Ensemble) else x.value if isinstance(x, Each) else x


def take_marked(tree: PyTree, index: Any) -> PyTree:
    """The members at an index of every marked node of a tree; all else stays."""
    return jax.tree.map(lambda x: take(x, index) if is_per_member(x) else x, tree, is_leaf=is_per_member)


def map_members(fn: Callable[..., Any], *, plan: AnyPlan | None = None, out_axis: int = 0) -> Callable[..., Any]:
    """Transforms a function of one member into a function of all members.

    Arguments that are an [`eqx_ensemble.Ensemble`][], an [`eqx_ensemble.Each`][] or an `equinox.nn.State`, at any
    depth, are mapped over: `fn` receives one member's model, value or state. All others are shared. It is
    `equinox.filter_vmap` with these axes; `equinox.filter_jit` around it compiles.

    What is returned has a value per member:

    - a Module, such as a model or its gradient, becomes an `Ensemble`, in which shared arrays that `fn` returns
        unchanged stay shared;
    - another custom node, such as an optimiser's state, and random keys become an `Each`;
    - any other array gains a `members` axis. Mark it `Each` to pass it to a mapped function per member;
    - what is not an array is returned once.

    **Arguments:**

    - `fn`: any function of one member; it may take and return any PyTree.
    - `plan`: how the members are executed, by default [`eqx_ensemble.plan.Vmap`][].
    - `out_axis`: the position of the `members` axis in every plain array that is returned.

    **Returns:** the function of all members.

    **Raises:** (when called) `MemberMismatchError` if arguments disagree on the number of members; `TypeError` if no
    argument has members.

    ```python
    def mse(model, x, y):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 4, key=key)
    x, y = jnp.ones((10, 3)), jnp.zeros((10, 1))
    ee.map_members(mse)(ensemble, x, y).shape  # (4,)
    ```
    """
    call = over_members(fn, plan=plan, is_plain=False)
    return ft.wraps(fn)(lambda *args, **kwargs: _close(call(*args, **kwargs), out_axis))


def over_members(fn: Callable[..., Any], *, plan: AnyPlan | None = None, is_plain: bool = True) -> Callable[..., Any]:
    """`map_members` that returns plain leaves, or else `_Leaf`s."""
    plan = as_plan(plan, Vmap())

    def over_all(*args: Any, **kwargs: Any) -> Any:
        own, rest = open_marks((from_foreign_tree(args, "args"), from_foreign_tree(kwargs, "kwargs")))
        kept: list[Any] = []  # arrays that members share and that `fn` returned unchanged
        shared = {id(x): x for x in jax.tree.leaves(rest) if isinstance(x, jax.Array)}

        def one(own: PyTree) -> PyTree:
            args, kwargs = jax.tree.map(view, eqx.combine(own, rest), is_leaf=is_per_member)
            leaves, treedef = jax.tree.flatten(fn(*args, **kwargs))
            kept[:] = [None if is_plain else shared.get(id(x)) for x in leaves]
            return jax.tree.unflatten(treedef, [x if y is None else _KEPT for x, y in zip(leaves, kept, strict=True)])

        out = plan.run(one, own)
        if is_plain:
            return out
        leaves, treedef = jax.tree.flatten(out)
        pairs = zip(leaves, kept, strict=True)
        return jax.tree.unflatten(treedef, [_Leaf(y, None) if x is _KEPT else _Leaf(x, 0) for x, y in pairs])

    return over_all


class _Kept:
    """In place of a shared array that `fn` returned unchanged: it does not pass through `vmap`."""


_KEPT = _Kept()


class _Leaf:
    """A returned leaf and the axis of its members; not a PyTree."""

    def __init__(self, value: Any, axis: int | None) -> None:
        self.value, self.axis = value, axis


def open_marks(arguments: PyTree) -> tuple[PyTree, PyTree]:
    """Splits arguments into the arrays of marked nodes, all with the `members` axis, and everything else.

    **Raises:** `TypeError` if no node is marked; `MemberMismatchError` if they disagree on the number of members.
    """
    has_axis = lambda node: jax.tree.map(lambda axis: axis == 0, axes_of(node), is_leaf=lambda x: x is None)
    mask = jax.tree.map(lambda x: is_per_member(x) and has_axis(x), arguments, is_leaf=is_per_member)
    own, rest = eqx.partition(arguments, mask)
    counts = list(dict.fromkeys(x.shape[0] for x in jax.tree.leaves(own)))
    if not counts:
        raise TypeError(
            f"`{caller()}` needs an argument with members, an `Ensemble` or an `Each`; got none.\n"
            "Mark inputs with one value per member: `Each(x)`. Of a stacked Module, make an ensemble: "
            "`from_stacked(model)`; of a list of models: `stack(models)`."
        )
    if len(counts) > 1:
        raise MemberMismatchError(
            f"`{caller()}` needs arguments with the same number of members, got {' and '.join(map(str, counts))}.\n"
            "An `Each` holds one value per member. Mark a batch that all members share as `Batch`."
        )
    return own, rest


def _close(out: Any, out_axis: int) -> Any:
    """Marks what was returned, given as `_Leaf`s."""
    if isinstance(out, _Leaf):
        x = out.value
        if is_key(x):
            return Each(x)
        return jnp.moveaxis(x, 0, out_axis) if eqx.is_array(x) and out.axis == 0 and out_axis else x
    if type(out) in (tuple, list):
        return type(out)(_close(x, out_axis) for x in out)
    if type(out) is dict:
        return {name: _close(x, out_axis) for name, x in out.items()}
    value = jax.tree.map(lambda leaf: leaf.value, out)
    if isinstance(out, eqx.nn.State | Ensemble | Each) or not jax.tree.leaves(eqx.filter(value, eqx.is_array)):
        return value
    if isinstance(out, eqx.Module):
        is_leaf = lambda x: x is None or isinstance(x, _Leaf)
        leaves = jax.tree.leaves(out, is_leaf=is_leaf)
        axes = tuple(0 if x is not None and eqx.is_array(x.value) and x.axis == 0 else None for x in leaves)
        return Ensemble(value, axes) if 0 in axes else value
    return Each(value)


def call_members(ensemble: Ensemble, *args: Any, **kwargs: Any) -> PyTree:
    """Calls every member, over the examples of inputs marked `Batch`."""
    if not callable(ensemble.stacked):
        raise TypeError(f"The members of this ensemble, `{type(ensemble.stacked).__name__}`, cannot be called.")
    own, rest = open_marks((ensemble, from_foreign_tree(args, "args"), from_foreign_tree(kwargs, "kwargs")))

    def one(own: PyTree) -> PyTree:
        model, args, kwargs = jax.tree.map(view, eqx.combine(own, rest), is_leaf=is_per_member)
        return over_batch(model, *args, **kwargs)

    try:
        return eqx.filter_vmap(one)(own)
    except (TypeError, ValueError, AssertionError) as error:
        error.add_note(
            "An ensemble calls every member with one example. For a batch pass `Batch(x)`, for one input per member "
            "`Each(x)`."
        )
        raise
