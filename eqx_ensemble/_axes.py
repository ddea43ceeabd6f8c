import abc
from collections.abc import Callable
from typing import Any, TypeGuard

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from . import _check


class AbstractPerMember(eqx.Module):
    """An argument that holds one value per member: subclass it for values that a plain array does not describe.

    [`eqx_ensemble.map_members`][] and a call of an [`eqx_ensemble.Ensemble`][] map over every node of this class, at
    any depth of their arguments; what is not such a node is shared by all members. [`eqx_ensemble.Each`][] and
    `Ensemble` are subclasses. A subclass is an `equinox.Module` with the two methods `per_member` and `one`.

    ```python
    class Standardised(ee.AbstractPerMember):  # every member has its own mean and scale of one shared input
        x: jax.Array
        mean: jax.Array
        scale: jax.Array

        def per_member(self):
            return self.mean, self.scale

        def one(self, part):
            mean, scale = part
            return (self.x - mean) / scale

    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, key=key)
    ensemble(Standardised(jnp.ones(3), jnp.zeros((4, 3)), jnp.ones((4, 3)))).shape  # (4, 1)
    ```
    """

    @abc.abstractmethod
    def per_member(self) -> PyTree:
        """Returns the values of all members: a tree whose array leaves have the leading `members` axis."""

    @abc.abstractmethod
    def one(self, part: PyTree) -> Any:
        """Returns what the function of one member receives, given that member's part of `per_member()`."""


class Each(AbstractPerMember):
    """Marks an input that has one value per member; inputs without the mark are shared by all members.

    The mark is never guessed from a size: `ensemble(x)` gives every member the same `x`, also when the leading
    axis of `x` happens to be as long as the ensemble.

    ```python
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, key=key)
    xs = jnp.ones((4, 3))
    ensemble(ee.Each(xs)).shape  # (4, 1): member i sees xs[i]
    ```

    **Arguments:**

    - `value`: any PyTree whose array leaves carry the `members` axis. Leaves that are not arrays are shared.
    - `axis`: where that axis stands in every array leaf.

    **Raises:** `MemberMismatchError` when the array leaves disagree on the number of members.
    """

    value: PyTree
    axis: int = eqx.field(static=True, default=0)

    def __check_init__(self):
        _check.per_member_leaves(self.value, axis=self.axis, name="Each")

    def per_member(self) -> PyTree:
        """The value with the `members` axis in front."""
        if self.axis == 0:
            return self.value
        return jax.tree.map(lambda x: jnp.moveaxis(x, self.axis, 0) if is_array(x) else x, self.value)

    def one(self, part: PyTree) -> Any:
        """The member's own value."""
        return part


class Batch(eqx.Module):
    """Marks an input of an ensemble's call that holds many examples: the member is mapped over them.

    Members are functions of one example, so `ensemble(x)` takes one `x`. `ensemble(Batch(xs))` saves the second
    `jax.vmap`: every member sees every example. Marks combine: `Each(Batch(xs))` is a batch of its own for each
    member, with shape `(members, batch, ...)`.

    ```python
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, key=key)
    ensemble(ee.Batch(jnp.ones((4, 3)))).shape  # (4, 4, 1): members, batch, out
    ```

    **Arguments:**

    - `value`: any PyTree whose array leaves carry a batch axis. Leaves that are not arrays are shared.
    - `axis`: where that axis stands in every array leaf (counted without the `members` axis).
    """

    value: PyTree
    axis: int = eqx.field(static=True, default=0)

    def __check_init__(self):
        _check.batch_axis(self.value, self.axis)


def is_array(x: Any) -> TypeGuard[jax.Array | np.ndarray]:
    """Whether a leaf is a JAX or NumPy array: the leaves that can carry an axis."""
    return isinstance(x, jax.Array | np.ndarray)


