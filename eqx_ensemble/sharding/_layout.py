"""How arrays of members and of data are sharded over a mesh."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .. import _axes
from .._check import is_traced
from .._pytree import PyTree
from ._check import check_mesh, check_spec, is_members_mesh

# Splits the arrays of a member over the mesh's axis `model`.

Shard = Callable[[str, tuple[int, ...], int], PartitionSpec | None]
"""A rule `shard(path, shape, parts)` for one member's array: a `PartitionSpec` over its axes, or `None`."""

WeightSpecs = tuple[tuple[str, tuple[int, ...], PartitionSpec], ...]
"""The arrays of a member that are split: path, shape and spec."""

UNSPLIT: WeightSpecs = ()


def by_largest_axis(path: str, shape: tuple[int, ...], parts: int) -> PartitionSpec | None:
    """The default rule: splits the largest axis that divides evenly, as fully sharded data parallelism does.

    **Arguments:**

    - `path`: the array's path in the member, such as `".layers[0].weight"`.
    - `shape`: its shape in one member.
    - `parts`: the number of devices of the axis `model`.

    **Returns:** a `PartitionSpec`; `None`, for a replicated array, if there is no such axis.
    """
    del path
    fitting = [axis for axis, size in enumerate(shape) if size % parts == 0 and size >= parts]
    if not fitting:
        return None
    largest = max(fitting, key=lambda axis: shape[axis])
    return PartitionSpec(*["model" if axis == largest else None for axis in range(len(shape))])


def specs_by_rule(rule: Shard | None, tree: PyTree, mesh: Mesh) -> WeightSpecs:
    """The specs that a rule returns for members `tree`, each array `(members, ...)`, checked."""
    parts, rule, specs = mesh.shape["model"], by_largest_axis if rule is None else rule, []
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if not (_axes.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)):
            continue
        name, shape = jax.tree_util.keystr(path), x.shape[1:]
        spec = rule(name, shape, parts)
        if spec is not None and any(axis is not None for axis in spec):
            check_spec(spec, name, shape, parts)
            specs.append((name, shape, spec))
    return tuple(specs)


def current_specs(tree: PyTree, mesh: Mesh) -> WeightSpecs:
    """The specs of members that are already on the mesh."""
    specs = []
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and "model" in sharding.mesh.axis_names:
            spec = PartitionSpec(*sharding.spec[1:])
            if "model" in spec and sharding.mesh.shape["model"] == mesh.shape["model"]:
                specs.append((jax.tree_util.keystr(path), x.shape[1:], spec))
    return tuple(specs)


