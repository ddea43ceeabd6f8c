"""Members and rows on the devices of a mesh."""

from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._check import is_key
from .._pytree import PyTree


def sharding(mesh: Mesh, *axes: Any) -> NamedSharding:
    """The sharding of arrays whose leading axes are split over `axes` of the mesh; without any, replicated."""
    return NamedSharding(mesh, PartitionSpec(*axes))


def shard_members(tree: PyTree, mesh: Mesh) -> PyTree:
    """Puts each member of arrays `(members, ...)` on its device. Their number is a multiple of the devices."""
    return jax.tree.map(lambda x: put(x, sharding(mesh, "members")) if eqx.is_array(x) else x, tree)


def replicate(tree: PyTree, mesh: Mesh) -> PyTree:
    """Puts arrays on every device."""
    return jax.tree.map(lambda x: put(x, sharding(mesh)) if eqx.is_array(x) else x, tree)


def put(x: Any, where: NamedSharding) -> jax.Array:
    """The array with this sharding. Each process passes the whole of it."""
    if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(where, x.ndim):
        return x
    if jax.process_count() == 1 or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return jax.device_put(x, where)
    if is_key(x):  # which JAX cannot put on devices of other processes
        return jax.random.wrap_key_data(put(jax.random.key_data(x), where), impl=jax.random.key_impl(x))
    x = np.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype))
    return jax.make_array_from_callback(x.shape, where, lambda index: x[index])


def constrain_rows(batch: PyTree) -> PyTree:
    """Inside a program: the rows of one member's batch on the devices of the axis `data`, if they divide evenly."""
    raise NotImplementedError
