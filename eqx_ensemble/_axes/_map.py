from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._caller import caller
from .._check import Size, as_column, check_integers_fit
from .._code import code_of
from .._foreign import from_foreign
from .._leaf_text import leaf_text
from .._pytree import PyTree
from ._check import check_batch_size, check_member_count
from ._marks import AbstractPerMember, Batch, Each, is_array, is_per_member

ProgramKey = tuple[Any, ...]


def program_key(tree: Any) -> ProgramKey:
    """What distinguishes compiled programs beside the structure and the constants of their arguments.

    Constants are leaves other than arrays, and static fields. They are compared by Python's `==`, by which `4` and
    `4.0`, or `0.0` and `-0.0`, are equal; and functions and classes that are the same may have been edited since.
    """
    leaves, treedef = jax.tree.flatten(tree)
    classes: dict[type, None] = {}
    static = list(_static_values(treedef, classes))
    functions = [x for x in leaves if callable(x)] + [x for x in static if not isinstance(x, _NUMBERS)]
    numbers = enumerate(x for x in static if isinstance(x, _NUMBERS))
    return (*leaf_kinds(leaves), *((i, type(x), repr(x)) for i, x in numbers), code_of([*classes, *functions]))


def leaf_kinds(leaves: list[Any]) -> ProgramKey:
    """The positions, types and texts of the numbers among leaves."""
    return tuple(
        (i, type(x), repr(x))
        for i, x in enumerate(leaves)
        if isinstance(x, _NUMBERS) and not isinstance(x, np.generic)  # NumPy's are array leaves
    )


_NUMBERS = (int, float, complex)


def _static_values(treedef: Any, classes: dict[type, None]) -> Iterator[Any]:
    """The static values in a structure; the classes of its nodes are added to `classes`."""
    node = treedef.node_data()
    if node is not None:
        classes[node[0]] = None
        yield from _values(node[1])
        for child in treedef.children():
            yield from _static_values(child, classes)


def _values(value: Any) -> Iterator[Any]:
    """A static value, or those inside of tuples and lists."""
    if isinstance(value, tuple | list):
        for x in value:
            yield from _values(x)
    elif value is not None and not isinstance(value, str):
        yield value


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
