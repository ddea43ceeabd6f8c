"""The loop over the rows of a prediction, of one ensemble or of the parts of a group."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import _axes, _check
from .._axes import explain_rows
from .._check import is_key
from .._combination import AbstractCombination
from .._ensemble import join_values
from .._progress import members_in_words, progress_line
from .._pytree import PyTree
from ..distributed._engine import largest
from ..plan._engine import Pilot, cost_of, explain_memory, free_bytes, peak, release_memory
from ..sharding._engine import spans_processes
from ._batch import (
    MemberCall,
    PredictionInputs,
    batch_arguments,
    blocks_of_members,
    compiled_batch,
    first_rows,
    members_of_device,
    on_one_device,
    predict_batch,
)
from ._check import budget_message, check_rows_of_result, result_message


class OutputBuffer:
    """A result that is written in place, some rows at a time, without a second copy.

    **Attributes:**

    - `value`: the result; `None` before the first rows are written.
    """

    def __init__(self, num_rows: int, *, axis: int) -> None:
        self.value: Any = None
        self._num_rows, self._axis = num_rows, axis

    def write(self, part: PyTree, start: int) -> None:
        """Writes a part of the result at the row `start`; the first part must start at row 0."""
        if self.value is not None:
            traced = any(map(_check.is_traced, jax.tree.leaves((self.value, part))))
            self.value = (_write_copy if traced else _write_in_place)(self.value, part, start, self._axis)
            return
        rows = jax.tree.leaves(part)[0].shape[self._axis]
        self._check_room(part, rows)
        # Made from the first part, the result is on the same devices.
        self.value = part if rows == self._num_rows else _pad_rows(part, self._num_rows, self._axis)

    def _check_room(self, part: PyTree, rows: int) -> None:
        leaves, free = jax.tree.leaves(part), free_bytes()
        if free is None or any(map(_check.is_traced, leaves)):
            return
        need = sum(leaf.nbytes for leaf in leaves) // rows * self._num_rows
        if need > free:
            whole = lambda x: (*x.shape[: self._axis], self._num_rows, *x.shape[self._axis + 1 :])
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(whole(x), x.dtype), part)
            raise MemoryError(result_message(need, free, shapes, combined=self._axis == 0))


def _extend(part: PyTree, num_rows: int, axis: int) -> PyTree:
    def extend(x: jax.Array) -> jax.Array:
        padding = [(0, num_rows - size if i == axis else 0, 0) for i, size in enumerate(x.shape)]
        return jax.lax.pad(x, jax.numpy.zeros((), x.dtype), padding)

    return jax.tree.map(extend, part)


def _write(whole: PyTree, part: PyTree, start: Any, axis: int) -> PyTree:
    return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, start, axis), whole, part)


_pad_rows = jax.jit(_extend, static_argnums=(1, 2))
_write_copy = jax.jit(_write, static_argnums=3)
_write_in_place = jax.jit(_write, static_argnums=3, donate_argnums=0)


class Work(NamedTuple):
    """The rows of a call to be predicted by an ensemble.

    `members`: the positions of its members in the group, if it is part of one.
    """

    pilot: Pilot
    call: MemberCall
    inputs: PredictionInputs
    num_rows: int
    batch_size: int
    members: np.ndarray | None = None

    def rows(self, start: int, count: int) -> np.ndarray:
        """The indices of `count` rows from `start`; at the end of the data the last `count` rows.

        If there are fewer rows than `count`, the last one is repeated.
        """
        start = max(min(start, self.num_rows - count), 0)
        return np.minimum(np.arange(start, start + count), self.num_rows - 1)

    def positions_of(self, chunk: slice | np.ndarray) -> Any:
        """The positions, among all members, of a chunk of this ensemble."""
        return chunk if self.members is None else self.members[chunk]


def combine_parts(parts: Iterable[tuple[Any, PyTree]], combine: Any, weights: Any) -> PyTree:
    """Combines the predictions of all members; each of `parts` has those of some, with their positions."""
    if isinstance(combine, AbstractCombination):
        partial = None
        for index, part in parts:
            partial = combine.update(partial, part, weights=None if weights is None else weights[index])
        return combine.finish(partial)
    positions, held = zip(*parts, strict=True)
    if any(isinstance(index, np.ndarray) for index in positions):
        predictions = join_values(held, np.argsort(np.concatenate(positions)))
    else:
        predictions = held[0] if len(held) == 1 else jax.tree.map(lambda *xs: jnp.concatenate(xs), *held)
    if combine is None:
        return predictions
    return combine(predictions) if weights is None else combine(predictions, weights=weights)


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
            data = jax.random.key_data(x) if is_key(x) else x
            shards = [(shard.device, shard.data.nbytes) for shard in data.addressable_shards]
        else:
            shards = [(None, x.nbytes)] if _axes.is_array(x) else []
        for device, count in shards:
            memory = None if device is None or device.platform == "cpu" else device
            held[memory] = held.get(memory, 0) + count
    return max(held.values(), default=0)


Collect = Callable[[Iterable[tuple[Any, PyTree]], np.ndarray], PyTree]
"""Makes the result for some rows from the predictions of all members, given in parts with their positions."""


def run_works(
    works: Sequence[Work], collect: Collect, *, axis: int, memory: int | None, progress: bool | None
) -> PyTree:
    """The result for all rows, along its axis `axis`; 0 if members are combined."""
    num_rows, num_members = works[0].num_rows, sum(work.inputs.ensemble.num_members for work in works)
    output = OutputBuffer(num_rows, axis=axis)
    described = f"predict, {members_in_words(num_members)}"
    with (
        progress_line(show=progress, description=described, total=num_rows, unit="row") as line,
        contextlib.ExitStack() as explained,
    ):
        for work in works:
            own = work.inputs.ensemble.num_members
            explained.enter_context(explain_memory(work.pilot, own))
        for rows, out in _batches(works, collect) if memory is None else _batches_within(memory, works, collect):
            if axis == 0:
                check_rows_of_result(out, len(rows))
            if len(rows) > num_rows:
                out = jax.tree.map(lambda x: first_rows(x, num_rows, axis=axis), out)
            output.write(out, int(rows[0]))
            line.update(int(rows[-1]) + 1 - line.n)
    return output.value


def _batches(works: Sequence[Work], collect: Collect) -> Iterator[tuple[np.ndarray, PyTree]]:
    """The rows in batches of one size, each with its result."""
    for parts in zip(*map(_batches_of, works), strict=True):
        rows = parts[0][0]
        own = [(work.positions_of(slice(None)), out) for work, (_, out) in zip(works, parts, strict=True)]
        yield rows, collect(own, rows)


def _batches_of(work: Work) -> Iterator[tuple[np.ndarray, PyTree]]:
    """The predictions of the members of one ensemble for batches of rows."""
    pilot, num_members, layout = work.pilot, work.inputs.ensemble.num_members, work.call.layout
    num_members = members_of_device(num_members, layout)
    for start in range(0, work.num_rows, work.batch_size):
        rows = work.rows(start, work.batch_size)
        read = batch_arguments(work.call, work.inputs, rows)
        with explain_rows(work.inputs.x):
            pilot.look(predict_batch, *on_one_device(*read), num_members=num_members, unit="batch")
            began, trial = time.perf_counter(), pilot.watching
            out = pilot.call(lambda plan, read: compiled_batch(plan, *read), read)
        seconds = time.perf_counter() - began
        batches_left = (work.num_rows - 1 - start) // work.batch_size
        pilot.note(1, seconds, seconds_left=batches_left * seconds if trial else 0.0)
        yield rows, out


def _batches_within(memory: int, works: Sequence[Work], collect: Collect) -> Iterator[tuple[np.ndarray, PyTree]]:
    """The same within a budget of memory: the block of later batches follows from the peak of the first."""
    with explain_rows(works[0].inputs.x):
        sizes = BlockSizes(memory, [(work.call, work.inputs) for work in works], most_rows=works[0].batch_size)
    start = 0
    while start < works[0].num_rows:
        members, count = sizes.block
        rows = works[0].rows(start, count)
        predict_rows = lambda members=members, rows=rows: collect(_chunks(works, members, rows), rows)
        if sizes.settled:
            out = jax.block_until_ready(predict_rows())
        else:
            out, need = measure(works, rows, predict_rows, members=members)
            sizes.note(need)
        yield rows, out
        start += count


def _chunks(works: Sequence[Work], members: int, rows: np.ndarray) -> Iterator[tuple[Any, PyTree]]:
    """The predictions for some rows, of `members` members per device at a time."""
    for work in works:
        for chunk in blocks_of_members(work.inputs.ensemble.num_members, members, work.call.layout):
            read = batch_arguments(work.call, work.inputs, rows, members=chunk)
            # Each batch is awaited: unfinished ones would occupy memory too.
            out = jax.block_until_ready(compiled_batch(work.pilot.plan, *read))
            yield work.positions_of(chunk), out
