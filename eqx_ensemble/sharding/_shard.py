"""Sharding of the arrays of members and of data over a mesh, outside compiled programs."""

import functools as ft
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .. import _axes
from .._caller import caller
from .._check import check_integers_fit, is_integer, is_key
from .._foreign import take_in
from .._pytree import PyTree
from ..distributed._engine import all_gather
from ._check import check_local_rows, check_mesh
from ._layout import Layout, leaf_specs


def local_rows(mesh: Mesh, num_rows: int) -> slice:
    """The rows of a batch that this process must load, because its devices process them.

    **Arguments:**

    - `mesh`: the mesh, from [`eqx_ensemble.make_mesh`][].
    - `num_rows`: the number of rows of the global batch.

    **Returns:** a slice of consecutive rows.

    **Raises:** `ValueError` if rows do not divide evenly over the mesh.
    """
    check_mesh(mesh)
    layout = Layout(mesh)
    if not is_integer(num_rows) or num_rows < 1:
        raise TypeError(f"`{caller()}` needs the number of rows of a batch, got {num_rows!r}.")
    if num_rows % layout.row_parts:
        raise ValueError(
            f"`{caller()}` needs rows that divide over data x model = {layout.row_parts} devices, got {num_rows}."
        )
    indices = _rows_of(layout, num_rows).addressable_devices_indices_map((num_rows,)).values()
    bounds = [index[0].indices(num_rows)[:2] for index in indices if index is not None]
    return slice(min(start for start, _ in bounds), max(stop for _, stop in bounds))


def batch(mesh: Mesh, rows: PyTree, num_rows: int) -> PyTree:
    """Assembles a global batch, sharded over the devices of all processes, from the rows of each process.

    For loaders that pass batches to [`eqx_ensemble.fit`][] as an iterable.

    **Arguments:**

    - `mesh`: the mesh, from [`eqx_ensemble.make_mesh`][].
    - `rows`: any PyTree of this process's rows, [`eqx_ensemble.sharding.local_rows`][], each array `(local rows, ...)`.
    - `num_rows`: the number of rows of the global batch.

    **Returns:** the same tree of arrays `(num_rows, ...)`.

    **Raises:** `ValueError` if rows do not divide evenly over the mesh, or for another number of local rows.

    ```python
    mesh = ee.make_mesh()
    own = ee.sharding.local_rows(mesh, 32)  # slice(0, 32) in a single process
    x = ee.sharding.batch(mesh, np.ones((32, 3))[own], 32)  # (32, 3), over all processes
    ```
    """
    check_mesh(mesh)
    layout = Layout(mesh)
    own = local_rows(mesh, num_rows)
    rows = take_in(rows, "rows")
    check_local_rows(rows, own.stop - own.start, num_rows)
    check_integers_fit(rows, argument="rows")

    def globalise(x: Any) -> jax.Array:
        x = np.asarray(x)
        sharding = _rows_of(layout, num_rows)
        return jax.make_array_from_process_local_data(sharding, x, (num_rows, *x.shape[1:]))

    return jax.tree.map(globalise, rows)


def _rows_of(layout: Layout, num_rows: int) -> Any:
    return layout.sharding(layout.row_axes(num_rows))


def pad_members(tree: PyTree, layout: Layout) -> PyTree:
    """Pads arrays `(members, ...)` with copies of the last member to a multiple of the axis."""
    return jax.tree.map(lambda x: _pad(x, layout.width(x.shape[0])) if _axes.is_array(x) else x, tree)


def shard_members(tree: PyTree, layout: Layout) -> PyTree:
    """Shards arrays `(members, ...)`: each member on one device, or its weights over those of `model`.

    Members that do not divide evenly are split into the largest number of parts that fits, each replicated on several
    devices.
    """
    specs = leaf_specs(tree, layout.weights, skip=1) if layout.weights else None
    return _put_leaves(tree, specs, lambda x, spec: _of_members(layout, x.shape[0], spec))


def replicate(tree: PyTree, layout: Layout) -> PyTree:
    """Replicates arrays on every device."""
    return _put_leaves(tree, None, lambda *_: layout.replication)


def shard_rows(tree: PyTree, layout: Layout) -> PyTree:
    """Shards data `(rows, ...)` if rows divide evenly; parts marked `Each` are sharded with their members."""
    return _put_data(tree, layout, layout.row_axes)


