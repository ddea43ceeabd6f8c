import warnings
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from ._leaves import kind_text
from ._options import check_sequence

_AXES = ("members", "data", "model")


def enough_devices(members: int | None, data: int, model: int, num_devices: int) -> int:
    """How many devices members are spread over, of those that there are."""
    of_one = data * model
    if members is None and num_devices < of_one:
        raise ValueError(f"`make_mesh` needs data x model = {data} x {model} devices or more, there are {num_devices}.")
    if members is None:
        return num_devices // of_one
    if members * of_one > num_devices:
        raise ValueError(
            f"`make_mesh` was asked for members x data x model = {members} x {data} x {model} = {members * of_one} "
            f"devices, there are {num_devices}.\n"
            'On a CPU, `jax.config.update("jax_num_cpu_devices", n)` before the first use of jax makes n virtual ones.'
        )
    return members


def device_list(devices: Any) -> list[Any]:
    """Devices of jax, in a list."""
    listed = check_sequence(devices, "devices", name="make_mesh", of="devices")
    for device in listed:
        if not isinstance(device, jax.Device):
            raise TypeError(
                f"`make_mesh` needs `devices` to be a list of devices, got {kind_text(device)} in it.\n"
                "For example `jax.devices()[:4]`."
            )
    return listed


def every_process(devices: Any, num_processes: int) -> None:
    """A mesh that leaves a process without devices would have it wait for ever."""
    there = {device.process_index for device in devices}
    if len(there) < num_processes:
        missing = sorted(set(range(num_processes)) - there)
        raise ValueError(
            f"`make_mesh` needs devices of all {num_processes} processes, and the first {len(devices)} are none of "
            f"process {', '.join(map(str, missing))}.\nAsk for more devices, or start fewer processes."
        )


def mesh(value: Any, *, name: str) -> None:
    """A mesh with an axis `members`, and no axes but ours, all of the type `Auto`."""
    hint = "Make one with `eqx_ensemble.make_mesh(members=4, data=2)`."
    if not isinstance(value, Mesh):
        raise TypeError(f"`{name}` needs a `jax.sharding.Mesh` as `mesh`, got {kind_text(value)}.\n{hint}")
    if not _has_axes(value):
        names = ", ".join(f"`{axis}`" for axis in value.axis_names)
        raise ValueError(
            f"`{name}` needs a mesh with the axes `members`, and `data` and `model` if you like, in this order; got "
            f"{names}.\n{hint}"
        )
    if not is_mesh(value):
        raise ValueError(
            f"`{name}` needs a mesh whose axes are all of the type `Auto`, which `jax.make_mesh` does not make by "
            f"default, got {value.axis_types}.\n{hint}"
        )


def is_mesh(value: Mesh) -> bool:
    """Whether a mesh is one that members can be spread over."""
    return _has_axes(value) and all(kind == AxisType.Auto for kind in value.axis_types)


def _has_axes(value: Mesh) -> bool:
    return value.axis_names[:1] == ("members",) and set(value.axis_names) <= set(_AXES)


def shard_without_model(shard: Any, layout: Any) -> None:
    """A rule says how to split members over the axis `model` of a mesh."""
    if shard is None:
        return
    if not callable(shard):
        raise TypeError(
            f"`build` needs `shard` as a function of an array's path, shape and number of parts, got "
            f"{kind_text(shard)}."
        )
    if layout is None or layout.mesh.shape.get("model", 1) == 1:
        raise TypeError(
            "`build` takes `shard` with a mesh whose axis `model` has several devices: "
            "`mesh=eqx_ensemble.make_mesh(model=2)`."
        )


