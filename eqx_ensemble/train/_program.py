"""The compiled part of a fit: many steps, and the validation between them, as one program."""

import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr
from jaxtyping import Array, Bool, Int, PyTree

from .. import _axes, _check
from ..plan import AbstractPlan
from ._loss import Loss
from ._optimiser import Optimiser
from ._select import Selection, select
from ._state import Fixed, Moving
from ._step import all_members_step


class Carry(eqx.Module):
    """What a run changes, stacked; donated to every chunk."""

    moving: Moving
    selection: Selection | None
    step: Int[Array, ""]


class Inputs(eqx.Module):
    """What a run only reads."""

    fixed: Fixed
    shared: PyTree
    data: PyTree
    validation: PyTree


class Program(eqx.Module):
    """How a run is carried out: everything that decides its compiled program, and nothing that changes in it."""

    loss: Loss
    score: Loss | None
    optimiser: Optimiser = eqx.field(static=True)
    plan: AbstractPlan
    patience: int | None = eqx.field(static=True)
    min_delta: float = eqx.field(static=True)
    own_rows: bool = eqx.field(static=True)

    def step(self, inputs: Inputs, carry: Carry, rows: Int[Array, "*members batch"] | None) -> tuple[Carry, PyTree]:
        """One step of all members on the given rows of the data; on the data themselves when `rows` is `None`."""
        own_data, view, _ = _split_data(inputs.data, inputs.fixed)
        own = (own_data, rows if self.own_rows else None)

        def batch_of(own: PyTree) -> PyTree:
            own_data, own_rows = own
            chosen = own_rows if self.own_rows else rows
            return view(own_data) if chosen is None else take_rows(view(own_data), chosen)

        moving, outputs = all_members_step(
            carry.moving,
            inputs.fixed,
            inputs.shared,
            carry.step,
            own,
            batch_of,
            loss=self.loss,
            optimiser=self.optimiser,
            plan=self.plan,
        )
        return Carry(moving, carry.selection, carry.step + 1), outputs

    def end_epoch(self, inputs: Inputs, carry: Carry) -> tuple[Carry, PyTree]:
        """Scores every member on the validation data, keeps its best weights, stops it when its patience ends."""
        if self.score is None or carry.selection is None:
            return carry, None
        moving, selection, scores = select(
            self.score,
            carry.moving,
            carry.selection,
            inputs,
            carry.step,
            plan=self.plan,
            patience=self.patience,
            min_delta=self.min_delta,
        )
        return Carry(moving, selection, carry.step), scores


def _split_data(data: PyTree, fixed: Fixed) -> tuple[PyTree, Callable[[PyTree], PyTree], int]:
    own, view, count = _axes.split_members((_axes.Each(fixed.key), data), name="fit")
    return own, lambda part: view(part)[1], count


def slow_in_loops(program: Program, inputs: Inputs, carry: Carry, rows: jax.ShapeDtypeStruct) -> bool:
    """Whether a step should not stand inside a compiled loop: XLA's CPU convolutions are several times slower there."""
    if jax.default_backend() != "cpu":
        return False
    leaves, treedef = jax.tree.flatten((program, inputs, carry, rows))
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) if eqx.is_array(x) else x for x in leaves)
    return _step_has_convolution(shapes, treedef)


@ft.lru_cache(maxsize=64)
def _step_has_convolution(leaves: tuple, treedef: Any) -> bool:
    program, inputs, carry, rows = jax.tree.unflatten(treedef, leaves)
    closed, _, _ = eqx.filter_make_jaxpr(program.step)(inputs, carry, rows)
    return _has_convolution(closed.jaxpr)


def _has_convolution(jaxpr: Jaxpr) -> bool:
    inner = [
        part.jaxpr if isinstance(part, ClosedJaxpr) else part
        for eqn in jaxpr.eqns
        for part in jax.tree.leaves(eqn.params, is_leaf=lambda x: isinstance(x, Jaxpr | ClosedJaxpr))
        if isinstance(part, Jaxpr | ClosedJaxpr)
    ]
    here = any(eqn.primitive.name == "conv_general_dilated" for eqn in jaxpr.eqns)
    return here or any(map(_has_convolution, inner))