def map_each(own: Callable[[PyTree], Any], tree: PyTree, *, shared: Callable[[Any], Any] = lambda x: x) -> PyTree:
    """The tree with `own(value)` in place of every `Each` and `shared(leaf)` in place of every other leaf.

    A value comes with its `members` axis in front, wherever its mark says that it stands.
    """
    is_each = lambda x: isinstance(x, Each)
    return jax.tree.map(lambda x: own(x.per_member()) if is_each(x) else shared(x), tree, is_leaf=is_each)


def is_per_member(x: Any) -> bool:
    """Whether a node holds one value per member: a mark, an ensemble, or the state of stateful members."""
    return isinstance(x, AbstractPerMember | eqx.nn.State)


def split_members(tree: PyTree, *, name: str) -> tuple[PyTree, Callable[[PyTree], PyTree], _check.Size]:
    """Parts `tree` into what is mapped over members and what is shared.

    **Returns:** the tree to map, with the `members` axis in front of its array leaves; the function that turns one
    member's part of it into that member's view of `tree`; and the number of members.
    """
    nodes, treedef = jax.tree.flatten(tree, is_leaf=is_per_member)
    marked = {i: node for i, node in enumerate(nodes) if is_per_member(node)}
    parts = {i: node.per_member() if isinstance(node, AbstractPerMember) else node for i, node in marked.items()}
    num_members = _check.one_member_count(parts, tree, name=name)
    _check.check_integers_fit(parts, argument="", name=name)

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

    `fn` sees and returns any PyTree: functions, strings and the like go around `jax.vmap` and `jax.lax.map`.
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
    """Calls `fn`, mapped over the examples of every argument marked `Batch`; called once when there is none."""
    nodes, treedef = jax.tree.flatten((args, kwargs), is_leaf=lambda x: isinstance(x, Batch))
    marked = {i: node for i, node in enumerate(nodes) if isinstance(node, Batch)}
    if not marked:
        return fn(*args, **kwargs)
    parts = {i: _batch_first(node) for i, node in marked.items()}
    _check.one_batch_size(parts.values())
    _check.check_integers_fit(parts, argument="", name="Batch")

    def call(one_part: dict[int, PyTree]) -> Any:
        args, kwargs = jax.tree.unflatten(treedef, [one_part.get(i, node) for i, node in enumerate(nodes)])
        return fn(*args, **kwargs)

    return over_leading_axis(lambda f, arrays: jax.vmap(f)(arrays), call, parts)


def as_array(values: Any, *, path: str, name: str) -> jax.Array:
    """Values as a jax array of a type of its own; integers that would wrap around are refused."""
    _check.check_integers_fit(values, argument=path, name=name)
    try:
        return strongly_typed(jnp.asarray(values))
    except OverflowError as error:  # Python's own integers
        raise ValueError(_check.too_large(values, path=path, name=name)) from error
    except TypeError as error:
        raise TypeError(f"`{name}` needs numbers at `{path}`, got {_check.describe(values)}.") from error


def strongly_typed(tree: PyTree) -> PyTree:
    """A tree whose floating-point jax arrays have types of their own.

    `jnp.full(3, 0.1)` and `jnp.asarray(2.0)` are weakly typed: beside bfloat16 they count as bfloat16. What a compiled
    program or a file gives back is not, so that one and the same array would calculate otherwise afterwards. Integers
    decide no other array's precision, and stay as they are.
    """
    is_weak = lambda x: getattr(x, "weak_type", False) and jnp.issubdtype(x.dtype, jnp.inexact)
    return jax.tree.map(lambda x: x.astype(x.dtype) if is_weak(x) else x, tree)


def where_members(chosen: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """`x` for the members that `chosen` `(members,)` says, else `y`; both carry the leading `members` axis."""
    return jnp.where(jnp.reshape(jnp.asarray(chosen), (-1,) + (1,) * (x.ndim - 1)), x, y)


def _batch_first(node: Batch) -> PyTree:
    if node.axis == 0:
        return node.value
    return jax.tree.map(lambda x: jnp.moveaxis(x, node.axis, 0) if is_array(x) else x, node.value)
