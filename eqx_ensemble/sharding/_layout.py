"""How arrays of members and of data are sharded over a mesh."""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._check import is_traced
from .._pytree import PyTree
from ._check import check_mesh, is_members_mesh
from ._weights import UNSPLIT, Shard, WeightSpecs, current_specs, specs_by_rule


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


def as_layout(mesh: Any, *, name: str) -> Layout | None:
    """The layout of the argument `mesh`, checked."""
    if mesh is None or isinstance(mesh, Layout):
        return mesh
    check_mesh(mesh, name=name)
    return Layout(mesh)


def layout_for(mesh: Any, tree: PyTree, *, name: str) -> Layout | None:
    """The layout for members `tree`, each array `(members, ...)`.

    Without a mesh, members keep the mesh that they are on, and split weights stay split as they are.
    """
    layout = as_layout(mesh_of(tree) if mesh is None else mesh, name=name)
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
