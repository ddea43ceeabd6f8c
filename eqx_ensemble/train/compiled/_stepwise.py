"""Calls of parts of what a chunk runs: of a single step, of one member's step, and of a block of members."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ... import _axes
from ..._compiled import CompiledCall
from ..._cores import on_cores
from ..._pytree import PyTree
from ...distributed import to_host
from ...plan import Unrolled
from .._state import MemberState
from .._status import Status
from ._check import check_same_outputs
from ._chunk import Chunk, compiled_batch, compiled_chunk, run_chunk, undonated_chunk
from ._health import Carry, Inputs
from ._program import NEVER, Program
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


Results = tuple[Any, Any, Any, PyTree, PyTree]


class BlockCalls:
    """A compiled call of all members as one call per block, if the plan divides them.

    Members may fail at different pieces of a chunk, of which all go on from the first. Blocks that went further are run
    again up to there, from the carry before the call: the call donates copies of its parts, not the carry itself.
    """

    def __init__(self, call: Callable[..., tuple[Carry, Results]]) -> None:
        self._call = call
        self._parts: tuple[Any, list[slice], list[Inputs]] = (None, [], [])
        self._known: set[Any] = set()  # the calls that are compiled

    def __call__(self, read: tuple[Program, Inputs, Chunk], carry: Carry) -> tuple[Carry, Results]:
        """The carry, and the results on the host."""
        program, inputs, chunk = read
        plan, blocks, cores = program.plan.blocks(carry.moving.status.shape[0])
        program = program if plan is program.plan else dataclasses.replace(program, plan=plan)
        if len(blocks) == 1:
            return self._call((program, inputs, chunk), carry)
        if self._parts[0] is not inputs or self._parts[1] != blocks:
            self._parts = inputs, blocks, [_inputs_of(inputs, block) for block in blocks]
        parts = self._parts[2]

        def run(index: int, chunk: Chunk = chunk) -> tuple[Carry, Results]:
            own = (program, parts[index], chunk), _part_of(carry, blocks[index])
            return jax.block_until_ready(self._call(*own))

        def run_again(index: int) -> tuple[Carry, Results]:
            if least == 0:
                return _part_of(carry, blocks[index]), (0, False, NEVER, *done[index][1][3:])
            return run(index, dataclasses.replace(chunk, num_pieces=jnp.int32(least)))

        # Each of several threads would compile the call.
        first = [run(0)] if self._may_compile((program, parts[0], chunk), carry, blocks[0]) else []
        done = [*first, *on_cores(run, range(len(first), len(blocks)), cores=cores)]
        good = [int(results[0]) for _, results in done]
        least = min(good)
        behind = [i for i, count in enumerate(good) if count > least]
        for i, again in zip(behind, on_cores(run_again, behind, cores=cores), strict=True):
            done[i] = again
        results = _join_results([to_host(results) for _, results in done], least, blocks)
        return _join(carry, [after for after, _ in done], blocks), results

    def _may_compile(self, read: tuple[Program, Inputs, Chunk], carry: Carry, block: slice) -> bool:
        key = read[0].plan, block.stop
        if key in self._known:
            return False
        self._known.add(key)
        return not isinstance(self._call, CompiledCall) or self._call.traits(read, _part_of(carry, block)) is None


# The start of a block is an argument, so that one program serves all blocks, also when fewer members are left.


def _part_of(carry: Carry, block: slice) -> Carry:
    """A copy of a block's part of the carry."""
    return _take((np.int32(block.start), block.stop - block.start), carry)[0]


def _inputs_of(inputs: Inputs, block: slice) -> Inputs:
    """A block's part of the inputs."""
    is_each = lambda x: isinstance(x, _axes.Each)
    nodes, treedef = jax.tree.flatten((inputs.data, inputs.validation, inputs.order), is_leaf=is_each)
    values = {i: node.per_member() for i, node in enumerate(nodes) if is_each(node)}
    read = inputs.fixed, inputs.limits, values
    fixed, limits, values = _take_inputs(read, jnp.int32(block.start), block.stop - block.start)
    own = [_axes.Each(values[i]) if i in values else node for i, node in enumerate(nodes)]
    data, validation, order = jax.tree.unflatten(treedef, own)
    return Inputs(fixed, inputs.shared, data, validation, limits, order)


def _join(carry: Carry, parts: Sequence[Carry], blocks: list[slice]) -> Carry:
    """The carry of all members, in the memory of the one before the call."""
    for part, block in zip(parts, blocks, strict=True):
        carry = _put((np.int32(block.start), part), carry)[0]
    return carry


def _join_results(parts: list[Results], good: int, blocks: list[slice]) -> Results:
    """The results of all members, from those of blocks with `good` pieces each."""
    _, again, fault, recorded, scores = zip(*parts, strict=True)

    def join(*xs: np.ndarray, axis: int) -> np.ndarray:
        whole = np.empty((*xs[0].shape[:axis], blocks[-1].stop, *xs[0].shape[axis + 1 :]), xs[0].dtype)
        for x, block in zip(xs, blocks, strict=True):
            whole[(slice(None),) * axis + (block,)] = x
        return whole

    joined = [
        jax.tree.map(lambda *xs, axis=axis: join(*xs, axis=axis), *trees)
        for axis, trees in ((0, recorded), (1, scores))
    ]
    return good, any(again), min(fault), *joined


def _take_part(read: tuple[Any, int], carry: Carry) -> tuple[Carry, None]:
    start, size = read
    take = lambda x: jax.lax.dynamic_slice_in_dim(x, start, size)
    moving, selection = jax.tree.map(take, (carry.moving, carry.selection))
    # An argument that is returned as it is would be the same buffer, which the block's call donates.
    return Carry(moving, selection, carry.step + 0), None


def _put_part(read: tuple[Any, Carry], carry: Carry) -> tuple[Carry, None]:
    start, part = read
    put = lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, start, 0)
    moving, selection = jax.tree.map(put, (carry.moving, carry.selection), (part.moving, part.selection))
    return Carry(moving, selection, part.step), None


_take = CompiledCall(_take_part, owned=True)
_put = CompiledCall(_put_part, owned=True, donate=True)


@eqx.filter_jit
def _take_inputs(tree: PyTree, start: Any, size: int) -> PyTree:
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size), tree)
