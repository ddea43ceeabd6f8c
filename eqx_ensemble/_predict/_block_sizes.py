import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .. import _axes
from .._check import is_typed_key
from .._pytree import PyTree
from ..distributed._collectives import largest
from ..plan._cost import cost_of
from ..plan._memory import peak, release_memory
from ..sharding._layout import spans_processes
from ._batch import MemberCall, PredictionInputs, batch_arguments, compiled_batch, predict_batch
from ._blocks import blocks_of_members, members_of_device
from ._check import budget_message
from ._work import Work

_FEW_ROWS = 32  # with fewer rows a batch, fewer members at a time are cheaper: weights are read for every batch
_MOST_STEPS_UP = 2  # a factor of four: small blocks say little about much larger ones
_SAFETY = 0.5  # of the budget: sampling misses short peaks, by up to two fifths on a busy machine
_REPEATS = 3  # of each block: on a busy machine a sample may be late


class Block(NamedTuple):
    """The numbers of members per device, and of rows, that a program processes at a time."""

    members: int
    rows: int


class BlockSizes:
    """Chooses the block of a prediction so that the measured peak stays within a budget of bytes.

    It starts with a block whose intermediate arrays would all fit at once, an upper bound, and moves along a ladder of
    blocks, each about half of the one before: first fewer rows, then fewer members, finally single rows of single
    members.

    **Attributes:**

    - `settled`: whether the block is final.
    """

    def __init__(self, memory: int, parts: Sequence[tuple[MemberCall, PredictionInputs]], *, most_rows: int) -> None:
        self.settled = False
        self._agrees = any(spans_processes(call.layout) for call, _ in parts)
        self._memory = -self._of_all_processes(-memory)
        own = (members_of_device(inputs.ensemble.num_members, call.layout) for call, inputs in parts)
        self._ladder = _ladder(Block(max(own), most_rows))
        bounds = [_byte_bound(call, inputs) for call, inputs in parts]
        need = lambda block: max(bound(block) for bound in bounds)
        fitting = (i for i, block in enumerate(self._ladder) if need(block) <= _SAFETY * self._memory)
        self._index = self._of_all_processes(next(fitting, len(self._ladder) - 1))
        self._highest = 0

    @property
    def block(self) -> Block:
        """The block to use next."""
        return self._ladder[self._index]

    def note(self, need: int) -> None:
        """Records the bytes that the current block needed; with several processes, their maximum."""
        need = self._of_all_processes(need)
        steps = math.log2(_SAFETY * self._memory / max(need, 1))
        if steps < 0 and need > self._memory and self._index == len(self._ladder) - 1:
            raise MemoryError(budget_message(need, self._memory))
        up = min(int(steps), _MOST_STEPS_UP) if steps > 0 else 0
        if steps < 0:
            self._highest = self._index + 1
            up = math.floor(steps)
        index = min(max(self._index - up, self._highest), len(self._ladder) - 1)
        self.settled = index == self._index
        self._index = index

    def _of_all_processes(self, value: int) -> int:
        """The maximum over processes: with different blocks they would deadlock."""
        return largest(value) if self._agrees else value


def measure(
    works: Sequence[Work], rows: np.ndarray, predict_rows: Callable[[], Any], *, members: int
) -> tuple[Any, int]:
    """Runs `predict_rows()`, which predicts `rows` in blocks of `members`. Returns its result and its peak in bytes.

    A peak may be too short to be sampled, so known arrays are counted as well. Compilation is excluded.
    """
    needs = [_of_block(work, rows, members) for work in works]
    result = jax.block_until_ready(predict_rows())
    for _ in range(_REPEATS):
        del result
        release_memory()
        with peak() as of_all:
            result = jax.block_until_ready(predict_rows())
        needs.append(of_all.bytes or 0)
    return result, max(needs)


def _of_block(work: Work, rows: np.ndarray, members: int) -> int:
    """The bytes that the first block of an ensemble needs."""
    plan, inputs = work.pilot.plan, work.inputs
    layout, num_members = work.call.layout, inputs.ensemble.num_members
    read = batch_arguments(work.call, inputs, rows, members=blocks_of_members(num_members, members, layout)[0])
    compiled = compiled_batch.lower(plan, *read).compile().compiled
    release_memory()
    with peak() as of_block:
        out = jax.block_until_ready(compiled_batch(plan, *read))
    analysis = compiled.memory_analysis()
    temporary = analysis.temp_size_in_bytes if analysis else 0  # of one device
    devices = 1 if layout is None else _measured_as_one(list(layout.mesh.devices.flat))
    known = _bytes(read[1].x) + _bytes(out) + temporary * devices
    known += _bytes(read[1].ensemble) if members < members_of_device(num_members, layout) else 0
    return max(known, of_block.bytes or 0)


def _ladder(most: Block) -> list[Block]:
    few = min(_FEW_ROWS, most.rows)
    blocks = [Block(most.members, rows) for rows in _halvings(most.rows) if rows >= few]
    few = blocks[-1].rows
    blocks += [Block(members, few) for members in _halvings(most.members)[1:]]
    return blocks + [Block(1, rows) for rows in _halvings(few)[1:]]


def _halvings(count: int) -> list[int]:
    """`count`, and all powers of two below it, in falling order."""
    return [count, *(2**i for i in reversed(range((count - 1).bit_length())))]


def _byte_bound(call: MemberCall, inputs: PredictionInputs) -> Callable[[Block], int]:
    """An upper bound on the bytes of intermediate arrays of a block, from those of one member and one or two rows."""
    layout, alone = call.layout, dataclasses.replace(call, layout=None)
    reads = (batch_arguments(alone, inputs, np.zeros(count, int)) for count in (1, 2))
    one, two = (cost_of(predict_batch, *read).bytes for read in reads)
    own, devices = members_of_device(inputs.ensemble.num_members, layout), 1
    if layout is not None:
        axis, grid = layout.mesh.axis_names.index("members"), layout.mesh.devices
        devices = _measured_as_one(list(np.moveaxis(grid, axis, 0).reshape(grid.shape[axis], -1)[:, 0]))
    return lambda block: devices * min(block.members, own) * (one + (block.rows - 1) * max(two - one, 0))


def _measured_as_one(devices: Sequence[Any]) -> int:
    """The number of these devices that share the measured memory: CPUs share that of their process."""
    own = sum(device.process_index == jax.process_index() for device in devices)
    return max(own, 1) if devices[0].platform == "cpu" else 1


def _bytes(tree: PyTree) -> int:
    """The bytes of arrays on the device that holds most of them; all CPUs of this process count as one."""
    held: dict[Any, int] = {}
    for x in jax.tree.leaves(tree):
        if isinstance(x, jax.Array):
            data = jax.random.key_data(x) if is_typed_key(x) else x
            shards = [(shard.device, shard.data.nbytes) for shard in data.addressable_shards]
        else:
            shards = [(None, x.nbytes)] if _axes.is_array(x) else []
        for device, count in shards:
            memory = None if device is None or device.platform == "cpu" else device
            held[memory] = held.get(memory, 0) + count
    return max(held.values(), default=0)