def spec(value: Any, path: str, shape: tuple[int, ...], parts: int) -> None:
    """What a rule gave for one array of a member."""
    if not isinstance(value, PartitionSpec):
        raise TypeError(f"`shard` needs to return a `PartitionSpec` or `None`, at `{path}` it returned {value!r}.")
    if any(axis not in (None, "model") for axis in value) or sum(axis == "model" for axis in value) > 1:
        raise ValueError(
            f'`shard` may name the axis "model" once, at `{path}` it returned {value}.\n'
            "The axis of members is not part of it."
        )
    if len(value) > len(shape):
        raise ValueError(f"`shard` returned {value} for `{path}`, which has {len(shape)} axes in one member: {shape}.")
    size = shape[value.index("model")]
    if size % parts:
        raise ValueError(
            f"`shard` returned {value} for `{path}`, whose axis of {size} does not divide into {parts} parts: {shape}."
        )


def rows_divide(num_rows: Any, parts: int, *, name: str) -> None:
    """Rows that every device gets as many of."""
    if isinstance(num_rows, bool) or not isinstance(num_rows, int | np.integer) or num_rows < 1:
        raise TypeError(f"`{name}` needs the number of rows of a batch, got {num_rows!r}.")
    if num_rows % parts:
        raise ValueError(f"`{name}` needs rows that divide over data x model = {parts} devices, got {num_rows}.")


def local_rows(rows: Any, expected: int, num_rows: int) -> None:
    """The rows that a process has to bring."""
    for place, x in jax.tree_util.tree_leaves_with_path(rows):
        path = jax.tree_util.keystr(place)
        if np.ndim(x) == 0 or len(x) != expected:
            raise ValueError(
                f"`sharding.batch` needs this process's {expected} of {num_rows} rows, which "
                f"`sharding.local_rows(mesh, {num_rows})` says, got {np.shape(x)} at `{path or '<root>'}`."
            )


def uneven_members(num_members: int, layout: Any) -> None:
    """Warns where members do not divide evenly over a mesh."""
    width = layout.width(num_members)
    if width != num_members:
        warnings.warn(_padded_members(num_members, width, layout.members), stacklevel=4)


def _padded_members(num_members: int, width: int, parts: int) -> str:
    """Members that do not divide evenly over a mesh."""
    return (
        f"{num_members} members do not divide evenly over {parts} devices: they are padded to {width}, and between "
        f"compiled programs some devices hold the same members.\n{width} members would take the same time."
    )


def not_compiled(error: Exception) -> str:
    """A constructor that cannot be compiled."""
    return (
        "`build` cannot compile this constructor, so that its members are made on one device and spread afterwards: "
        f"{type(error).__name__}: {str(error).splitlines()[0]}"
    )


def uneven_rows(batch_size: int, layout: Any) -> None:
    """Warns where the rows of a batch do not divide evenly over a mesh."""
    if layout is not None and batch_size % layout.row_parts:
        warnings.warn(
            f"Batches of {batch_size} rows do not divide over data x model = {layout.row_parts} devices, each of which "
            f"computes all of them.\nA multiple of {layout.row_parts} rows would share the work.",
            stacklevel=4,
        )


def memory_of_one_process(num_processes: int) -> None:
    """A budget of memory is measured, which each process would do for itself."""
    if num_processes > 1:
        raise NotImplementedError(
            "`predict` measures `memory` in one process, and these members lie in several.\n"
            "Pass `batch_size`: what a device needs is in proportion to the rows of a batch."
        )


def same_everywhere(same: bool) -> None:  # noqa: FBT001
    """What every process brings for devices of all of them."""
    if not same:
        raise ValueError(
            "Processes brought different numbers for the same arrays: data, ensembles and keys have to be the same in "
            "all of them.\nRead and draw them from the same files and seeds. Where each process reads rows of its own, "
            "pass an iterable of batches made by `eqx_ensemble.sharding.batch`."
        )


def ids_of_members(tree: Any, *, name: str) -> jax.Array:
    """The ids of the members in a tree that holds an ensemble, a training state or a run."""
    has_ids = lambda x: isinstance(getattr(x, "ids", None), jax.Array)
    for node in jax.tree.leaves(tree, is_leaf=has_ids):
        if has_ids(node):
            return node.ids
    raise TypeError(f"`{name}` needs an ensemble, a training state or a run, got {kind_text(tree)}.")
