"""Adapters: members that fine-tune one frozen base model, which is stored once, by few weights of their own."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array

from .._caller import caller
from .._ensemble import Ensemble
from .._keys import member_keys
from .._pytree import PyTree
from .._stack import AbstractAdapter, merge_adapters
from ._layers import (
    AbstractSubstitute,
    Select,
    check_groups,
    check_known,
    check_module,
    is_substitute,
    output_shape,
    own_flags,
    select_layers,
    select_nodes,
    with_weights,
    without_bias,
)

__all__ = ["bias_only", "layers_only", "low_rank", "merge", "scales"]

M = TypeVar("M", bound=eqx.Module)


class LowRank(AbstractSubstitute, AbstractAdapter):
    """A frozen layer plus a product of two small matrices: `W x + scale * up (down x)`."""

    own: ClassVar[tuple[str, ...]] = ("down", "up")
    layer: Any
    bias: Any
    down: Any
    up: Any
    scale: float = eqx.field(static=True)

    def __call__(self, x: Any, *, key: Any = None) -> Array:
        """The output in the dtype of the frozen layer; the matrices are multiplied in theirs."""
        y = multiply(self.layer, x)
        x = x.astype(self.down.dtype)
        if isinstance(self.layer, eqx.nn.Linear):
            hidden = self.down @ jnp.atleast_1d(x)
        else:
            hidden = without_bias(with_weights(self.layer, self.down, None))(x)
        return add_bias(y + self.change(hidden).reshape(y.shape).astype(y.dtype), self.bias)

    def change(self, hidden: Array) -> Array:
        """The scaled product of `up` and `hidden`, whose leading axis is the rank."""
        return self.scale * jnp.tensordot(self.up, hidden, axes=1)

    def dense(self, index: int) -> Any:
        """The layer with the product added to its weight."""
        weight = self.layer.weight
        return with_weights(self.layer, weight + self.change(self.down).astype(weight.dtype), self.bias)


class Scale(AbstractSubstitute, AbstractAdapter):
    """A frozen layer whose outputs, features or channels, are multiplied by factors."""

    own: ClassVar[tuple[str, ...]] = ("factors",)
    layer: Any
    bias: Any
    factors: Any

    def __call__(self, x: Any, *, key: Any = None) -> Array:
        """The scaled output in the dtype of the frozen layer."""
        y = add_bias(multiply(self.layer, x), self.bias)
        return (y.astype(self.factors.dtype) * self.factors.reshape(output_shape(self.layer))).astype(y.dtype)

    def dense(self, index: int) -> Any:
        """The layer with scaled weight and bias."""

        def scale(x: Any) -> Any:
            factors = self.factors.reshape(-1, *(1,) * (x.ndim - 1))
            return (factors * x.astype(factors.dtype)).astype(x.dtype)

        return with_weights(self.layer, scale(self.layer.weight), None if self.bias is None else scale(self.bias))


# Under `vmap` over members, a shared matrix times one vector per member is one matrix product. XLA for CPUs merges the
# transposition that follows into the product, and then computes it up to five times slower; the barrier prevents this.
# With it, `W` is read once for all members: 16 members take 1.9 times one instead of 4.0, for a row of width 1024.
def multiply(layer: Any, x: Any) -> Array:
    """The output of a layer without a bias, as an array of its own."""
    return jax.lax.optimization_barrier(without_bias(layer)(x))


def add_bias(y: Array, bias: Any) -> Array:
    """Adds the bias of a layer, if any, to an output of it."""
    return y if bias is None else y + bias.reshape(y.shape if y.ndim < 2 else bias.shape)


def low_rank(
    model: M,
    num_members: int,
    *,
    rank: int,
    where: Select = None,
    scale: float = 1.0,
    full: Select = None,
    key: Any,
) -> Ensemble[M]:
    r"""LoRA: members that share a frozen base model, and differ by a low-rank change of some weights.

    A layer computes $W x + b + s B A x$. $A$, `(rank, in)`, is drawn as by `equinox.nn.Linear`, $B$, `(out, rank)`,
    is zero: at first every member equals the base. $W$ and all other arrays of the base are shared, once for all
    members; the optimiser has a state for the matrices only. Convolutions have an $A$ of their own kernel size.

    **Arguments:**

    - `model`: the trained base. Its own randomness, such as dropout, stays: `equinox.nn.inference_mode` stops it.
    - `num_members`: the number of members.
    - `rank`: of the change.
    - `where`: the layers: a function that returns nodes, as in `equinox.tree_at`, or a type such as
        `equinox.nn.MultiheadAttention`; of other Modules than layers, all layers inside. By default all layers.
    - `scale`: $s$, often `alpha / rank`.
    - `full`: nodes, selected as by `where`, of which each member trains a copy, such as a new head, or the bias of an
        adapted layer.
    - `key`: one key, or one per member `(members,)`, from which the matrices are drawn.

    **Returns:** the ensemble. Matrices are at least float32, whatever the dtype of the base.

    **Raises:** `TypeError` for an ensemble, and for layers that are neither linear nor convolutions; `ValueError` for
    tied weights and grouped convolutions.

    ```python
    base = eqx.nn.MLP(10, 3, 64, 2, key=key)  # trained before
    ensemble = ee.methods.adapters.low_rank(base, 8, rank=4, key=key)
    ensemble.stacked.layers[1].down.shape  # (8, 4, 64)
    ensemble.stacked.layers[1].layer.weight.shape  # (64, 64), once
    ee.methods.adapters.merge(ensemble[3])  # an ordinary MLP
    ```

    ??? cite
        [Hu et al. 2022](https://arxiv.org/abs/2106.09685); ensembles: [Wang et al.
        2023](https://arxiv.org/abs/2310.00035)
    """
    keys = member_keys(key, num_members, purpose="low_rank")

    def adapt(i: int, layer: Any) -> LowRank:
        check_groups(layer)
        shape, dtype = layer.weight.shape, _own_dtype(layer)
        limit = 1 / math.sqrt(max(1, math.prod(shape[1:])))
        draw = lambda key: jax.random.uniform(jax.random.fold_in(key, i), (rank, *shape[1:]), dtype, -limit, limit)
        up = jnp.zeros((num_members, shape[0], rank), dtype)
        return LowRank(with_weights(layer, layer.weight, None), layer.bias, jax.vmap(draw)(keys), up, float(scale))

    return _adapt(model, num_members, where, full, adapt)


def scales(model: M, num_members: int, *, where: Select = None, full: Select = None) -> Ensemble[M]:
    r"""IA3: members that share a frozen base model, and multiply the outputs of some layers by factors of their own.

    A layer computes $l \circ (W x + b)$, with one factor per output feature or channel, at first 1. The authors scale
    keys, values and the inner layer of each feed-forward block.

    **Arguments:**

    - `model`, `num_members`, `where`, `full`: as for [`eqx_ensemble.methods.adapters.low_rank`][]. Members differ after
        training on rows or orders of their own.

    ```python
    base = eqx.nn.MLP(10, 3, 64, 2, key=key)
    ensemble = ee.methods.adapters.scales(base, 8, where=lambda m: m.layers[:-1])
    ensemble.stacked.layers[0].factors.shape  # (8, 64)
    ```

    ??? cite
        [Liu et al. 2022](https://arxiv.org/abs/2205.05638)
    """

    def adapt(_: int, layer: Any) -> Scale:
        factors = jnp.ones((num_members, layer.weight.shape[0]), _own_dtype(layer))
        return Scale(with_weights(layer, layer.weight, None), layer.bias, factors)

    return _adapt(model, num_members, where, full, adapt)


def bias_only(model: M, num_members: int, *, where: Select = None, full: Select = None) -> Ensemble[M]:
    """BitFit: members that share a frozen base model, and each train a copy of its biases.

    A bias is a floating-point array that is a field `bias`, also of normalisations. The members are ordinary models.

    **Arguments:**

    - `model`, `num_members`, `where`, `full`: as for [`eqx_ensemble.methods.adapters.low_rank`][]; `where` selects
        nodes of any type.

    ```python
    base = eqx.nn.MLP(10, 3, 64, 2, key=key)
    ensemble = ee.methods.adapters.bias_only(base, 8)
    ensemble.stacked.layers[0].bias.shape  # (8, 64)
    ```

    ??? cite
        [Ben Zaken et al. 2022](https://arxiv.org/abs/2106.10199)
    """
    is_bias = lambda path, chosen: chosen and path[-1:] == (jtu.GetAttrKey("bias"),)
    chosen = jtu.tree_map_with_path(is_bias, _flags(model, (lambda tree: tree) if where is None else where, "where"))
    if not any(jax.tree.leaves(chosen)):
        raise ValueError(f"`{caller()}` finds no floating-point array in a field `bias`: this model has none there.")
    flags = jax.tree.map(lambda a, b: a or b, chosen, _flags(model, full, "full"))
    return _as_ensemble(_copy(model, num_members, flags), flags)


def layers_only(model: M, num_members: int, *, where: Callable[[Any], Any] | type) -> Ensemble[M]:
    """Partial fine-tuning: members that share a frozen base model, and each train a copy of some nodes.

    **Arguments:**

    - `model`, `num_members`: as for [`eqx_ensemble.methods.adapters.low_rank`][].
    - `where`: nodes of any type, such as the last blocks: `lambda model: model.blocks[-2:]`.

    ```python
    base = eqx.nn.MLP(10, 3, 64, 2, key=key)
    ensemble = ee.methods.adapters.layers_only(base, 8, where=lambda m: m.layers[-1])
    ensemble.stacked.layers[-1].weight.shape  # (8, 3, 64)
    ```
    """
    flags = _flags(model, where, "where")
    return _as_ensemble(_copy(model, num_members, flags), flags)


def merge(model: M) -> M:
    """Returns an ordinary model that equals one member, with adapted layers replaced by layers of the base's types.

    Predictions agree up to rounding. For all members, `map_members(merge)(ensemble)` is an ensemble of full copies.
    [`eqx_ensemble.average_parameters`][] averages merged members.

    **Arguments:**

    - `model`: a member, such as `ensemble[3]`.

    **Raises:** `TypeError` for an ensemble.

    ```python
    base = eqx.nn.MLP(10, 3, 64, 2, key=key)
    ensemble = ee.methods.adapters.low_rank(base, 8, rank=4, key=key)
    ee.methods.adapters.merge(ensemble[3]).layers[0].weight.shape  # (64, 10)
    ```
    """
    if isinstance(model, Ensemble):
        raise TypeError(f"`{caller()}` merges one member, `ensemble[3]`; for all: `map_members(merge)(ensemble)`.")
    return merge_adapters(model)


def _flags(model: Any, where: Select, argument: str) -> PyTree:
    """For each leaf, whether it is a floating-point array in the nodes that `where` selects; without it, of none.

    Raises unless `model` is one ordinary Module.
    """
    check_module(model)
    if isinstance(model, Ensemble) or any(map(is_substitute, jax.tree.leaves(model, is_leaf=is_substitute))):
        raise TypeError(f"`{caller()}` needs one model without adapters: a member, merged first, `merge(ensemble[3])`.")
    leaves, treedef = jax.tree.flatten(model)
    numbered = jax.tree.unflatten(treedef, range(len(leaves)))  # one array may be at two places
    chosen = set() if where is None else set(jax.tree.leaves(select_nodes(numbered, where)))
    flags = [i in chosen and eqx.is_inexact_array(x) for i, x in enumerate(leaves)]
    if where is not None and not any(flags):
        raise ValueError(f"`{caller()}` needs `{argument}` to select nodes with floating-point arrays; got none.")
    return jax.tree.unflatten(treedef, flags)


def _adapt(
    model: M, num_members: int, where: Select, full: Select, adapt: Callable[[int, Any], AbstractSubstitute]
) -> Ensemble[M]:
    """The ensemble of a base: members have copies of some arrays, and adapters in the place of other layers."""
    copied = _flags(model, full, "full")
    find_all, layers = select_layers(model, where)
    check_known(layers)
    kept = [not layer.weight for layer in find_all(copied)]
    find = lambda tree: [x for x, keep in zip(find_all(tree), kept, strict=True) if keep]
    model = _copy(model, num_members, copied)  # among which may be the bias of an adapted layer
    new = [adapt(i, layer) for i, layer in enumerate(find(model))]
    flags = [dataclasses.replace(own_flags(x), bias=f.bias) for x, f in zip(new, find(copied), strict=True)]
    return _as_ensemble(eqx.tree_at(find, model, new), eqx.tree_at(find, copied, flags))


def _copy(model: M, num_members: int, flags: PyTree) -> M:
    """The model with a copy of each flagged array for each member."""
    return jax.tree.map(lambda x, flag: jnp.broadcast_to(x, (num_members, *x.shape)) if flag else x, model, flags)


def _as_ensemble(model: M, flags: PyTree) -> Ensemble[M]:
    leaves = jax.tree.leaves(flags, is_leaf=lambda x: x is None)
    return Ensemble(model, tuple(0 if flag else None for flag in leaves))


def _own_dtype(layer: Any) -> Any:
    return np.promote_types(layer.weight.dtype, np.float32)  # `jnp` may be strict
