"""Marks of inputs: one value per member, or many examples."""

import operator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ._brief import brief_doc
from ._caller import caller
from ._check import MemberMismatchError
from ._foreign import from_foreign_tree
from ._leaves import array_leaves
from ._pytree import PyTree

_STACK = "Stack a list of models first: `stack(models)`."


class Each(eqx.Module):
    """Marks an input that has one value per member; inputs without the mark are shared by all members.

    **Arguments:**

    - `value`: any PyTree whose array leaves have the `members` axis. Leaves that are not arrays are shared.
    - `axis`: the position of that axis in every array leaf; it is moved to the front.

    **Raises:** `MemberMismatchError` if array leaves lack the axis or disagree on the number of members; `TypeError`
    for a list of models, whose weights may agree on their first axis by chance.

    ```python
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, key=key)
    xs = jnp.ones((4, 3))
    ensemble(ee.Each(xs)).shape  # (4, 1): member i sees xs[i]
    ```
    """

    value: PyTree

    __pdoc__ = brief_doc

    def __init__(self, value: PyTree, axis: int = 0) -> None:
        self.value = _axis_first(from_foreign_tree(value, "value"), operator.index(axis), "Each")
        if isinstance(value, list) and any(isinstance(x, eqx.Module) for x in value):
            raise TypeError(
                f"`Each` needs a PyTree whose arrays have the members axis, got a list of models.\n{_STACK}"
            )
        sizes = {x.shape[0]: path for path, x in array_leaves(self.value)}
        if len(sizes) != 1:
            found = ", ".join(f"{size} at `{path}`" for size, path in sizes.items()) or "no array"
            raise MemberMismatchError(
                f"`Each` needs arrays that agree on the number of members; got {found}.\n{_STACK}"
            )

    @property
    def num_members(self) -> int:
        """The number of members."""
        return array_leaves(self.value)[0][1].shape[0]


class Shared(eqx.Module):
    """Marks a part of a training state that all members share: its arrays have no `members` axis."""

    value: PyTree


class Batch(eqx.Module):
    """Marks an input with many examples, over which each member is mapped.

    Every member sees every example. `Each(Batch(xs))` is a separate batch for each member, `(members, batch, ...)`.

    **Arguments:**

    - `value`: any PyTree whose array leaves have a batch axis. Leaves that are not arrays are shared.
    - `axis`: the position of that axis in every array leaf, not counting the `members` axis.

    ```python
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, key=key)
    ensemble(ee.Batch(jnp.ones((4, 3)))).shape  # (4, 4, 1): members, batch, out
    ```
    """

    value: PyTree = eqx.field(converter=lambda value: from_foreign_tree(value, "value"))
    axis: int = eqx.field(static=True, default=0)

    __pdoc__ = brief_doc

    def __check_init__(self) -> None:
        _axis_first(self.value, self.axis, "Batch")


def _axis_first(tree: PyTree, axis: int, name: str) -> PyTree:
    for path, x in array_leaves(tree):
        if not -x.ndim <= axis < x.ndim:
            raise MemberMismatchError(f"`{name}` needs arrays with an axis {axis}; at `{path}`: got shape {x.shape}.")
    return jax.tree.map(lambda x: jnp.moveaxis(x, axis, 0) if eqx.is_array(x) and axis else x, tree)


def over_batch(fn: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls `fn`, mapped over the examples of the arguments marked `Batch`; without any, calls it once."""
    is_batch = lambda x: isinstance(x, Batch)
    nodes, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_batch)
    marked = {i: node for i, node in enumerate(nodes) if is_batch(node)}
    if not marked:
        return fn(*args, **kwargs)
    parts = {i: _axis_first(node.value, node.axis, "Batch") for i, node in marked.items()}
    sizes = {x.shape[0] for x in jax.tree.leaves(parts) if eqx.is_array(x)}
    if len(sizes) != 1:
        raise ValueError(f"`Batch` inputs of one call need equally many examples; `{caller()}` got {sorted(sizes)}.")

    def call(part: dict[int, PyTree]) -> Any:
        args, kwargs = jax.tree.unflatten(treedef, [part.get(i, node) for i, node in enumerate(nodes)])
        return fn(*args, **kwargs)

    return eqx.filter_vmap(call)(parts)
