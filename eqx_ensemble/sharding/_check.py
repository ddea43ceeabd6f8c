"""Checks of meshes, and of what is sharded over them."""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from .._caller import caller
from .._check import check_sequence, kind_text
from .._warnings import warn

_AXES = ("members", "data", "model")


def check_num_devices(members: int | None, data: int, model: int, num_devices: int) -> int:
    """Checks that there are enough devices, and returns the size of the axis `members`."""
    of_one = data * model
    if members is None and num_devices < of_one:
        raise ValueError(f"`make_mesh` needs data x model = {data} x {model} devices or more, got {num_devices}.")
    if members is None:
        return num_devices // of_one
    if members * of_one > num_devices:
        raise ValueError(
            f"`make_mesh` needs members x data x model = {members} x {data} x {model} = {members * of_one} devices, "
            f"got {num_devices}.\n"
            'On a CPU, `jax.config.update("jax_num_cpu_devices", n)` before the first use of jax makes n virtual ones.'
        )
    return members


def check_devices(devices: Any) -> list[Any]:
    """Checks a sequence of devices and returns it as a list."""
    listed = check_sequence(devices, "devices", of="devices")
    for device in listed:
        if not isinstance(device, jax.Device):
            raise TypeError(
                f"`make_mesh` needs `devices` to be a list of devices, got {kind_text(device)} in it.\n"
                "For example `jax.devices()[:4]`."
            )
    return listed


def check_mesh(value: Any) -> None:
    """Checks a mesh: the axes `members`, `data` and `model` or the first of them, all of the type `Auto`."""
    hint = "Make one with `make_mesh(members=4, data=2)`."
    if not isinstance(value, Mesh):
        raise TypeError(f"`{caller()}` needs a `jax.sharding.Mesh` as `mesh`, got {kind_text(value)}.\n{hint}")
    if not _has_axes(value):
        names = ", ".join(f"`{axis}`" for axis in value.axis_names)
        raise ValueError(
            f"`{caller()}` needs a mesh with the axes `members`, and `data` and `model` if you like, in this order; "
            f"got {names}.\n{hint}"
        )
    if not is_members_mesh(value):
        raise ValueError(
            f"`{caller()}` needs a mesh whose axes are all of the type `Auto`, which `jax.make_mesh` does not make by "
            f"default, got {value.axis_types}.\n{hint}"
        )


def is_members_mesh(value: Mesh) -> bool:
    """Whether members can be sharded over a mesh."""
    return _has_axes(value) and all(kind == AxisType.Auto for kind in value.axis_types)


def _has_axes(value: Mesh) -> bool:
    return value.axis_names[:1] == ("members",) and set(value.axis_names) <= set(_AXES)


def check_shard_rule(shard: Any, mesh: Mesh | None) -> None:
    """Checks a rule that splits members over the axis `model` of a mesh."""
    if shard is None:
        return
    if not callable(shard):
        raise TypeError(
            f"`build` needs `shard` as a function of an array's path, shape and number of parts, got "
            f"{kind_text(shard)}."
        )
    if mesh is None or mesh.shape.get("model", 1) == 1:
        raise TypeError(
            "`build` takes `shard` with a mesh whose axis `model` has several devices: `mesh=make_mesh(model=2)`."
        )


def check_spec(value: Any, path: str, shape: tuple[int, ...], parts: int) -> None:
    """Checks the spec that a rule returned for one array of a member."""
    if not isinstance(value, PartitionSpec):
        raise TypeError(f"`shard` needs to return a `PartitionSpec` or `None`, at `{path}` it returned {value!r}.")
    if any(axis not in (None, "model") for axis in value) or sum(axis == "model" for axis in value) > 1:
        raise ValueError(
            f'`shard` may name the axis "model" once, at `{path}` it returned {value}.\n'
            "The members axis is not part of it."
        )
    if len(value) > len(shape):
        raise ValueError(f"`shard` returned {value} for `{path}`, which has {len(shape)} axes in one member: {shape}.")
    size = shape[value.index("model")]
    if size % parts:
        raise ValueError(
            f"`shard` returned {value} for `{path}`, whose axis of {size} does not divide into {parts} parts: {shape}."
        )


def check_local_rows(rows: Any, expected: int, num_rows: int) -> None:
    """Checks the rows that this process passes."""
    for keys, x in jax.tree_util.tree_leaves_with_path(rows):
        path = jax.tree_util.keystr(keys)
        if np.ndim(x) == 0 or len(x) != expected:
            raise ValueError(
                f"`sharding.batch` needs this process's {expected} of {num_rows} rows, given by "
                f"`sharding.local_rows(mesh, {num_rows})`, got {np.shape(x)} at `{path or '<root>'}`."
            )


def warn_of_padding(num_members: int, parts: int) -> None:
    """Warns if members do not divide evenly over the devices of the axis `members`."""
    width = -(-num_members // parts) * parts
    if width != num_members:
        warn(
            f"{num_members} members do not divide evenly over {parts} devices: they are padded to {width}, and between "
            f"compiled programs some devices hold the same members.\n{width} members would take the same time."
        )


def check_member_ids(tree: Any) -> jax.Array:
    """Checks that a tree holds an ensemble, a training state or a run, and returns the ids of its members."""
    has_ids = lambda x: isinstance(getattr(x, "ids", None), jax.Array)
    for node in jax.tree.leaves(tree, is_leaf=has_ids):
        if has_ids(node):
            return node.ids
    raise TypeError(f"`{caller()}` needs an ensemble, a training state or a run, got {kind_text(tree)}.")
