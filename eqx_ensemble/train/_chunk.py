"""The compiled part of a fit: many steps, and the validation between them, as one program."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree

from .. import _check
from ._health import judged
from ._program import Carry, Inputs, Program


class Chunk(eqx.Module):
    """Rows of several epochs' pieces, all padded to one shape so that one compiled program runs any of them."""

    full: Int[Array, "pieces steps *members batch"]
    rest: Int[Array, "pieces *members remainder"]
    num_full: Int[Array, " pieces"]
    ends_epoch: Bool[Array, " pieces"]
    num_pieces: Int[Array, ""]


def run_chunk(read: tuple[Program, Inputs, Chunk], carry: Carry) -> tuple[Carry, tuple[Int[Array, ""], PyTree]]:
    """Runs the pieces of a chunk, up to the first in which a member turns out to have failed at an unknown step.

    That piece leaves no trace, so that its parts can be run instead. Judging a piece as a whole leaves the loop over
    its steps as fast as one that looks at nothing.

    **Returns:** the number of good pieces; and the outputs of full batches, last batches and validations, per piece.
    """
    program, inputs, chunk = read
    never = jnp.bool_(0)

    def full_step(carry: Carry, rows: Array) -> tuple[Carry, PyTree, Bool[Array, ""]]:
        return *program.step(inputs, carry, rows), never

    def finish(carry: Carry, rest: Array) -> tuple[Carry, PyTree]:
        last = None
        if rest.shape[-1] > 0:
            carry, last = program.judged_step(inputs, carry, rest)
        carry, scores = program.end_epoch(inputs, carry)
        return carry, (last, scores)

    def piece(carry: Carry, rows: tuple[Array, Array, Array, Array]) -> tuple[Carry, PyTree, Bool[Array, ""]]:
        full, rest, num_full, ends = rows
        after, outputs, _ = _scan(full_step, carry, full, num_full)
        moving, outputs, again = judged(carry.moving, after.moving, outputs, carry.step, num_full)
        carry = Carry(moving, carry.selection, jnp.where(again, carry.step, after.step))
        blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(finish, carry, rest)[1])
        if blank[0] is not None:
            of_one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), outputs)
            _check.same_outputs(of_one, blank[0])
        carry, ending = jax.lax.cond(ends & ~again, finish, lambda carry, rest: (carry, blank), carry, rest)
        return carry, (outputs, *ending), again

    pieces = (chunk.full, chunk.rest, chunk.num_full, chunk.ends_epoch)
    carry, outputs, done = _scan(piece, carry, pieces, chunk.num_pieces)
    return carry, (done, outputs)


def _scan(
    body: Callable[[Any, Any], tuple[Any, Any, Bool[Array, ""]]], carry: PyTree, xs: PyTree, length: Int[Array, ""]
) -> tuple[PyTree, PyTree, Int[Array, ""]]:
    """`jax.lax.scan` over the first `length` of `xs`, known at run time only, and ended early by a body that says so.

    `length` is at least 1; a loop that can have only one step is no loop.

    **Returns:** the carry; the outputs, zeros where nothing ran; and the number of bodies that ran and did not end it.
    """
    most = jax.tree.leaves(xs)[0].shape[0]
    if most == 1:
        carry, y, stop = body(carry, jax.tree.map(lambda x: x[0], xs))
        return carry, jax.tree.map(lambda y: y[None], y), 1 - stop.astype(jnp.int32)
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), xs)
    out = jax.eval_shape(body, carry, one)[1]
    ys = jax.tree.map(lambda x: jnp.zeros((most, *x.shape), x.dtype), out)

    def step(state: tuple[Array, Array, PyTree, PyTree]) -> tuple[Array, Array, PyTree, PyTree]:
        i, _, carry, ys = state
        x = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), xs)
        carry, y, stop = body(carry, x)
        ys = jax.tree.map(lambda all, y: jax.lax.dynamic_update_index_in_dim(all, y, i, 0), ys, y)
        return i + 1, stop, carry, ys

    start = (jnp.int32(0), jnp.bool_(0), carry, ys)
    count, stop, carry, ys = jax.lax.while_loop(lambda state: (state[0] < length) & ~state[1], step, start)
    return carry, ys, count - stop.astype(jnp.int32)


def run_batch(read: tuple[Program, Inputs, PyTree], carry: Carry) -> tuple[Carry, PyTree]:
    """One step of all members on a batch that is not taken from the run's own data."""
    program, inputs, batch = read
    return program.judged_step(Inputs(inputs.fixed, inputs.shared, batch, None), carry, None)


def run_validation(read: tuple[Program, Inputs], carry: Carry) -> tuple[Carry, PyTree]:
    """The validation at the end of an epoch."""
    program, inputs = read
    return program.end_epoch(inputs, carry)


compiled_chunk = eqx.filter_jit(run_chunk, donate="all-except-first")
# A single step needs the old carry until the new one is judged: donating it would save nothing.
compiled_batch = eqx.filter_jit(run_batch)
compiled_validation = eqx.filter_jit(run_validation)