def take_rows(data: PyTree, rows: Int[Array, " batch"]) -> PyTree:
    """Rows of every array; the indices were checked on the host."""
    return jax.tree.map(lambda x: x.at[rows].get(mode="promise_in_bounds"), data)


class Chunk(eqx.Module):
    """Rows of several epochs' pieces, all padded to one shape so that one compiled program runs any of them."""

    full: Int[Array, "pieces steps *members batch"]
    rest: Int[Array, "pieces *members remainder"]
    num_full: Int[Array, " pieces"]
    ends_epoch: Bool[Array, " pieces"]
    num_pieces: Int[Array, ""]


def run_chunk(read: tuple[Program, Inputs, Chunk], carry: Carry) -> tuple[Carry, PyTree]:
    """Runs the pieces of a chunk; returns the outputs of full batches, last batches and validations, per piece."""
    program, inputs, chunk = read

    def full_step(carry: Carry, rows: Array) -> tuple[Carry, PyTree]:
        return program.step(inputs, carry, rows)

    def finish(carry: Carry, rest: Array) -> tuple[Carry, PyTree]:
        last = None
        if rest.shape[-1] > 0:
            carry, last = program.step(inputs, carry, rest)
        carry, scores = program.end_epoch(inputs, carry)
        return carry, (last, scores)

    def piece(carry: Carry, rows: tuple[Array, Array, Array, Array]) -> tuple[Carry, PyTree]:
        full, rest, num_full, ends = rows
        carry, losses = _scan(full_step, carry, full, num_full)
        blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(finish, carry, rest)[1])
        if blank[0] is not None:
            of_one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), losses)
            _check.same_outputs(of_one, blank[0])
        carry, ending = jax.lax.cond(ends, finish, lambda carry, rest: (carry, blank), carry, rest)
        return carry, (losses, *ending)

    return _scan(piece, carry, (chunk.full, chunk.rest, chunk.num_full, chunk.ends_epoch), chunk.num_pieces)


def _scan(
    body: Callable[[Any, Any], tuple[Any, Any]], carry: PyTree, xs: PyTree, length: Int[Array, ""]
) -> tuple[PyTree, PyTree]:
    """`jax.lax.scan` over the first `length` of `xs`, where `length` is known at run time only.

    It is at least 1; a loop that can have only one step is no loop.
    """
    most = jax.tree.leaves(xs)[0].shape[0]
    if most == 1:
        carry, y = body(carry, jax.tree.map(lambda x: x[0], xs))
        return carry, jax.tree.map(lambda y: y[None], y)
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), xs)
    out = jax.eval_shape(body, carry, one)[1]
    ys = jax.tree.map(lambda x: jnp.zeros((most, *x.shape), x.dtype), out)

    def step(i: Array, state: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        carry, ys = state
        x = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), xs)
        carry, y = body(carry, x)
        return carry, jax.tree.map(lambda all, y: jax.lax.dynamic_update_index_in_dim(all, y, i, 0), ys, y)

    return jax.lax.fori_loop(0, length, step, (carry, ys))


def run_batch(read: tuple[Program, Inputs, PyTree], carry: Carry) -> tuple[Carry, PyTree]:
    """One step of all members on a batch that is not taken from the run's own data."""
    program, inputs, batch = read
    return program.step(Inputs(inputs.fixed, inputs.shared, batch, None), carry, None)


def run_validation(read: tuple[Program, Inputs], carry: Carry) -> tuple[Carry, PyTree]:
    """The validation at the end of an epoch."""
    program, inputs = read
    return program.end_epoch(inputs, carry)


compiled_chunk = eqx.filter_jit(run_chunk, donate="all-except-first")
compiled_batch = eqx.filter_jit(run_batch, donate="all-except-first")
compiled_validation = eqx.filter_jit(run_validation, donate="all-except-first")
