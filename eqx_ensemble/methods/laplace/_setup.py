import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ... import _axes, tree
from ..._axes import Each, check_no_batch, check_rows_of_data
from ..._caller import caller
from ..._check import (
    check_array,
    check_entries,
    check_labels,
    check_row_weights,
    is_integer,
    kind_text,
    type_error,
    value_error,
)
from ..._compiled import filter_jit
from ..._ensemble import Ensemble
from ..._foreign import from_foreign_tree
from ..._predict import take_rows
from ..._pytree import PyTree
from ...plan import AbstractPlan
from ...plan._engine import over_members
from ...train._engine import frozen_flags
from ._check import check_chosen, check_sizes, explain_where
from ._member import LIKELIHOODS, Posterior, Problem, call
from ._selection import CURVATURES, AbstractSelection, Factors, Layer, Leaves, is_linear, widest


class Chosen(NamedTuple):
    """The selection of `where` in a member: leaves, or one linear layer.

    `num_weights` is the number of selected weights, `shape` that of a layer's matrix with the bias as a column.
    """

    positions: tuple[int, ...]
    num_weights: int
    shape: tuple[int, int]
    dtype: Any


def choose(ensemble: Ensemble, where: Callable[[Any], Any], structure: str) -> Chosen:
    """Selects weights of a member by `where`, as in `equinox.tree_at`."""
    model = member_shapes(ensemble)
    if structure == "kron":
        return _layer(ensemble, model, where)
    leaves, treedef = jax.tree.flatten(model)
    with explain_where():
        found = jax.tree.leaves(where(jax.tree.unflatten(treedef, range(len(leaves)))))
    own = _own(ensemble)
    is_float = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct) and jnp.issubdtype(leaf.dtype, jnp.floating)
    kept = [i for i in dict.fromkeys(found) if type(i) is int and own[i] and is_float(leaves[i])]
    check_chosen([leaves[i] for i in found if type(i) is int], len(kept))
    count = sum(leaves[i].size for i in kept)
    check_sizes(count, structure)
    return Chosen(tuple(kept), count, (0, 0), widest([leaves[i] for i in kept]))


def member_shapes(ensemble: Ensemble) -> PyTree:
    """The model of one member, with shapes instead of arrays."""
    return eqx.filter_eval_shape(lambda ensemble: ensemble.one((tree.take(ensemble.arrays, 0), None)), ensemble)


def _layer(ensemble: Ensemble, model: PyTree, where: Callable[[Any], Any]) -> Chosen:
    nodes, treedef = jax.tree.flatten(model, is_leaf=is_linear)
    with explain_where():
        found = jax.tree.leaves(where(jax.tree.unflatten(treedef, range(len(nodes)))))
    flags = iter(_own(ensemble))
    own = [all([next(flags) for x in jax.tree.leaves(node) if x is not None]) for node in nodes]
    can = [is_linear(node) and mine for node, mine in zip(nodes, own, strict=True)]
    if len(found) != 1 or not is_integer(found[0]) or not can[found[0]]:
        raise ValueError(
            f'`{caller()}` needs `where` to select one `equinox.nn.Linear` for `structure="kron"`, with arrays of each '
            f"member that are not frozen; got {len(found)} node(s), or another kind.\n"
            'For example `lambda model: model.layers[-1]`; `structure="full"` and `"diag"` take any leaves.'
        )
    layer = nodes[found[0]]
    check_chosen([layer.weight], 1)
    units, inputs = layer.weight.shape
    shape = units, inputs + (layer.bias is not None)
    return Chosen((found[0],), shape[0] * shape[1], shape, widest([layer.weight]))


def _own(ensemble: Ensemble) -> list[bool]:
    """Whether each leaf of a member is per member and not frozen."""
    stacked = jax.tree.map(lambda _: True, ensemble.arrays)
    marks = eqx.combine(stacked, jax.tree.map(lambda _: False, ensemble.shared))
    return [mine and not frozen for mine, frozen in zip(jax.tree.leaves(marks), frozen_flags(marks), strict=True)]