def leaf_specs(tree: PyTree, specs: WeightSpecs, *, skip: int = 0) -> list[PartitionSpec | None]:
    """The spec of each leaf: that of the weight whose path is the end of its own, as in an optimiser's state."""
    found = []
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        name, shape = jax.tree_util.keystr(path), np.shape(x)[skip:] if _axes.is_array(x) else None
        fitting = (spec for end, of, spec in specs if of == shape and name.endswith(end))
        found.append(next(fitting, None))
    return found


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, and which arrays of a member are split over its axis `model`.

    Members are padded to a multiple of the axis `members` in every computation, because jax silently replicates an axis
    that does not divide evenly.
    """

    mesh: Mesh
    weights: WeightSpecs = UNSPLIT

    @property
    def members(self) -> int:
        """The number of devices over which members are sharded."""
        return self.mesh.shape["members"]

    @property
    def splits_weights(self) -> bool:
        """Whether the weights of a member are split over an axis `model`."""
        return self.mesh.shape.get("model", 1) > 1

    @property
    def row_parts(self) -> int:
        """The number of parts of a batch: devices that share a member's weights see different rows too."""
        return self.mesh.shape.get("data", 1) * self.mesh.shape.get("model", 1)

    def split_weights(self, tree: PyTree, rule: Shard | None = None) -> "Layout":
        """The layout that splits the weights of members `tree` by a rule, by default as they are split now.

        Weights that are not split yet are split by their largest axes.
        """
        if not self.splits_weights:
            return self
        now = current_specs(tree, self.mesh) if rule is None else UNSPLIT
        return Layout(self.mesh, now or specs_by_rule(rule, tree, self.mesh))

    def width(self, num_members: int) -> int:
        """The number of members after padding."""
        return -(-num_members // self.members) * self.members

    def per_device(self, num_members: int) -> int:
        """The number of members that a device computes."""
        return self.width(num_members) // self.members

    def sharding(self, *axes: Any) -> NamedSharding:
        """The sharding of an array whose leading axes are split over `axes` of the mesh."""
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    @property
    def replication(self) -> NamedSharding:
        """The sharding of an array that is replicated on every device."""
        return self.sharding()

    def row_axes(self, num_rows: int) -> tuple[str, ...] | None:
        """The axes of the mesh over which `num_rows` are split; `None` if they do not divide evenly."""
        names = tuple(name for name in ("data", "model") if self.mesh.shape.get(name, 1) > 1)
        return names if names and num_rows % self.row_parts == 0 else None


def spans_processes(layout: Layout | None) -> bool:
    """Whether the mesh contains devices of other processes."""
    return layout is not None and any(d.process_index != jax.process_index() for d in layout.mesh.devices.flat)


def as_layout(mesh: Any) -> Layout | None:
    """The layout of the argument `mesh`, checked."""
    if mesh is None or isinstance(mesh, Layout):
        return mesh
    check_mesh(mesh)
    return Layout(mesh)


def layout_for(mesh: Any, tree: PyTree) -> Layout | None:
    """The layout for members `tree`, each array `(members, ...)`.

    Without a mesh, members keep the mesh that they are on, and split weights stay split as they are.
    """
    layout = as_layout(mesh_of(tree) if mesh is None else mesh)
    return None if layout is None else layout.split_weights(tree)


def mesh_of(tree: PyTree) -> Mesh | None:
    """The mesh over whose axis `members` the arrays are sharded, if any; a mesh with other axes is ignored."""
    for x in jax.tree.leaves(tree):
        sharding = getattr(x, "sharding", None) if isinstance(x, jax.Array) and not is_traced(x) else None
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        members_mesh = _before_split(mesh) if isinstance(mesh, Mesh) and mesh.size > 1 else None
        if members_mesh is not None and is_members_mesh(members_mesh):
            return members_mesh
    return None


def _before_split(mesh: Mesh) -> Mesh:
    """The mesh before its axis `members` was split in two."""
    if mesh.axis_names[1:2] != ("copies",):
        return mesh
    first, second, *others = mesh.devices.shape
    names = ("members", *mesh.axis_names[2:])
    return Mesh(mesh.devices.reshape(first * second, *others), names, axis_types=mesh.axis_types[1:])


# Constraints, inside a compiled program, on the sharding of the arrays of members and of batches.

FREE = PartitionSpec.UNCONSTRAINED


def constrain_rows(batch: PyTree, layout: Layout) -> PyTree:
    """Shards the rows `(batch, ...)` of one member's batch over devices, if they divide evenly."""
    split = lambda x: jax.lax.with_sharding_constraint(x, layout.sharding(layout.row_axes(x.shape[0])))
    if layout.row_parts == 1:
        return batch
    return jax.tree.map(lambda x: split(x) if _axes.is_array(x) and x.ndim and layout.row_axes(len(x)) else x, batch)


def constrain_member(tree: PyTree, layout: Layout) -> PyTree:
    """Keeps one member's arrays that are split over `model` split."""
    if not layout.weights:
        return tree
    constrain = lambda x, spec: x if spec is None else jax.lax.with_sharding_constraint(x, layout.sharding(*spec))
    leaves, treedef = jax.tree.flatten(tree)
    specs = leaf_specs(tree, layout.weights)
    return jax.tree.unflatten(treedef, [constrain(x, spec) for x, spec in zip(leaves, specs, strict=True)])


def constrain_members(tree: PyTree, layout: Layout) -> PyTree:
    """Shards arrays of members, padding included, over devices; the compiler chooses the sharding of other axes."""
    sharding = lambda x: layout.sharding("members", *[FREE] * (x.ndim - 1))
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, sharding(x)), tree)


def constrain_carry(tree: PyTree, layout: Layout) -> PyTree:
    """Shards arrays of members, padding included, as between two programs.

    Otherwise the compiler may choose another sharding for them, and the next call would compile again.
    """
    leaves, treedef = jax.tree.flatten(tree)
    specs = leaf_specs(tree, layout.weights, skip=1)
    sharding = lambda spec: layout.sharding("members", *(spec or ()))
    keep = lambda x, spec: jax.lax.with_sharding_constraint(x, sharding(spec)) if _axes.is_array(x) else x
    return jax.tree.unflatten(treedef, [keep(x, spec) for x, spec in zip(leaves, specs, strict=True)])
