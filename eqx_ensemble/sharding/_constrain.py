"""Constraints, inside a compiled program, on the sharding of the arrays of members and of batches."""

import jax
from jax.sharding import PartitionSpec

from .. import _axes
from .._pytree import PyTree
from ._layout import Layout
from ._weights import leaf_specs

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