def check_pair(data: Any) -> tuple[Any, Any]:
    """Raises unless `data` is a pair. Returns inputs and targets."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise TypeError(f"`{caller()}` needs `data` to be a pair `(inputs, targets)`, got {kind_text(data)}.")
    return data[0], data[1]


def check_weights(row_weights: Any, num_rows: int, num_members: int) -> tuple[Any, Array | None]:
    """Raises for invalid row weights, shared or in an `Each`. Returns them, and which rows count."""
    own = isinstance(row_weights, Each)
    expected = (num_members, num_rows) if own else (num_rows,)
    given = row_weights.per_member() if isinstance(row_weights, Each) else row_weights
    if given is None:
        return jnp.ones(expected), None
    if np.shape(given) != expected:
        fix = "Weights of each member, `(members, rows)`, are marked: `ee.Each(ee.resample.counts(rows, num_rows))`."
        got = f"expected {expected}, got {np.shape(given)}"
        raise value_error("one of `row_weights` per row", got, fix)
    rows = check_row_weights(given, expected)
    if rows.known is not None and not rows.known.any(axis=-1).all():
        fix = "Every member needs rows: which does it see?"
        raise value_error("`row_weights` that leave a row", "got only zeros", fix)
    array = jnp.asarray(rows.weights)
    array = array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(jnp.result_type(float))
    return Each(array) if own else array, rows.counted


def check_outputs(shape: Any, likelihood: str) -> None:
    """Raises unless the output is one floating-point array with a shape that matches the likelihood."""
    if not isinstance(shape, jax.ShapeDtypeStruct) or not jnp.issubdtype(shape.dtype, jnp.floating):
        got = f"{shape.dtype} of shape {shape.shape}" if isinstance(shape, jax.ShapeDtypeStruct) else kind_text(shape)
        raise TypeError(
            f"`{caller()}` needs members with one floating-point array of outputs for a row, got {got}.\n"
            "For a part of what they return pass `fn=lambda model, x: model(x)[0]`."
        )
    wanted = {
        "binary": (math.prod(shape.shape) == 1, "one logit per row", "Two logits or more are a `classification`."),
        "classification": (
            len(shape.shape) == 1 and shape.shape[0] > 1,
            "a logit for each of two classes or more",
            'One logit, of a sigmoid, is `likelihood="binary"`.',
        ),
        "regression": (math.prod(shape.shape) > 0, "at least one output", "Is the output size of the last layer zero?"),
    }
    fits, needs, fix = wanted[likelihood]
    if not fits:
        raise value_error(f"members with {needs} for `likelihood={likelihood!r}`", f"got {shape.shape}", fix)


def check_targets(targets: Any, likelihood: str, shape: tuple[int, ...]) -> Any:
    """Raises unless targets match the outputs. Returns targets `(rows, out)` or labels `(rows,)`, or an `Each`."""
    own = isinstance(targets, Each)
    array = check_array("data[1]", targets.per_member() if isinstance(targets, Each) else targets)
    rows = array.shape[: 1 + own]
    if likelihood == "classification":
        logits = np.broadcast_to(np.float32(0), (*rows, *shape))  # only for its shape
        checked = check_labels(array, jnp.asarray(logits), argument="outputs", members=False)
    else:
        checked = _check_values(array, likelihood, rows, shape)
    return Each(checked) if own else checked


def _check_values(array: Any, likelihood: str, rows: Any, shape: Any) -> Any:
    size = math.prod(shape)
    if array.shape != (*rows, *shape) and not (size == 1 and array.size == math.prod(rows)):
        got = f"expected {(*rows, *shape)}, got {array.shape}"
        fix = "Targets have the shape of the outputs, with the rows in front."
        raise value_error("one target per output and row", got, fix)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        fix = "For complex targets pass the real and imaginary parts as two outputs."
        raise type_error("targets that are real numbers", f"got {array.dtype}", fix)
    flat = array.reshape(*rows, size)
    if likelihood == "binary":
        fix = "Labels -1 and 1? Pass `(labels + 1) // 2`. Soft labels are not supported."
        check_entries("labels 0 and 1", array.reshape(rows), lambda host: ~np.isin(host, (0, 1)), fix)
    return flat


class Data(NamedTuple):
    """Inputs, targets and weights of rows: shared `(rows, ...)`, or in an `Each` `(members, rows, ...)`."""

    x: PyTree
    y: Any
    weights: Any

    def batch(self, start: int, size: int, num_rows: int) -> "Data":
        """`size` rows from `start`; padded by repeating the last row with weight zero."""
        rows = np.arange(start, start + size)
        beyond = rows >= num_rows
        some = _map_rows(lambda x, axis: take_rows(x, np.minimum(rows, num_rows - 1), axis=axis), self)
        zero = lambda x, _: jnp.where(beyond, jnp.zeros((), x.dtype), x)
        return some._replace(weights=_map_rows(zero, some.weights)) if beyond.any() else some


def prepare(data: Any, num_members: int, row_weights: Any) -> tuple[Data, int]:
    """Checks the data. Returns them with zeros in ignored rows, and the number of rows."""
    x, y = check_pair(data)
    x, y = from_foreign_tree(x, "data[0]"), from_foreign_tree(y, "data[1]")
    check_no_batch((x, y))
    num_rows = check_rows_of_data((x, y), num_members, argument="data", finite=False)
    weights, counted = check_weights(row_weights, num_rows, num_members)
    if counted is not None:
        blank = lambda x, axis: jnp.where(_along(counted, x, axis), x, jnp.zeros((), x.dtype))
        x, y = _map_rows(lambda x, axis: blank(jnp.asarray(x), axis), (x, y))
    check_rows_of_data((x, y), num_members, argument="data")
    return Data(x, y, weights), num_rows


def _map_rows(fn: Any, value: PyTree) -> Any:
    """Maps `fn(array, axis)` over all arrays, with the axis of their rows."""
    own = lambda inner: Each(jax.tree.map(lambda x: fn(x, 1), inner))
    return _axes.map_each(own, value, shared=lambda x: fn(x, 0))


def _along(counted: Array, x: Any, axis: int) -> Array:
    """Which rows count, for any member if `x` is shared, reshaped to broadcast with `x`."""
    counted = counted.any(axis=0) if counted.ndim > axis + 1 else counted
    return counted.reshape((1,) * (axis + 1 - counted.ndim) + counted.shape + (1,) * (x.ndim - axis - 1))


class Setup(eqx.Module):
    """The computation for one member, with its static settings."""

    structure: str = eqx.field(static=True)
    chosen: Chosen = eqx.field(static=True)
    problem: Problem

    def selection(self, indices: Array | None) -> AbstractSelection:
        """The selected weights of one member."""
        if self.structure == "kron":
            return Layer(self.chosen.positions[0])
        return Leaves(self.chosen.positions, indices)

    def start(self, num_members: int, indices: Any) -> PyTree:
        """The initial sums of all members."""
        zero = jnp.zeros((), self.chosen.dtype)
        count = self.chosen.num_weights if indices is None else jax.tree.leaves(indices)[0].shape[-1]
        sums = CURVATURES[self.structure].start(count, self.chosen.shape, self.chosen.dtype), zero, zero
        return jax.tree.map(lambda x: jnp.zeros((num_members, *x.shape), x.dtype), sums)

    def add(self, model: PyTree, sums: PyTree, data: Data, indices: Array | None, state: eqx.nn.State | None) -> PyTree:
        """Adds a batch of rows to the sums of one member."""
        model, likelihood = eqx.nn.inference_mode(model), LIKELIHOODS[self.problem.likelihood]
        selection = self.selection(indices)

        def row(x: PyTree, y: Array, counts: Array) -> tuple[Array, PyTree]:
            outputs, jacobian = self.problem.outputs(selection, model, x, state)
            if isinstance(jacobian, Factors):
                roots = jacobian._replace(outputs=likelihood.root(outputs, jacobian.outputs))
            else:
                roots = likelihood.root(outputs, jacobian)
            # Rows of weight zero may contain NaN.
            return jax.tree.map(lambda x: jnp.where(counts, x, 0), (likelihood.loss(outputs, y), roots))

        weights = data.weights.astype(self.chosen.dtype)
        losses, roots = jax.vmap(row)(data.x, data.y, weights > 0)
        curvature, loss, count = sums
        targets = self.problem.shape if likelihood.has_noise else ()
        number = jnp.sum(weights) * math.prod(targets)
        added = CURVATURES[self.structure].add(curvature, roots, weights)
        return added, loss + weights @ losses.astype(weights.dtype), count + number

    def finish(
        self, sums: PyTree, indices: Array | None, prior_precision: Float[Array, ""], noise: Float[Array, ""] | None
    ) -> Posterior:
        """The posterior of one member. By default, the noise is that of its residuals."""
        curvature, loss, count = sums
        if noise is None and LIKELIHOODS[self.problem.likelihood].has_noise:
            noise = jnp.sqrt(loss / count)
        found = CURVATURES[self.structure].finish(curvature)
        return Posterior(self.selection(indices), found, prior_precision, noise, loss, count)


@filter_jit
def add_batch(
    setup: Setup, plan: AbstractPlan, ensemble: Ensemble, sums: Each, data: Data, indices: Any, state: Any
) -> PyTree:
    """Adds a batch of rows to the sums of all members."""
    fn = lambda model, sums, data, indices, state: setup.add(model, sums, data, indices, state)
    return over_members(fn, plan=plan)(ensemble, sums, data, indices, state)


@filter_jit
def finish(setup: Setup, plan: AbstractPlan, sums: Each, indices: Any, prior_precision: Each, noise: Any) -> Posterior:
    """The posteriors of all members."""
    return over_members(setup.finish, plan=plan)(sums, indices, prior_precision, noise)


@filter_jit
def factor_error(setup: Setup, ensemble: Ensemble, row: Data, state: Any) -> Array:
    """The relative error of each member's factors: of their outer product, compared with the Jacobian of a layer."""
    layer = setup.selection(None)

    def of_member(model: PyTree, row: Data, state: Any) -> Array:
        model = eqx.nn.inference_mode(model)
        x = jax.tree.map(lambda x: x[0], row.x)
        shared = jax.tree.map(lambda leaf: leaf, state)
        vector = layer.vector(model)
        _, factors = setup.problem.outputs(layer, model, x, state)
        mix = jnp.cos(jnp.arange(factors.outputs.shape[0], dtype=vector.dtype))
        outputs = lambda vector: call(setup.problem.fn, layer.insert(model, vector), x, shared).ravel() @ mix
        exact = jax.grad(lambda vector: outputs(vector).astype(vector.dtype))(vector)
        found = jnp.outer(mix @ factors.outputs, factors.inputs).ravel()
        return jnp.max(jnp.abs(found - exact)) / jnp.maximum(jnp.max(jnp.abs(exact)), jnp.finfo(vector.dtype).tiny)

    return over_members(of_member)(ensemble, row, state)