def replicate_rows(tree: PyTree, layout: Layout) -> PyTree:
    """Replicates data `(rows, ...)` on every device; parts marked `Each` are sharded with their members."""
    return _put_data(tree, layout, lambda num_rows: None)


def rows_sharding(layout: Layout, num_rows: int, num_members: int | None = None) -> NamedSharding:
    """The sharding of data `(rows, ...)`, or of `num_members` members `(members, rows, ...)`, as by `shard_rows`."""
    axes = layout.row_axes(num_rows)
    return layout.sharding(axes) if num_members is None else _of_members(layout, num_members, PartitionSpec(axes))


def local_block(sharding: NamedSharding, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The smallest block of an array that contains the parts on all devices of this process."""
    indices = [index for index in sharding.addressable_devices_indices_map(shape).values() if index is not None]
    bounds = [[index[i].indices(size)[:2] for index in indices] for i, size in enumerate(shape)]
    return tuple(slice(min(low for low, _ in axis), max(high for _, high in axis)) for axis in bounds)


def _put_data(tree: PyTree, layout: Layout, row_axes: Callable[[int], Any]) -> PyTree:
    shared = lambda x: _put_leaves(x, None, lambda x, _: layout.sharding(row_axes(x.shape[0])))
    split = lambda x, _: _of_members(layout, x.shape[0], PartitionSpec(row_axes(x.shape[1])))
    return _axes.map_each(lambda value: _axes.Each(_put_leaves(value, None, split)), tree, shared=shared)


def _of_members(layout: Layout, count: int, spec: PartitionSpec | None) -> NamedSharding:
    parts = math.gcd(count, layout.members)
    if parts == layout.members:
        return layout.sharding("members", *(spec or ()))
    mesh, names = _split_axis(layout.mesh, parts)
    return NamedSharding(mesh, PartitionSpec(names, *(spec or ())))


def _put_leaves(tree: PyTree, specs: list | None, sharding: Any) -> PyTree:
    leaves, treedef = jax.tree.flatten(tree)
    check_same_in_processes(leaves)
    specs = [None] * len(leaves) if specs is None else specs
    there = [put(x, sharding(x, s)) if _axes.is_array(x) else x for x, s in zip(leaves, specs, strict=True)]
    return jax.tree.unflatten(treedef, there)


def put(x: Any, sharding: NamedSharding) -> jax.Array:
    """The array with this sharding. Each process passes the complete array; equality is not checked here."""
    if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
        return x
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return _reshard(sharding)(x)
    if is_key(x):
        return jax.random.wrap_key_data(put(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
    if jax.process_count() == 1:
        return jax.device_put(x, sharding)
    x = np.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype))
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def check_same_in_processes(leaves: list[Any]) -> None:
    """Checks that every process passes the same arrays."""
    if jax.process_count() == 1:
        return
    passed = [x for x in leaves if _axes.is_array(x) and (isinstance(x, np.ndarray) or x.is_fully_addressable)]
    if not passed:
        return
    digest = 0
    for x in passed:
        x = np.ascontiguousarray(jax.random.key_data(x) if is_key(x) else x)
        digest = zlib.crc32(x.reshape(-1).view(np.uint8).data, digest)
    digests = all_gather(np.array([digest], np.uint32))
    if not (digests == digests[0]).all():
        raise ValueError(
            "Processes passed different numbers for the same arrays: data, ensembles and keys have to be the same in "
            "all of them.\nRead and draw them from the same files and seeds. Where each process reads rows of its own, "
            "pass an iterable of batches made by `sharding.batch`."
        )


@ft.lru_cache(maxsize=256)
def _reshard(sharding: NamedSharding) -> Any:
    return jax.jit(lambda x: x, out_shardings=sharding)


@ft.lru_cache(maxsize=64)
def _split_axis(mesh: Mesh, parts: int) -> tuple[Mesh, Any]:
    """The mesh with its axis `members` split in two: one of `parts` devices, and one of copies."""
    count, *others = mesh.devices.shape
    devices = mesh.devices.reshape(parts, count // parts, *others)
    names = ("members", "copies", *mesh.axis_names[1:])
    return Mesh(devices, names, axis_types=(mesh.axis_types[0],) * len(names)), "members" if parts > 1 else None


def _pad(x: Any, width: int) -> Any:
    if x.shape[0] == width:
        return x
    indices = np.minimum(np.arange(width), x.shape[0] - 1)
    return x[indices] if isinstance(x, np.ndarray) else jnp.take(x, indices, axis=0)
