"""Steps outside compiled loops: one compiled call per step, or under a plan `one_by_one` per step and member."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ... import _axes
from ..._pytree import PyTree
from ...distributed import to_host
from ...plan import Unrolled
from .._state import MemberState
from .._status import Status
from ._check import check_same_outputs
from ._chunk import Chunk, compiled_batch, compiled_chunk, run_chunk, undonated_chunk
from ._health import Carry, Inputs
from ._program import Program
from ._selection import Selection
from ._windows import Windows, merge_outputs

_MOST_BYTES = 2**25  # of results that the host has not inspected


def run_batches(
    read: tuple[Program, Inputs, Iterable[PyTree]], carry: Carry
) -> tuple[Carry, tuple[int, list[tuple[Array, PyTree]]]]:
    """Steps on batches that are drawn one after another; the host waits only for the previous step.

    An error after the first step ends them; it becomes the attribute `error` of the batches.

    **Returns:** the carry, the number of steps up to the last one in which a member trained, and the last outputs of
    each of their windows.
    """
    carry_after, results = _run_batches(read, carry)
    return carry_after, (len(results), _last_of_windows(results, carry, read[0].windows))


def _last_of_windows(results: list[PyTree], before: Carry, windows: Windows) -> list[PyTree]:
    """The outputs of each window, from those of all steps; the others do not leave the device."""
    if windows.every == 1:
        return results
    first, kept = int(to_host(before.step)), []
    for i, out in enumerate(results):
        if len(kept) > windows.index(first, first + i):
            kept[-1] = merge_outputs(out, kept[-1])
        else:
            kept.append(out)
    return kept


def _run_batches(
    read: tuple[Program, Inputs, Iterable[PyTree]], carry: Carry
) -> tuple[Carry, list[tuple[Array, PyTree]]]:
    program, inputs, batches = read
    carries, results, ready, most = [carry], [], 0, None
    try:
        for batch in batches:
            after, out = compiled_batch((program, inputs, batch), carries[-1])
            if results and _form(out) != _form(results[-1]):
                check_same_outputs(results[-1], out)
            carries = [*carries[-2:], after]
            results.append(out)
            most = most or _MOST_BYTES // max(sum(x.nbytes for x in jax.tree.leaves(out)), 1)
            if len(results) > 1:
                jax.block_until_ready(results[-2])
                ready += 1
            if len(results) >= most:
                break
        if ready:
            jax.block_until_ready(results[-1])
    except Exception as error:
        ready += _count_ready(results[ready:])
        if ready == 0:
            raise
        batches.error = error  # pyright: ignore[reportAttributeAccessIssue]
        return _take_back_idle_steps(carry, carries[ready - len(results) - 1], results[:ready])
    return _take_back_idle_steps(carry, carries[-1], results)


def _form(results: PyTree) -> tuple[Any, list[tuple[int, ...]]]:
    return jax.tree.structure(results), [x.shape for x in jax.tree.leaves(results)]


def _count_ready(results: list[PyTree]) -> int:
    """The number of leading results that are computed without an error."""
    for count, out in enumerate(results):
        try:
            jax.block_until_ready(out)
        except Exception:  # noqa: PERF203 (which is known already)
            return count
    return len(results)


def _take_back_idle_steps(
    before: Carry, after: Carry, results: list[tuple[Array, PyTree]]
) -> tuple[Carry, list[tuple[Array, PyTree]]]:
    """Reverts the steps in which no member trained: they changed only the number of steps."""
    if len(results) == 1:
        return after, results
    status, stopped_at = to_host((after.moving.status, after.moving.stopped_at))
    if (status == Status.OK).any():
        return after, results
    ends = int((stopped_at + (status == Status.DIVERGED)).max())  # the step of a fault counts
    count = max(ends - int(before.step), 1)
    if count >= len(results):
        return after, results
    return Carry(after.moving, after.selection, before.step + count), results[:count]


def run_stepwise(
    read: tuple[Program, Inputs, Chunk], carry: Carry, *, donate: bool = True
) -> tuple[Carry, tuple[Any, Any, Any, PyTree, PyTree]]:
    """A chunk of a single step, with the results of [`run_chunk`][eqx_ensemble.train.compiled._chunk.run_chunk].

    Under a plan `one_by_one`, such as `Sequential`, each member's step is a call of the same program, compiled for one
    member: outside of loops, on small arrays, and with a compile time that does not depend on the number of members.
    """
    program, inputs, chunk = read
    of_all, of_one = (compiled_chunk, _compiled_part) if donate else (undonated_chunk, _undonated_part)
    if not program.plan.one_by_one:
        return of_all(read, carry)
    if program.layout is not None:  # a call for one member would leave the other devices idle
        return of_all((dataclasses.replace(program, plan=Unrolled()), inputs, chunk), carry)
    alone = dataclasses.replace(program, plan=Unrolled())
    moving: tuple[MemberState, Selection | None] = (carry.moving, carry.selection)
    step, parts = carry.step, []
    for member in range(carry.moving.status.shape[0]):
        moving, step, outputs = of_one((alone, inputs, chunk, carry.step, jnp.int32(member)), moving)
        parts.append(outputs)
    done, again, fault, *_ = parts[-1]
    join = lambda trees, axis: jax.tree.map(lambda *xs: jnp.concatenate(xs, axis), *trees)
    recorded, scores = join([part[3] for part in parts], 0), join([part[4] for part in parts], 1)
    return Carry(*moving, step), (done, again, fault, recorded, scores)


def _run_part(
    read: tuple[Program, Inputs, Chunk, Int[Array, ""], Int[Array, ""]], moving: tuple[MemberState, Selection | None]
) -> tuple[tuple[MemberState, Selection | None], Int[Array, ""], PyTree]:
    program, inputs, chunk, step, member = read
    own = lambda tree, axis=0: jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, member, 1, axis), tree)
    marked = lambda tree: _axes.map_each(lambda value: _axes.Each(own(value)), tree)
    fixed, limits = own((inputs.fixed, inputs.limits))
    part = Inputs(fixed, inputs.shared, marked(inputs.data), marked(inputs.validation), limits, marked(inputs.order))
    own_moving, own_selection = own(moving)
    after, outputs = run_chunk((program, part, chunk), Carry(own_moving, own_selection, step))
    put = lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, member, 0)
    return jax.tree.map(put, moving, (after.moving, after.selection)), after.step, outputs


_compiled_part = eqx.filter_jit(_run_part, donate="all-except-first")
_undonated_part = eqx.filter_jit(_run_part)
