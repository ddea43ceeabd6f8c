from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._caller import caller
from .._check import Size, as_column, check_integers_fit
from .._foreign import from_foreign
from .._leaf_text import leaf_text
from .._pytree import PyTree
from ._check import check_batch_size, check_member_count
from ._marks import AbstractPerMember, Batch, Each, is_array, is_per_member


def as_array(values: Any, *, path: str) -> jax.Array:
    """Values as a strongly typed JAX array; raises for integers that overflow."""
    values = from_foreign(values, path)
    check_integers_fit(values, argument=path)
    try:
        return strip_weak_types(jnp.asarray(values))
    except OverflowError as error:  # Python's own integers
        raise ValueError(
            f"`{caller()}` makes a jax array of `{path}`, and an integer in it is too large: got {values!r}.\n"
            "Enable 64 bits (`jax.config.update('jax_enable_x64', True)`) or rescale."
        ) from error
    except TypeError as error:
        raise TypeError(f"`{caller()}` needs numbers at `{path}`, got {leaf_text(values)}.") from error


def strip_weak_types(tree: PyTree) -> PyTree:
    """Makes the weakly typed floating-point arrays of a tree strongly typed.

    `jnp.full(3, 0.1)` and `jnp.asarray(2.0)` are weakly typed: with bfloat16 they give bfloat16. The outputs of
    compiled programs and the arrays of files are strongly typed, so the same array would promote differently after
    training. Integer arrays do not affect the precision of others and are returned unchanged.
    """
    is_weak = lambda x: getattr(x, "weak_type", False) and jnp.issubdtype(x.dtype, jnp.inexact)
    return jax.tree.map(lambda x: x.astype(x.dtype) if is_weak(x) else x, tree)


def where_members(chosen: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """`x` for the members where `chosen` `(members,)` is true, else `y`; both have the leading `members` axis."""
    return jnp.where(as_column(jnp.asarray(chosen), x.ndim), x, y)


def map_each(own: Callable[[PyTree], Any], tree: PyTree, *, shared: Callable[[Any], Any] = lambda x: x) -> PyTree:
    """Replaces every `Each` of a tree by `own(value)` and every other leaf by `shared(leaf)`.

    The `members` axis of a value is moved to the front, whatever the `axis` of its mark.
    """
    is_each = lambda x: isinstance(x, Each)
    return jax.tree.map(lambda x: own(x.per_member()) if is_each(x) else shared(x), tree, is_leaf=is_each)


def split_members(tree: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree], Size]:
    """Partitions `tree` into a part to map over members and a shared part.

    **Returns:** the tree to map, with the `members` axis in front of its array leaves; the function that turns one
    member's part of it into that member's view of `tree`; and the number of members.
    """
    nodes, treedef = jax.tree.flatten(tree, is_leaf=is_per_member)
    marked = {i: node for i, node in enumerate(nodes) if is_per_member(node)}
    parts = {i: node.per_member() if isinstance(node, AbstractPerMember) else node for i, node in marked.items()}
    num_members = check_member_count(parts, tree)
    check_integers_fit(parts, argument="")

    def view(one_part: dict[int, PyTree]) -> PyTree:
        seen = list(nodes)
        for i, part in one_part.items():
            node = marked[i]
            seen[i] = node.one(part) if isinstance(node, AbstractPerMember) else part
        return jax.tree.unflatten(treedef, seen)

    return parts, view, num_members


def over_leading_axis(
    mapper: Callable[[Callable[[PyTree], PyTree], PyTree], PyTree], fn: Callable[[PyTree], PyTree], tree: PyTree
) -> PyTree:
    """Runs `mapper(fn, tree)` with only the arrays of `tree` and of the result passing through `mapper`.

    `fn` takes and returns any PyTree: leaves that are not arrays bypass `jax.vmap` and `jax.lax.map`.
    """
    arrays, rest = eqx.partition(tree, is_array)
    static = None

    def on_arrays(arrays: PyTree) -> PyTree:
        nonlocal static
        dynamic, static = eqx.partition(fn(eqx.combine(arrays, rest)), eqx.is_array)
        return dynamic

    dynamic = mapper(on_arrays, arrays)
    return eqx.combine(dynamic, static)


def over_batch(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls `fn`, mapped over the examples of the arguments marked `Batch`; without any, calls it once."""
    nodes, treedef = jax.tree.flatten((args, kwargs), is_leaf=lambda x: isinstance(x, Batch))
    marked = {i: node for i, node in enumerate(nodes) if isinstance(node, Batch)}
    if not marked:
        return fn(*args, **kwargs)
    parts = {i: _batch_first(node) for i, node in marked.items()}
    check_batch_size(parts.values())
    check_integers_fit(parts, argument="")

    def call(one_part: dict[int, PyTree]) -> Any:
        args, kwargs = jax.tree.unflatten(treedef, [one_part.get(i, node) for i, node in enumerate(nodes)])
        return fn(*args, **kwargs)

    return over_leading_axis(lambda f, arrays: jax.vmap(f)(arrays), call, parts)


def _batch_first(node: Batch) -> PyTree:
    if node.axis == 0:
        return node.value
    return jax.tree.map(lambda x: jnp.moveaxis(x, node.axis, 0) if is_array(x) else x, node.value)
