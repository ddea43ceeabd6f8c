"""Where arrays of members and of data lie on a mesh."""

import dataclasses
import functools as ft
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .. import _axes, _check
from ..distributed._collectives import all_gather
from ._weights import NOWHERE, Places, Shard, places_of, split_by, split_now

FREE = PartitionSpec.UNCONSTRAINED


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, and which arrays of a member are split over its axis `model`.

    Members are padded to a multiple of the axis `members` wherever they are computed: one that does not divide evenly
    would silently be held whole by every device.
    """

    mesh: Mesh
    weights: Places = NOWHERE

    @property
    def members(self) -> int:
        """Over how many devices members are spread."""
        return self.mesh.shape["members"]

    @property
    def splits_weights(self) -> bool:
        """Whether there is an axis over which the weights of a member are split."""
        return self.mesh.shape.get("model", 1) > 1

    @property
    def row_parts(self) -> int:
        """In how many parts a batch is split: devices that share a member's weights see different rows too."""
        return self.mesh.shape.get("data", 1) * self.mesh.shape.get("model", 1)

    def splitting(self, tree: PyTree, rule: Shard | None = None) -> "Layout":
        """The layout that splits the weights of members `tree` by a rule; if none is given, as they are split.

        Those that are not split yet are split by their largest axes.
        """
        if not self.splits_weights:
            return self
        now = split_now(tree, self.mesh) if rule is None else NOWHERE
        return Layout(self.mesh, now or split_by(rule, tree, self.mesh))

    def width(self, num_members: int) -> int:
        """The number of members with those that pad them."""
        return -(-num_members // self.members) * self.members

    def per_device(self, num_members: int) -> int:
        """How many members a device computes."""
        return self.width(num_members) // self.members

    def along(self, *axes: Any) -> NamedSharding:
        """The sharding of an array whose axes lie along those of the mesh."""
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    @property
    def everywhere(self) -> NamedSharding:
        """Whole on every device."""
        return self.along()

    def row_axes(self, num_rows: int) -> tuple[str, ...] | None:
        """The axes of the mesh that split so many rows; `None` where they do not divide evenly."""
        names = tuple(name for name in ("data", "model") if self.mesh.shape.get(name, 1) > 1)
        return names if names and num_rows % self.row_parts == 0 else None

    def rows_apart(self, batch: PyTree) -> PyTree:
        """Inside a program: the rows `(batch, ...)` of one member's batch, split over devices."""
        split = lambda x: jax.lax.with_sharding_constraint(x, self.along(self.row_axes(x.shape[0])))
        if self.row_parts == 1:
            return batch
        return jax.tree.map(lambda x: split(x) if _axes.is_array(x) and x.ndim and self.row_axes(len(x)) else x, batch)

    def holding(self, tree: PyTree) -> PyTree:
        """Inside a program: one member's arrays, those split over `model` kept so."""
        if not self.weights:
            return tree
        hold = lambda x, spec: x if spec is None else jax.lax.with_sharding_constraint(x, self.along(*spec))
        leaves, treedef = jax.tree.flatten(tree)
        specs = places_of(tree, self.weights)
        return jax.tree.unflatten(treedef, [hold(x, spec) for x, spec in zip(leaves, specs, strict=True)])

    def apart(self, tree: PyTree) -> PyTree:
        """Inside a program: arrays of members and pads together, spread over devices; their other axes as they like."""
        spec = lambda x: self.along("members", *[FREE] * (x.ndim - 1))
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, spec(x)), tree)

    def in_place(self, tree: PyTree) -> PyTree:
        """Inside a program: arrays of members and pads together, where they lie between programs.

        A compiler would else be free to leave them in another way, and the next call would be another program.
        """
        leaves, treedef = jax.tree.flatten(tree)
        specs = places_of(tree, self.weights, skip=1)
        where = lambda spec: self.along("members", *(spec or ()))
        keep = lambda x, spec: jax.lax.with_sharding_constraint(x, where(spec)) if _axes.is_array(x) else x
        return jax.tree.unflatten(treedef, [keep(x, spec) for x, spec in zip(leaves, specs, strict=True)])

    def padded(self, tree: PyTree) -> PyTree:
        """Arrays `(members, ...)` and copies of the last member up to a multiple of the axis."""
        return jax.tree.map(lambda x: _longer(x, self.width(x.shape[0])) if _axes.is_array(x) else x, tree)

    def spread(self, tree: PyTree) -> PyTree:
        """Arrays `(members, ...)` on their devices, each member on one, or its weights on those of `model`.

        Members that do not divide evenly lie on as many devices as they do, and those on several.
        """
        specs = places_of(tree, self.weights, skip=1) if self.weights else None
        return self._put(tree, specs, lambda x, spec: self._of_members(x.shape[0], spec))

    def _of_members(self, count: int, spec: PartitionSpec | None) -> NamedSharding:
        parts = math.gcd(count, self.members)
        if parts == self.members:
            return self.along("members", *(spec or ()))
        mesh, names = _refined(self.mesh, parts)
        return NamedSharding(mesh, PartitionSpec(names, *(spec or ())))

    def copied(self, tree: PyTree) -> PyTree:
        """Arrays whole on every device."""
        return self._put(tree, None, lambda *_: self.everywhere)

    def rows_spread(self, tree: PyTree) -> PyTree:
        """Data `(rows, ...)` in parts where they divide evenly; those marked `Each` with their members."""
        return self._put_data(tree, self.row_axes)

    def rows_whole(self, tree: PyTree) -> PyTree:
        """Data `(rows, ...)` whole on every device; those marked `Each` with their members."""
        return self._put_data(tree, lambda num_rows: None)

    def _put_data(self, tree: PyTree, row_axes: Callable[[int], Any]) -> PyTree:
        shared = lambda x: self._put(x, None, lambda x, _: self.along(row_axes(x.shape[0])))
        split = lambda x, _: self._of_members(x.shape[0], PartitionSpec(row_axes(x.shape[1])))
        return _axes.map_each(lambda value: _axes.Each(self._put(value, None, split)), tree, shared=shared)

    def _put(self, tree: PyTree, specs: list | None, sharding: Any) -> PyTree:
        leaves, treedef = jax.tree.flatten(tree)
        _check_same(leaves)
        specs = [None] * len(leaves) if specs is None else specs
        there = [put(x, sharding(x, s)) if _axes.is_array(x) else x for x, s in zip(leaves, specs, strict=True)]
        return jax.tree.unflatten(treedef, there)


