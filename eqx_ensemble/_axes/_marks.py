import abc
import dataclasses
import functools as ft
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._brief import brief_doc
from .._check import check_axis
from .._foreign import from_foreign_tree
from .._pytree import PyTree
from ._check import check_has_axis, check_member_axis, check_no_models


class AbstractPerMember(eqx.Module):
    """An argument with one value per member: subclass it for values that a plain array does not describe.

    [`eqx_ensemble.map_members`][] and calls of an [`eqx_ensemble.Ensemble`][] map over every node of this class.

    ```python
    class Scaled(ee.AbstractPerMember):  # one shared input, a scale for each member
        x: jax.Array
        scale: jax.Array

        def per_member(self):
            return self.scale

        def one(self, part):
            return self.x * part


    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, key=key)
    ensemble(Scaled(jnp.ones(3), jnp.ones(4))).shape  # (4, 1)
    ```
    """

    @abc.abstractmethod
    def per_member(self) -> PyTree:
        """The values of all members: a tree whose array leaves have the leading `members` axis."""

    @abc.abstractmethod
    def one(self, part: PyTree) -> Any:
        """The argument of one member, given its part of `per_member()`."""


class Each(AbstractPerMember):
    """Marks an input that has one value per member; inputs without the mark are shared by all members.

    **Arguments:**

    - `value`: any PyTree whose array leaves have the `members` axis. Leaves that are not arrays are shared.
    - `axis`: the position of that axis in every array leaf.

    **Raises:** `MemberMismatchError` if array leaves lack the axis or disagree on the number of members; `TypeError` if
    no leaf is an array, and for a list of models.

    ```python
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, key=key)
    xs = jnp.ones((4, 3))
    ensemble(ee.Each(xs)).shape  # (4, 1): member i sees xs[i]
    ```
    """

    value: PyTree = eqx.field(converter=lambda value: from_foreign_tree(value, "value"))
    axis: int = eqx.field(static=True, default=0)

    __pdoc__ = brief_doc

    def __check_init__(self) -> None:
        check_no_models(self.value)
        check_member_axis(self.value, axis=self.axis)

    if not TYPE_CHECKING:  # type checkers know the attributes

        def __getattr__(self, name: str) -> Any:
            known = hasattr(vars(self).get("value"), name)
            hint = f"; what it marks is its `value`: write `.value.{name}`." if known else "."
            raise AttributeError(f"An `Each` has no attribute `{name}`{hint}")

    def per_member(self) -> PyTree:
        """The value with the `members` axis in front."""
        if self.axis == 0:
            return self.value
        return jax.tree.map(lambda x: jnp.moveaxis(x, self.axis, 0) if is_array(x) else x, self.value)

    def one(self, part: PyTree) -> Any:
        """The member's own value."""
        return part


class Batch(eqx.Module):
    """Marks an input with many examples, over which each member is mapped.

    Every member sees every example. `Each(Batch(xs))` is a separate batch for each member, `(members, batch, ...)`.

    **Arguments:**

    - `value`: any PyTree whose array leaves have a batch axis. Leaves that are not arrays are shared.
    - `axis`: the position of that axis in every array leaf, not counting the `members` axis.

    **Raises:** `ValueError` if an array leaf lacks the axis.

    ```python
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, key=key)
    ensemble(ee.Batch(jnp.ones((4, 3)))).shape  # (4, 4, 1): members, batch, out
    ```
    """

    value: PyTree = eqx.field(converter=lambda value: from_foreign_tree(value, "value"))
    axis: int = eqx.field(static=True, default=0)

    __pdoc__ = brief_doc

    def __check_init__(self) -> None:
        check_has_axis(self.value, check_axis(self.axis, "axis"), "axis")


def is_array(x: Any) -> TypeGuard[jax.Array | np.ndarray]:
    """Whether a leaf is a JAX or NumPy array, and so can carry an axis."""
    return isinstance(x, jax.Array | np.ndarray)


def is_per_member(x: Any) -> bool:
    """Whether a node holds one value per member: a mark, an ensemble, or the state of stateful members."""
    return isinstance(x, AbstractPerMember | eqx.nn.State)


# Marks of the fields of a Module that holds many members. Those without a mark hold one value per member.


class Follower(NamedTuple):
    """A field that changes with the members, and is no array of one value per member.

    `join(modules)`, `take(module, positions)` and `renumber(module, new ids by old ones)` return its value; without
    the latter two it stays as it is.
    """

    join: Callable[[Sequence[Any]], Any]
    take: Callable[[Any, np.ndarray], Any] | None = None
    renumber: Callable[[Any, Mapping[int, int]], Any] | None = None


_MARK = "members"
SHARED = {_MARK: "shared"}
"""The metadata of a field that all members share, which must be equal where members are concatenated."""


def follows(join: Callable[..., Any], **functions: Callable[..., Any]) -> dict[str, Any]:
    """The metadata of a field that is a `Follower`."""
    return {_MARK: Follower(join, **functions)}


@ft.cache
def marks_of(kind: type) -> dict[str, Any]:
    """The marks of the fields of a class, by name."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return {field.name: field.metadata[_MARK] for field in fields if _MARK in field.metadata}


def has_marks(node: Any) -> bool:
    """Whether a node is a Module some of whose fields are marked."""
    return isinstance(node, eqx.Module) and bool(marks_of(type(node)))
