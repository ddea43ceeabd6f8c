"""Members and data on the devices of a mesh.

Members lie on the axis `members`, and the rows of a batch on `data`. In every compiled program members are padded to a
multiple of their axis, because JAX silently replicates what does not divide evenly; between programs they lie on every
device then.
"""

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from . import _axes
from ._caller import caller
from ._check import check_positive_int, check_sequence, is_key, is_traced, kind_text
from ._pytree import PyTree
from ._warnings import warn
from .distributed._engine import all_gather

_AXES = "members", "data"
FREE = PartitionSpec.UNCONSTRAINED


def make_mesh(members: int | None = None, data: int = 1, *, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of devices with the axes `members` and `data`, for the `mesh=` of other functions.

    **Arguments:**

    - `members`: the number of devices over which members are sharded; by default all that `data` leaves.
    - `data`: the number of devices that share the rows of a batch, and sum their gradients at every step. They are of
        one host as far as they fit there.
    - `devices`: the devices, of which the first `members * data` are used; by default those of all processes.

    **Returns:** a `jax.sharding.Mesh` whose axes are of the type `Auto`.

    **Raises:** `ValueError` if there are too few devices, or if those used include none of some process; `TypeError`
    for arguments of another type.

    ```python
    mesh = ee.make_mesh()  # all devices, for different members
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 8, mesh=mesh, key=key)
    ensemble.stacked.layers[0].weight.sharding.spec  # PartitionSpec('members',)
    ```
    """
    check_positive_int(data, "data")
    if members is not None:
        check_positive_int(members, "members")
    if devices is None:
        found = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    else:
        found = check_sequence(devices, "devices", of="devices")
        if other := [x for x in found if not isinstance(x, jax.Device)]:
            raise TypeError(
                f"`make_mesh` needs `devices` to be a list of devices, got {kind_text(other[0])} in it.\n"
                "For example `jax.devices()[:4]`."
            )
    members = max(len(found) // data, 1) if members is None else members
    if members * data > len(found):
        raise ValueError(
            f"`make_mesh` needs members x data = {members} x {data} = {members * data} devices, got {len(found)}.\n"
            'On a CPU, `jax.config.update("jax_num_cpu_devices", n)` before the first use of jax makes n virtual ones.'
        )
    chosen = found[: members * data]
    missing = sorted(set(range(jax.process_count())) - {device.process_index for device in chosen})
    if missing:
        raise ValueError(
            f"`make_mesh` needs devices of all {jax.process_count()} processes, and the first {len(chosen)} include "
            f"none of process {', '.join(map(str, missing))}.\nAsk for more devices, or start fewer processes."
        )
    return Mesh(np.array(chosen).reshape(members, data), _AXES, axis_types=(AxisType.Auto,) * 2)


def _is_members_mesh(mesh: Mesh) -> bool:
    names = mesh.axis_names[:1] == ("members",) and set(mesh.axis_names) <= set(_AXES)
    return names and all(kind == AxisType.Auto for kind in mesh.axis_types)


def _check_mesh(value: Any) -> None:
    hint = "Make one with `make_mesh(members=4, data=2)`."
    if not isinstance(value, Mesh):
        raise TypeError(f"`{caller()}` needs a `jax.sharding.Mesh` as `mesh`, got {kind_text(value)}.\n{hint}")
    if not _is_members_mesh(value):
        axes = zip(value.axis_names, value.axis_types, strict=True)
        found = ", ".join(f"`{name}` ({kind.name})" for name, kind in axes)
        raise ValueError(
            f"`{caller()}` needs a mesh with the axes `members` and, if you like, `data`, of the type `Auto`, which "
            f"`jax.make_mesh` does not make by default; got {found}.\n{hint}"
        )


def warn_of_padding(num_members: int, layout: "Layout") -> None:
    """Warns if members do not divide evenly over their devices."""
    width = layout.width(num_members)
    if width != num_members:
        warn(
            f"{num_members} members do not divide evenly over {layout.members} devices: they are padded to {width}, "
            f"and between compiled programs each device holds all of them.\n{width} members would take the same time."
        )


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where arrays of members and of data lie on a mesh."""

    mesh: Mesh

    @property
    def members(self) -> int:
        """The number of devices over which members are sharded."""
        return self.mesh.shape["members"]

    @property
    def row_parts(self) -> int:
        """The number of devices that share the rows of a batch."""
        return self.mesh.shape.get("data", 1)

    def width(self, num_members: int) -> int:
        """The number of members after padding."""
        return self.per_device(num_members) * self.members

    def per_device(self, num_members: int) -> int:
        """The number of members that a device computes."""
        return -(-num_members // self.members)

    def sharding(self, *axes: Any) -> NamedSharding:
        """The sharding of an array whose leading axes are split over `axes` of the mesh; without any, replicated."""
        while axes and axes[-1] is None:  # for JAX's caches, `P("members", None)` is not `P("members")`
            axes = axes[:-1]
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def of_rows(self, num_rows: int, num_members: int | None = None) -> NamedSharding:
        """The sharding of data `(rows, ...)`, or of members' own `(members, rows, ...)`."""
        rows = "data" if self.row_parts > 1 and num_rows % self.row_parts == 0 else None
        return self.sharding(rows) if num_members is None else self.of_members(num_members, rows)

    def of_members(self, num_members: int, *rest: Any) -> NamedSharding:
        """The sharding of arrays `(members, ...)` between compiled programs."""
        return self.sharding("members" if num_members % self.members == 0 else None, *rest)


def spans_processes(layout: Layout | None) -> bool:
    """Whether the mesh contains devices of other processes."""
    return layout is not None and any(d.process_index != jax.process_index() for d in layout.mesh.devices.flat)


def layout_for(mesh: Any, tree: PyTree = None) -> Layout | None:
    """The layout on a mesh, checked; without one, on the mesh on which the members `tree` lie, if any.

    Arrays on a mesh with other axes are the user's own affair: they are used where they are.
    """
    if mesh is not None:
        _check_mesh(mesh)
        return Layout(mesh)
    for x in jax.tree.leaves(tree):
        sharding = getattr(x, "sharding", None) if isinstance(x, jax.Array) and not is_traced(x) else None
        found = sharding.mesh if isinstance(sharding, NamedSharding) else None
        if isinstance(found, Mesh) and found.size > 1 and _is_members_mesh(found):
            return Layout(found)
    return None


# Outside of compiled programs: arrays are put on their devices.


def pad_members(tree: PyTree, layout: Layout) -> PyTree:
    """Pads arrays `(members, ...)` with copies of the last member to a multiple of the axis."""
    return jax.tree.map(lambda x: _pad(x, layout.width(x.shape[0])) if _axes.is_array(x) else x, tree)


def _pad(x: Any, width: int) -> Any:
    if x.shape[0] == width:
        return x
    indices = np.minimum(np.arange(width), x.shape[0] - 1)
    return x[indices] if isinstance(x, np.ndarray) else jnp.take(x, indices, axis=0)


def shard_members(tree: PyTree, layout: Layout) -> PyTree:
    """Puts each member of arrays `(members, ...)` on its device, if they divide evenly, and else on every device."""
    return _put_leaves(tree, lambda x: layout.of_members(x.shape[0]))


def replicate(tree: PyTree, layout: Layout) -> PyTree:
    """Puts arrays on every device."""
    return _put_leaves(tree, lambda x: layout.sharding())


def shard_data(tree: PyTree, layout: Layout, *, whole: bool = False) -> PyTree:
    """Shards data `(rows, ...)`, unless its rows stay `whole`; parts marked `Each` are sharded with their members."""
    rows = lambda x, axis: 1 if whole else x.shape[axis]  # one row lies on every device
    shared = lambda x: _put_leaves(x, lambda x: layout.of_rows(rows(x, 0)))
    own = lambda x: _put_leaves(x, lambda x: layout.of_rows(rows(x, 1), x.shape[0]))
    return _axes.map_each(lambda value: _axes.Each(own(value)), tree, shared=shared)


def _put_leaves(tree: PyTree, sharding: Any) -> PyTree:
    check_same_in_processes(jax.tree.leaves(tree))
    return jax.tree.map(lambda x: put(x, sharding(x)) if _axes.is_array(x) else x, tree)


def put(x: Any, sharding: NamedSharding) -> jax.Array:
    """The array with this sharding. Each process passes the complete array; equality is not checked here."""
    if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
        return x
    if jax.process_count() == 1:
        return jax.device_put(x, sharding)
    if is_key(x):  # which JAX cannot put on devices of other processes
        return jax.random.wrap_key_data(put(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.device_put(x, sharding)
    x = np.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype))  # `device_put` would send all of it to all processes
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def check_same_in_processes(leaves: list[Any]) -> None:
    """Checks that every process passes the same arrays."""
    if jax.process_count() == 1:
        return
    passed = [x for x in leaves if _axes.is_array(x) and (isinstance(x, np.ndarray) or x.is_fully_addressable)]
    digest = 0
    for x in passed:
        x = np.ascontiguousarray(jax.random.key_data(x) if is_key(x) else x)
        digest = zlib.crc32(x.reshape(-1).view(np.uint8).data, digest)
    if passed and len(set(all_gather(np.uint32(digest)).tolist())) > 1:
        raise ValueError(
            "Processes passed different numbers for the same arrays: data, ensembles and keys have to be the same in "
            "all of them.\nRead and draw them from the same files and seeds. Where each process reads rows of its own, "
            "pass an iterable of batches made by `jax.make_array_from_process_local_data`."
        )


# Inside compiled programs: the compiler is told where arrays are to lie.


def constrain_rows(batch: PyTree, layout: Layout) -> PyTree:
    """Shards the rows `(batch, ...)` of one member's batch over devices, if they divide evenly."""
    if layout.row_parts == 1:
        return batch
    split = lambda x: jax.lax.with_sharding_constraint(x, layout.of_rows(x.shape[0]))
    fits = lambda x: _axes.is_array(x) and x.ndim and x.shape[0] % layout.row_parts == 0
    return jax.tree.map(lambda x: split(x) if fits(x) else x, batch)


def constrain_members(tree: PyTree, layout: Layout, rest: Any = FREE) -> PyTree:
    """Shards arrays of members, padding included; the compiler chooses the sharding of other axes, unless `rest` is
    `None`, as between programs: with another one the next call would compile again.
    """
    keep = lambda x: jax.lax.with_sharding_constraint(x, layout.sharding("members", *[rest] * (x.ndim - 1)))
    return jax.tree.map(lambda x: keep(x) if _axes.is_array(x) else x, tree)
