from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from ... import tree
from ..._ensemble import Ensemble
from ..._pytree import PyTree
from ...train._frozen import frozen_flags
from ._check import check_chosen, check_layer, check_sizes, explain_where
from ._selection import is_linear, widest


class Chosen(NamedTuple):
    """The selection of `where` in a member: leaves, or one linear layer.

    `num_weights` is the number of selected weights, `shape` that of a layer's matrix with the bias as a column.
    """

    positions: tuple[int, ...]
    num_weights: int
    shape: tuple[int, int]
    dtype: Any


def choose(ensemble: Ensemble, where: Callable[[Any], Any], structure: str, *, name: str) -> Chosen:
    """Selects weights of a member by `where`, as in `equinox.tree_at`."""
    model = member_shapes(ensemble)
    if structure == "kron":
        return _layer(ensemble, model, where, name)
    leaves, treedef = jax.tree.flatten(model)
    with explain_where(name):
        found = jax.tree.leaves(where(jax.tree.unflatten(treedef, range(len(leaves)))))
    own = _own(ensemble)
    kept = [i for i in dict.fromkeys(found) if type(i) is int and own[i] and _is_float(leaves[i])]
    check_chosen([leaves[i] for i in found if type(i) is int], len(kept), name=name)
    count = sum(leaves[i].size for i in kept)
    check_sizes(count, structure, name=name)
    return Chosen(tuple(kept), count, (0, 0), widest([leaves[i] for i in kept]))


def member_shapes(ensemble: Ensemble) -> PyTree:
    """The model of one member, with shapes instead of arrays."""
    return eqx.filter_eval_shape(lambda ensemble: ensemble.one((tree.take(ensemble.arrays, 0), None)), ensemble)


def _layer(ensemble: Ensemble, model: PyTree, where: Callable[[Any], Any], name: str) -> Chosen:
    nodes, treedef = jax.tree.flatten(model, is_leaf=is_linear)
    with explain_where(name):
        found = jax.tree.leaves(where(jax.tree.unflatten(treedef, range(len(nodes)))))
    flags = iter(_own(ensemble))
    own = [all([next(flags) for x in jax.tree.leaves(node) if x is not None]) for node in nodes]
    check_layer(found, [is_linear(node) and mine for node, mine in zip(nodes, own, strict=True)], name=name)
    layer = nodes[found[0]]
    check_chosen([layer.weight], 1, name=name)
    units, inputs = layer.weight.shape
    shape = units, inputs + (layer.bias is not None)
    return Chosen((found[0],), shape[0] * shape[1], shape, widest([layer.weight]))


def _own(ensemble: Ensemble) -> list[bool]:
    """Whether each leaf of a member is per member and not frozen."""
    stacked = jax.tree.map(lambda _: True, ensemble.arrays)
    marks = eqx.combine(stacked, jax.tree.map(lambda _: False, ensemble.shared))
    return [mine and not frozen for mine, frozen in zip(jax.tree.leaves(marks), frozen_flags(marks), strict=True)]


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) and jnp.issubdtype(leaf.dtype, jnp.floating)
