"""The compiled part of a fit: many steps, and the validation between them, as one program."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ..._pytree import PyTree
from ._carry import Carry, Inputs
from ._check import check_same_outputs
from ._flat import FlatFunction
from ._health import revert_diverged
from ._limits import stop_at_limits
from ._program import Program
from ._scan import scan, trace_once


class Chunk(eqx.Module):
    """Several pieces of at most `most_steps` full batches each, so that one compiled program runs any of them."""

    num_full: Int[Array, " pieces"]
    ends_epoch: Bool[Array, " pieces"]
    num_pieces: Int[Array, ""]
    most_steps: int = eqx.field(static=True)


def run_chunk(
    read: tuple[Program, Inputs, Chunk], carry: Carry
) -> tuple[Carry, tuple[Int[Array, ""], Bool[Array, ""], PyTree]]:
    """Runs the pieces of a chunk, up to the first in which a member turns out to have failed at an unknown step.

    That piece is undone, so that its parts can be run instead. Checking a piece as a whole costs its loop over steps
    nothing.

    A program that `halts` ends its chunk after a piece in which a member failed.

    **Returns:** the number of good pieces; whether the next one has to be run in parts; and the outputs of full
    batches, last batches and validations, per piece.
    """
    program, inputs, chunk = read

    def finish(carry: Carry) -> tuple[Carry, PyTree]:
        last = None
        if inputs.order is not None and inputs.order.remainder > 0:
            carry, last = program.guarded_step(inputs, carry, last=True)
        carry, scores = program.validate(inputs, carry)
        return carry, (last, scores)

    finish_once = trace_once(finish)

    def piece(carry: Carry, part: tuple[Array, Array]) -> tuple[Carry, PyTree, Bool[Array, ""]]:
        num_full, ends = part
        after, outputs = program.steps(inputs, carry, num_full, most=chunk.most_steps)
        moving, outputs, again = revert_diverged(carry.moving, after.moving, outputs, carry.step, num_full)
        faults = jnp.any(moving.fault != carry.moving.fault)
        step = jnp.where(again, carry.step, after.step)
        carry = Carry(stop_at_limits(moving, inputs.limits, step), carry.selection, step)
        blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(finish_once, carry)[1])
        if blank[0] is not None:
            of_one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0], *x.shape[2:]), x.dtype), outputs)
            check_same_outputs(of_one, blank[0])
        before = carry.moving.fault
        carry, ending = jax.lax.cond(ends & ~again, finish_once, lambda carry: (carry, blank), carry)
        faults |= jnp.any(carry.moving.fault != before)
        return carry, (again, outputs, *ending), again | (program.halts & faults)

    pieces = (chunk.num_full, chunk.ends_epoch)
    carry, (again, *outputs), count = scan(piece, carry, pieces, chunk.num_pieces)
    return program.constrain(carry), (count - jnp.sum(again, dtype=jnp.int32), jnp.any(again), tuple(outputs))


def run_batch(read: tuple[Program, Inputs, PyTree], carry: Carry) -> tuple[Carry, PyTree]:
    """One step of all members on a batch that is not taken from the run's own data."""
    program, inputs, batch = read
    carry, outputs = program.guarded_step(dataclasses.replace(inputs, data=batch, validation=None), carry)
    return program.constrain(carry), outputs


def run_validation(read: tuple[Program, Inputs, Int[Array, ""]], carry: Carry) -> tuple[Carry, PyTree]:
    """A validation by itself, at the end of an epoch or on another occasion."""
    program, inputs, occasion = read
    carry, scores = program.validate(inputs, carry, occasion)
    return program.constrain(carry), scores


compiled_chunk = FlatFunction(run_chunk, donate=True)
# For programs that may raise while they run: the carry before the call is then the only one.
undonated_chunk = eqx.filter_jit(run_chunk)
# A single step needs the old carry until the new one is checked: donating it would save nothing.
compiled_batch = FlatFunction(run_batch, donate=False)
compiled_validation = FlatFunction(run_validation, donate=False)
