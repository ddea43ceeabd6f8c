"""Blocks of members: on a mesh the same number per device, so that all devices work and no weights move."""

from typing import Any

import equinox as eqx
import jax
import numpy as np

from .._pytree import PyTree
from ..sharding._constrain import constrain_members
from ..sharding._layout import Layout


def members_of_device(num_members: int, layout: Layout | None) -> int:
    """The number of members that a device computes."""
    return num_members if layout is None else layout.per_device(num_members)


def blocks_of_members(num_members: int, size: int, layout: Layout | None) -> list[slice | np.ndarray]:
    """The positions of all members in blocks of `size` members per device."""
    own = members_of_device(num_members, layout)
    if size >= own:
        return [slice(0, num_members)]
    if layout is None:
        return [slice(start, start + size) for start in range(0, num_members, size)]
    first = own * np.arange(layout.members)[:, None]
    blocks = [first + np.arange(start, min(start + size, own)) for start in range(0, own, size)]
    return [block[block < num_members] for block in blocks]  # the others are padding


def take_block(tree: PyTree, positions: np.ndarray, layout: Layout) -> PyTree:
    """Arrays `(members, ...)` of a block, each on the device that holds it where members divide evenly."""
    (num_members,) = {x.shape[0] for x in jax.tree.leaves(tree) if eqx.is_array(x)}
    if num_members % layout.members > 0:
        return _take(tree, positions)
    return _slice_devices(tree, positions[0], len(positions) // layout.members, layout)


@eqx.filter_jit
def _take(tree: PyTree, positions: Any) -> PyTree:
    return jax.tree.map(lambda x: x[positions] if eqx.is_array(x) else x, tree)


@eqx.filter_jit
def _slice_devices(tree: PyTree, start: Any, size: int, layout: Layout) -> PyTree:
    arrays, rest = eqx.partition(tree, eqx.is_array)

    def slice_devices(x: jax.Array) -> jax.Array:
        by_device = x.reshape(layout.members, -1, *x.shape[1:])
        some = jax.lax.dynamic_slice_in_dim(by_device, start, size, 1)
        return some.reshape(-1, *x.shape[1:])

    return eqx.combine(constrain_members(jax.tree.map(slice_devices, arrays), layout), rest)