def put(x: Any, sharding: NamedSharding) -> jax.Array:
    """An array where the sharding says. Each process brings the whole of it; nobody checks here that it is the same."""
    if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
        return x
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return _moved(sharding)(x)
    if _check.is_typed_key(x):
        return jax.random.wrap_key_data(put(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
    if jax.process_count() == 1:
        return jax.device_put(x, sharding)
    x = np.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype))
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def _check_same(leaves: list[Any]) -> None:
    """Every process brings the whole of what it spreads, and brings the same."""
    if jax.process_count() == 1:
        return
    brought = [x for x in leaves if _axes.is_array(x) and (isinstance(x, np.ndarray) or x.is_fully_addressable)]
    if not brought:
        return
    digest = 0
    for x in brought:
        x = np.ascontiguousarray(jax.random.key_data(x) if _check.is_typed_key(x) else x)
        digest = zlib.crc32(x.reshape(-1).view(np.uint8).data, digest)
    digests = all_gather(np.array([digest], np.uint32))
    _check.same_everywhere(bool((digests == digests[0]).all()))


@ft.lru_cache(maxsize=256)
def _moved(sharding: NamedSharding) -> Any:
    return jax.jit(lambda x: x, out_shardings=sharding)


@ft.lru_cache(maxsize=64)
def _refined(mesh: Mesh, parts: int) -> tuple[Mesh, Any]:
    """The same devices, their axis `members` in two: one of so many parts, and one whose devices hold the same."""
    count, *others = mesh.devices.shape
    devices = mesh.devices.reshape(parts, count // parts, *others)
    names = ("members", "copies", *mesh.axis_names[1:])
    return Mesh(devices, names, axis_types=(mesh.axis_types[0],) * len(names)), "members" if parts > 1 else None


def _longer(x: Any, width: int) -> Any:
    if x.shape[0] == width:
        return x
    places = np.minimum(np.arange(width), x.shape[0] - 1)
    return x[places] if isinstance(x, np.ndarray) else jnp.take(x, places, axis=0)


def as_layout(mesh: Any, *, name: str) -> Layout | None:
    """What was given as `mesh`, checked."""
    if mesh is None or isinstance(mesh, Layout):
        return mesh
    _check.mesh(mesh, name=name)
    return Layout(mesh)


def layout_for(mesh: Any, tree: PyTree, *, name: str) -> Layout | None:
    """The layout for members `tree`, each array `(members, ...)`.

    Where no mesh is given, members that lie on one stay there, and weights that are split stay split as they are.
    """
    layout = as_layout(mesh_of(tree) if mesh is None else mesh, name=name)
    return None if layout is None else layout.splitting(tree)


def mesh_of(tree: PyTree) -> Mesh | None:
    """The mesh on whose axis `members` the arrays lie, if they do; one of another kind is its owner's affair."""
    for x in jax.tree.leaves(tree):
        sharding = getattr(x, "sharding", None) if isinstance(x, jax.Array) and not _check.is_traced(x) else None
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        whole = _whole(mesh) if isinstance(mesh, Mesh) and mesh.size > 1 else None
        if whole is not None and _check.is_mesh(whole):
            return whole
    return None


def _whole(mesh: Mesh) -> Mesh:
    """The mesh as it was before its axis `members` was taken in two."""
    if mesh.axis_names[1:2] != ("copies",):
        return mesh
    first, second, *others = mesh.devices.shape
    names = ("members", *mesh.axis_names[2:])
    return Mesh(mesh.devices.reshape(first * second, *others), names, axis_types=mesh.axis_types[1:])
