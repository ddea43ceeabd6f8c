"""The compiled part of a fit: many steps, and the validation between them, as one program."""

import dataclasses
import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ... import _axes
from ..._compiled import CompiledCall
from ..._pytree import PyTree
from .._status import Status
from ._check import check_same_outputs
from ._health import Carry, Inputs, revert_diverged
from ._program import NEVER, Program, scan, trace_once
from ._selection import stop_at_limits
from ._windows import no_outputs, put_outputs


class Chunk(eqx.Module):
    """Several pieces of at most `most_steps` full batches each, padded, so that one program runs all chunks."""

    num_full: Int[Array, " pieces"]
    ends_epoch: Bool[Array, " pieces"]
    num_pieces: Int[Array, ""]
    most_steps: int = eqx.field(static=True)


def run_chunk(
    read: tuple[Program, Inputs, Chunk], carry: Carry
) -> tuple[Carry, tuple[Int[Array, ""], Bool[Array, ""], Int[Array, ""], PyTree, PyTree]]:
    """Runs the pieces of a chunk, up to the first in which a member failed at an unknown step.

    That piece is reverted, so that its parts can be run instead. Checking only whole pieces keeps the checks out of the
    loop over steps.

    A program that `halts` ends its chunk after a piece in which a member failed.

    **Returns:** the number of good pieces; whether the next one must be run in parts; the first of its steps at which a
    loss was not finite, or `NEVER`; the outputs of the windows of the good pieces, `(members, windows, ...)`;
    and the scores of validations, `(pieces, members)`.
    """
    program, inputs, chunk = read
    windows = program.windows
    has_rest = inputs.order is not None and inputs.order.remainder > 0
    steps = trace_once(lambda carry, num_full: program.steps(inputs, carry, num_full, most=chunk.most_steps))
    validate = trace_once(lambda carry: program.validate(inputs, carry))
    put = ft.partial(put_outputs, windows=windows, begun=carry.step)

    def piece(state: tuple[Carry, PyTree], part: tuple[Array, Array]) -> tuple[tuple, PyTree, Bool[Array, ""]]:
        (carry, recorded), (num_steps, ends) = state, part
        done = steps(carry, num_steps)
        if has_rest:  # the last step is alone in its piece, so that one program reverts and records all pieces
            last = lambda carry, done: _put_last(program.step(inputs, carry, last=True), carry, done)
            done = jax.lax.cond(ends, last, lambda _, done: done, carry, done)
            num_steps += ends.astype(jnp.int32)
        after, outputs, failed = done
        moving, outputs, again = revert_diverged(
            carry.moving, after.moving, outputs, carry.step, num_steps, finite_loss=failed == NEVER
        )
        failed = jnp.min(jnp.where(carry.moving.status == Status.OK, failed, NEVER))
        fault = jnp.where(failed == NEVER, NEVER, failed - carry.step)
        recorded = put(recorded, outputs, step=carry.step, skip=again | (num_steps == 0))
        faults = jnp.any(moving.fault != carry.moving.fault)
        step = jnp.where(again, carry.step, after.step)
        carry = Carry(stop_at_limits(moving, inputs.limits, step), carry.selection, step)
        scores = None
        if program.score is not None:
            before, blank = carry.moving.fault, jnp.zeros_like(jax.eval_shape(validate, carry)[1])
            carry, scores = jax.lax.cond(ends & ~again, validate, lambda carry: (carry, blank), carry)
            faults |= jnp.any(carry.moving.fault != before)
        return (carry, recorded), (again, fault, scores), again | (program.halts & faults)

    most = chunk.num_full.shape[0] * chunk.most_steps
    if has_rest:  # every second piece is a single step
        most = -(-chunk.num_full.shape[0] // 2) * (chunk.most_steps + 1)
    outputs = jax.eval_shape(steps, carry, chunk.num_pieces)[1]
    recorded = no_outputs(windows, most, outputs, exact=not has_rest)
    pieces = (chunk.num_full, chunk.ends_epoch)
    (carry, recorded), (again, faults, scores), count = scan(piece, (carry, recorded), pieces, chunk.num_pieces)
    recorded = jax.tree.map(lambda x: x[:, : windows.most(most)], recorded)
    again, fault = (jax.lax.dynamic_index_in_dim(x, count - 1, keepdims=False) for x in (again, faults))
    return program.constrain(carry), (count - again.astype(jnp.int32), again, fault, recorded, scores)


def _put_last(last: tuple[Carry, PyTree], carry: Carry, done: tuple[Carry, PyTree, Array]) -> tuple:
    """The results of a single step, in the form of those of several."""
    (after, outputs), (_, room, _) = last, done
    check_same_outputs(jax.tree.map(lambda x: x[:, 0], room), outputs)
    room = jax.tree.map(lambda all, x: all.at[:, 0].set(x), room, outputs)
    training = carry.moving.status == Status.OK  # without this choice, XLA rounds the last bits of updates differently
    moving = jax.tree.map(lambda x, y: _axes.where_members(training, x, y), after.moving, carry.moving)
    after = Carry(moving, after.selection, after.step)
    return after, room, jnp.where(jnp.isfinite(outputs[0]), NEVER, carry.step)


def run_batch(read: tuple[Program, Inputs, PyTree], carry: Carry) -> tuple[Carry, PyTree]:
    """One step of all members on a given batch."""
    program, inputs, batch = read
    carry, outputs = program.guarded_step(dataclasses.replace(inputs, data=batch, validation=None), carry)
    return program.constrain(carry), outputs


def run_validation(read: tuple[Program, Inputs, Int[Array, ""]], carry: Carry) -> tuple[Carry, PyTree]:
    """A separate validation, at the end of an epoch or on another occasion."""
    program, inputs, occasion = read
    carry, scores = program.validate(inputs, carry, occasion)
    return program.constrain(carry), scores


compiled_chunk = CompiledCall(run_chunk, donate=True, owned=True)
# For programs that may raise while they run: only the carry before the call is left then.
undonated_chunk = eqx.filter_jit(run_chunk)
# A single step needs the old carry until the new one is checked: donating it would save nothing.
compiled_batch = CompiledCall(run_batch, owned=True)
compiled_validation = CompiledCall(run_validation, owned=True)
