"""The order of a group's members among its parts."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _axes
from .._pytree import PyTree
from ._check_group import check_like_outputs, check_order_fits

if TYPE_CHECKING:
    from ._group import Group


def member_positions(group: "Group") -> dict[str, np.ndarray]:
    """The positions in the group of the members of each part, by its name."""
    of_all, start, positions = np.argsort(np.asarray(group.order)), 0, {}
    sizes = {name: part.num_members for name, part in group.parts.items()}
    check_order_fits(group.order, sum(sizes.values()))
    for name, size in sizes.items():
        positions[name] = of_all[start : start + size]
        start += size
    return positions


def join_members(group: "Group", values: Mapping[str, PyTree], *, name: str) -> PyTree:
    """Joins the parts' values `(members, ...)` in the order of the group."""
    check_like_outputs(values, name=name)
    check_order_fits(group.order, group.num_members)
    return join_values([values[part] for part in group.parts], np.asarray(group.order))


def join_values(values: Sequence[PyTree], order: np.ndarray) -> PyTree:
    """Concatenates trees of arrays `(members, ...)`, and permutes the members by `order`."""
    is_ordered = np.array_equal(order, np.arange(len(order)))
    if len(values) == 1 and is_ordered:
        return values[0]

    def join(*xs: Any) -> Any:
        if not _axes.is_array(xs[0]):
            return xs[0]
        joined = (np if all(isinstance(x, np.ndarray) for x in xs) else jnp).concatenate(xs)
        return joined if is_ordered else joined[order]

    return jax.tree.map(join, *values)
