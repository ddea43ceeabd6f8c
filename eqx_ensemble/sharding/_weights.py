"""Splits the arrays of a member over the mesh's axis `model`."""

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .. import _axes
from .._pytree import PyTree
from ._check import check_spec

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

    **Returns:** a `PartitionSpec`; `None` for arrays without such an axis, which are replicated.
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
