"""Members and rows on the devices of a mesh."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ._caller import caller
from ._check import check_positive_int
from ._leaves import is_key, kind_text
from ._pytree import PyTree

_AXES = "members", "data"


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
        found = list(devices)
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


def sharding(mesh: Mesh, *axes: Any) -> NamedSharding:
    """The sharding of arrays whose leading axes are split over `axes` of the mesh; without any, replicated."""
    return NamedSharding(mesh, PartitionSpec(*axes))


def shard_members(tree: PyTree, mesh: Mesh) -> PyTree:
    """Puts each member of arrays `(members, ...)` on its device. Their number is a multiple of the devices."""
    return jax.tree.map(lambda x: put(x, sharding(mesh, "members")) if eqx.is_array(x) else x, tree)


def replicate(tree: PyTree, mesh: Mesh) -> PyTree:
    """Puts arrays on every device."""
    return jax.tree.map(lambda x: put(x, sharding(mesh)) if eqx.is_array(x) else x, tree)


def pad_members(tree: PyTree, num_members: int, mesh: Mesh) -> PyTree:
    """Arrays `(members, ...)`, filled with the last member up to a multiple of the devices."""
    width = -(-num_members // mesh.shape["members"]) * mesh.shape["members"]
    index = np.minimum(np.arange(width), num_members - 1)
    pad = lambda x: jnp.take(x, index, axis=0) if eqx.is_array(x) else x
    return tree if width == num_members else jax.tree.map(pad, tree)


def put(x: Any, where: NamedSharding) -> jax.Array:
    """The array with this sharding. Each process passes the whole of it."""
    if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(where, x.ndim):
        return x
    if jax.process_count() == 1:
        return jax.device_put(x, where)
    if is_key(x):  # which JAX cannot put on devices of other processes
        return jax.random.wrap_key_data(put(jax.random.key_data(x), where), impl=jax.random.key_impl(x))
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.device_put(x, where)
    x = np.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype))
    return jax.make_array_from_callback(x.shape, where, lambda index: x[index])


def rows_of_mesh(mesh: Mesh | None) -> NamedSharding | None:
    """Where the rows of a batch lie, if several devices share them."""
    return None if mesh is None or mesh.shape.get("data", 1) == 1 else sharding(mesh, "data")


def mesh_of(tree: PyTree) -> Mesh | None:
    """The mesh over which the members of a tree are split, or `None`."""
    for x in jax.tree.leaves(tree):
        where = x.sharding if isinstance(x, jax.Array) else None
        if isinstance(where, NamedSharding) and where.spec[:1] == ("members",) and is_mesh(where.mesh):
            return where.mesh  # pyright: ignore[reportReturnType]
    return None


def is_mesh(mesh: Any) -> bool:
    """Whether it is a mesh as of `make_mesh`."""
    names = mesh.axis_names if isinstance(mesh, Mesh) else ()
    is_auto = lambda: all(kind == AxisType.Auto for kind in mesh.axis_types)
    return names[:1] == ("members",) and set(names) <= set(_AXES) and is_auto()


def check_mesh(mesh: Any) -> None:
    """Raises unless it is a mesh of `make_mesh`: `jax.make_mesh` makes axes of another type by default."""
    if mesh is not None and not is_mesh(mesh):
        raise TypeError(
            f"`{caller()}` needs a mesh with the axis `members`, and optionally `data`, of type `Auto`; got "
            f"{mesh!r}.\nMake one with `make_mesh()`, of all devices."
        )
