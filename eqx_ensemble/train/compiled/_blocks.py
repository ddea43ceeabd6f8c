"""Chunks of steps of blocks of members, as calls of one program on all cores of a CPU."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ... import _axes
from ..._compiled import CompiledCall
from ..._cores import on_cores
from ..._pytree import PyTree
from ...distributed import to_host
from ._chunk import Chunk
from ._health import Carry, Inputs
from ._program import Program

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
        plan, blocks = program.plan.blocks(carry.moving.status.shape[0])
        if len(blocks) == 1:
            return self._call(read, carry)
        cores, program = program.plan.cores, dataclasses.replace(program, plan=plan)
        if self._parts[0] is not inputs or self._parts[1] != blocks:
            self._parts = inputs, blocks, [_inputs_of(inputs, block) for block in blocks]
        parts = self._parts[2]

        def run(index: int, chunk: Chunk = chunk) -> tuple[Carry, Results]:
            own = (program, parts[index], chunk), _part_of(carry, blocks[index])
            return jax.block_until_ready(self._call(*own))

        def run_again(index: int) -> tuple[Carry, Results]:
            if least == 0:
                return _part_of(carry, blocks[index]), done[index][1]
            return run(index, dataclasses.replace(chunk, num_pieces=jnp.int32(least)))

        # Each of several threads would compile the call.
        first = [] if self._is_compiled((program, parts[0], chunk), carry, blocks[0]) else [run(0)]
        done = [*first, *on_cores(run, range(len(first), len(blocks)), cores=cores)]
        good = [int(results[0]) for _, results in done]
        least = min(good)
        behind = [i for i, count in enumerate(good) if count > least]
        for i, again in zip(behind, on_cores(run_again, behind, cores=cores), strict=True):
            done[i] = again
        results = _join_results([to_host(results) for _, results in done], least, blocks)
        return _join(carry, [after for after, _ in done], blocks), results

    def _is_compiled(self, read: tuple[Program, Inputs, Chunk], carry: Carry, block: slice) -> bool:
        key = read[0].plan, block.stop
        if key not in self._known and isinstance(self._call, CompiledCall):
            if self._call.is_compiled(read, _part_of(carry, block)):
                self._known.add(key)
        known = key in self._known
        self._known.add(key)
        return known


# The start of a block is an argument, so that one program serves all blocks, also when fewer members are left.


def _part_of(carry: Carry, block: slice) -> Carry:
    """A copy of a block's part of the carry."""
    leaves, treedef = jax.tree.flatten((carry.moving, carry.selection))
    part, step = _take(leaves, carry.step, block.start, block.stop - block.start)
    moving, selection = jax.tree.unflatten(treedef, part)
    return Carry(moving, selection, step)


def _inputs_of(inputs: Inputs, block: slice) -> Inputs:
    """A block's part of the inputs."""
    is_each = lambda x: isinstance(x, _axes.Each)
    nodes, treedef = jax.tree.flatten((inputs.data, inputs.validation, inputs.order), is_leaf=is_each)
    values = {i: node.per_member() for i, node in enumerate(nodes) if is_each(node)}
    read = inputs.fixed, inputs.limits, values
    fixed, limits, values = _take_inputs(read, block.start, block.stop - block.start)
    own = [_axes.Each(values[i]) if i in values else node for i, node in enumerate(nodes)]
    data, validation, order = jax.tree.unflatten(treedef, own)
    return Inputs(fixed, inputs.shared, data, validation, limits, order)


def _join(carry: Carry, parts: Sequence[Carry], blocks: list[slice]) -> Carry:
    """The carry of all members, in the memory of the one before the call."""
    leaves, treedef = jax.tree.flatten((carry.moving, carry.selection))
    for part, block in zip(parts, blocks, strict=True):
        leaves = _put(leaves, jax.tree.leaves((part.moving, part.selection)), block.start)
    moving, selection = jax.tree.unflatten(treedef, leaves)
    return Carry(moving, selection, parts[0].step)


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


def _take_leaves(leaves: list[jax.Array], step: jax.Array, start: Any, size: int) -> tuple[list[jax.Array], jax.Array]:
    # An argument that is returned as it is would be the same buffer, which the block's call donates.
    return [jax.lax.dynamic_slice_in_dim(x, start, size) for x in leaves], step + 0


def _put_leaves(leaves: list[jax.Array], parts: list[jax.Array], start: Any) -> list[jax.Array]:
    return [jax.lax.dynamic_update_slice_in_dim(x, y, start, 0) for x, y in zip(leaves, parts, strict=True)]


_take = jax.jit(_take_leaves, static_argnums=3)
_put = jax.jit(_put_leaves, donate_argnums=0)


@eqx.filter_jit
def _take_inputs(tree: PyTree, start: Any, size: int) -> PyTree:
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size), tree)
