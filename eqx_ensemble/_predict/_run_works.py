"""The loop over the rows of a prediction, of one ensemble or of the parts of a group."""

import contextlib
import contextvars
import dataclasses
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from .. import _axes, _check
from .._axes import explain_rows
from .._caller import caller, name_in_threads
from .._check import is_key
from .._cores import on_cores
from .._progress import members_in_words, progress_line
from .._pytree import PyTree
from ..distributed._engine import largest
from ..plan._engine import Pilot, cost_of, explain_memory, free_bytes, peak, release_memory
from ..sharding._engine import spans_processes
from ._batch import (
    MemberCall,
    OutputBuffer,
    PredictionInputs,
    batch_arguments,
    blocks_of_members,
    compiled_batch,
    compiled_rows,
    first_rows,
    members_of_device,
    on_one_device,
    predict_batch,
    some_rows,
)
from ._check import budget_message, check_rows_of_result


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

    @property
    def is_flat(self) -> bool:
        """Whether `compiled_rows` predicts: there is no layout, and nothing is traced."""
        return self.call.layout is None and not _check.is_inside_transformation()

    def flat_inputs(self, rows: np.ndarray) -> tuple[Any, ...]:
        """The arguments of `compiled_rows`, except for the plan."""
        own, indices = self.inputs, None if self.inputs.keys is None else rows
        return self.call, own.ensemble, own.state, some_rows(own.x, rows), own.keys, indices

    def rows(self, start: int, count: int) -> np.ndarray:
        """The indices of `count` rows from `start`; at the end of the data the last `count` rows.

        If there are fewer rows than `count`, the last one is repeated.
        """
        start = max(min(start, self.num_rows - count), 0)
        return np.minimum(np.arange(start, start + count), self.num_rows - 1)

    def positions_of(self, chunk: slice | np.ndarray) -> Any:
        """The positions, among all members, of a chunk of this ensemble."""
        return chunk if self.members is None else self.members[chunk]


_FEW_ROWS = 32  # with fewer rows a batch, fewer members at a time are cheaper: weights are read for every batch
_MOST_STEPS_UP = 2  # a factor of four: small blocks say little about much larger ones
_SAFETY = 0.5  # of the budget: sampling misses short peaks, by up to two fifths on a busy machine
_WORTH_THREADS = 2**26  # bytes of intermediate arrays, about two milliseconds; threads take half of one to start
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
        self._bound = lambda block: max(bound(block) for bound, _ in bounds)
        self._runs_alone = any(runs_alone for _, runs_alone in bounds)
        fitting = (i for i, block in enumerate(self._ladder) if self._bound(block) <= _SAFETY * self._memory)
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

    def at_once(self, need: int, count: int) -> int:
        """How many of `count` blocks to predict at the same time; `need` are the bytes of one."""
        few_members = self.block.members < self._ladder[0].members  # their predictions are combined one by one
        if few_members or self._runs_alone or count * self._bound(self.block) < _WORTH_THREADS:
            return 1
        return max(min(count, int(_SAFETY * self._memory) // max(need, 1)), 1)

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


def _byte_bound(call: MemberCall, inputs: PredictionInputs) -> tuple[Callable[[Block], int], bool]:
    """An upper bound on the bytes of intermediate arrays of a block, from those of one member and one or two rows.

    And whether the program must run alone.
    """
    layout, alone = call.layout, dataclasses.replace(call, layout=None)
    reads = (batch_arguments(alone, inputs, np.zeros(count, int)) for count in (1, 2))
    one, two = (cost_of(predict_batch, *read) for read in reads)
    of_row = max(two.bytes - one.bytes, 0)
    own, devices = members_of_device(inputs.ensemble.num_members, layout), 1
    if layout is not None:
        axis, grid = layout.mesh.axis_names.index("members"), layout.mesh.devices
        devices = _measured_as_one(list(np.moveaxis(grid, axis, 0).reshape(grid.shape[axis], -1)[:, 0]))
    bound = lambda block: devices * min(block.members, own) * (one.bytes + (block.rows - 1) * of_row)
    return bound, one.runs_alone


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


class Step(NamedTuple):
    """The prediction of some rows.

    **Attributes:**

    - `predict`: the part that may run at the same time as that of other steps.
    - `finish`: makes the result from it, in the order of rows. It calls functions of users.
    - `cores`: the number of cores for this step and all that follow.
    """

    rows: np.ndarray
    predict: Callable[[], Any]
    finish: Callable[[Any], PyTree]
    cores: int


def run_works(
    works: Sequence[Work], collect: Collect, *, axis: int, memory: int | None, progress: bool | None
) -> PyTree:
    """The result for all rows, along its axis `axis`; 0 if members are combined."""
    num_rows, num_members = works[0].num_rows, sum(work.inputs.ensemble.num_members for work in works)
    output = OutputBuffer(num_rows, axis=axis)
    described = f"predict, {members_in_words(num_members)}"

    def finish(step: Step, predicted: Any) -> None:
        rows, out = step.rows, step.finish(predicted)
        if axis == 0:
            check_rows_of_result(out, len(rows))
        if len(rows) > num_rows:
            out = jax.tree.map(lambda x: first_rows(x, num_rows, axis=axis), out)
        output.write(out, int(rows[0]))
        line.update(int(rows[-1]) + 1 - line.n)

    with (
        progress_line(show=progress, description=described, total=num_rows, unit="row") as line,
        contextlib.ExitStack() as explained,
    ):
        for work in works:
            explained.enter_context(explain_memory(work.pilot, work.inputs.ensemble.num_members))
        steps = _batches(works, collect) if memory is None else _batches_within(memory, works, collect)
        for step in steps:
            if step.cores == 1:
                finish(step, step.predict())
            else:
                count = -(-(num_rows - int(step.rows[0])) // len(step.rows))
                _run_at_once(itertools.chain([step], steps), finish, count=count, cores=step.cores)
    return output.value


def _run_at_once(steps: Iterator[Step], finish: Callable[[Step, Any], None], *, count: int, cores: int) -> None:
    """Runs `count` steps on `cores` cores, and finishes them in their order.

    A core computes one step, and has one more in its queue: it would wait for the next one while Python runs.
    """
    turn, finishing = threading.Condition(), threading.Lock()
    numbered, unfinished, num_finished = enumerate(steps), {}, 0
    errors: dict[int, BaseException] = {}

    def finish_until(most: int) -> None:
        nonlocal num_finished
        with finishing:
            while len(unfinished) > most and num_finished < min(errors, default=count):
                with turn:
                    turn.wait_for(lambda: num_finished in unfinished or errors)  # noqa: B023
                    if num_finished not in unfinished:
                        return
                    step, predicted = unfinished.pop(num_finished)
                try:
                    finish(step, jax.block_until_ready(predicted))
                    num_finished += 1
                except BaseException as error:
                    stop(num_finished, error)

    def run_next() -> None:
        number = -1
        try:
            with turn:
                if errors:
                    return
                number, step = next(numbered)
            predicted = step.predict()
            with turn:
                unfinished[number] = step, predicted
                turn.notify_all()
            finish_until(cores)
        except BaseException as error:
            stop(number, error)

    def stop(number: int, error: BaseException) -> None:
        with turn:
            errors[number] = error
            turn.notify_all()

    context = contextvars.copy_context()
    context.run(name_in_threads, caller())
    on_cores(lambda _: context.copy().run(run_next), range(count), cores=cores)
    finish_until(0)
    if errors:
        raise errors[min(errors)]


def _cores(works: Sequence[Work]) -> int:
    """The number of cores that may predict at the same time; 1 on other devices, and in a transformation."""
    arrays = [x for work in works for x in jax.tree.leaves(work.inputs) if isinstance(x, jax.Array)]
    if not all(work.is_flat for work in works) or jax.process_count() > 1:
        return 1
    if not all(isinstance(x.sharding, SingleDeviceSharding) for x in arrays):
        return 1
    return min(work.pilot.plan.blocks(work.inputs.ensemble.num_members).cores for work in works)


def _batches(works: Sequence[Work], collect: Collect) -> Iterator[Step]:
    """The rows in batches of one size. The first one may compile; it is predicted alone, and so are trials of plans."""
    (num_rows,), (size,) = {work.num_rows for work in works}, {work.batch_size for work in works}
    most, cores = _cores(works), None
    for start in range(0, num_rows, size):
        rows, batches_left = works[0].rows(start, size), (num_rows - 1 - start) // size
        if cores is None:
            cores = 1 if most == 1 else _cores_for(works, rows, most, batches_left + 1)
        predict = lambda rows=rows, left=batches_left: [
            (work.positions_of(slice(None)), _predict_batch(work, rows, batches_left=left)) for work in works
        ]
        yield Step(rows, predict, lambda parts, rows=rows: collect(parts, rows), cores or 1)


def _cores_for(works: Sequence[Work], rows: np.ndarray, most: int, count: int) -> int | None:
    """The number of cores for `count` batches; `None` if the next one may compile or is a trial of a plan."""
    found = [compiled_rows.traits((work.pilot.plan, *work.flat_inputs(rows))) for work in works]
    traits = [one for one in found if one is not None]
    if len(traits) < len(works) or any(work.pilot.is_trial for work in works):
        return None
    for work in works:
        work.pilot.settle()
    size = sum(one.bytes for one in traits)
    if any(one.runs_alone for one in traits) or size * count < _WORTH_THREADS:
        return 1
    free = free_bytes()
    return max(min(most, count, most if free is None else int(_SAFETY * free) // size), 1)


def _predict_batch(work: Work, rows: np.ndarray, *, batches_left: int) -> PyTree:
    """The predictions of the members of one ensemble for some rows."""
    pilot, num_members = work.pilot, members_of_device(work.inputs.ensemble.num_members, work.call.layout)
    with explain_rows(work.inputs.x):
        if pilot.plan.choice is not pilot.plan:
            read = on_one_device(*batch_arguments(work.call, work.inputs, rows))
            pilot.look(predict_batch, *read, num_members=num_members, unit="batch")
        if work.is_flat:
            read, run = work.flat_inputs(rows), lambda plan, read: compiled_rows((plan, *read))[1]
        else:
            read = batch_arguments(work.call, work.inputs, rows)
            run = lambda plan, read: compiled_batch(plan, *read)
        began, trial = time.perf_counter(), pilot.watching
        out = pilot.call(run, read)
    seconds = time.perf_counter() - began
    pilot.note(1, seconds, seconds_left=batches_left * seconds if trial else 0.0)
    return out


def _batches_within(memory: int, works: Sequence[Work], collect: Collect) -> Iterator[Step]:
    """The same within a budget of memory: the block of later batches follows from the peak of the first."""
    with explain_rows(works[0].inputs.x):
        sizes = BlockSizes(memory, [(work.call, work.inputs) for work in works], most_rows=works[0].batch_size)
    start, num_rows, need = 0, works[0].num_rows, memory
    while start < num_rows:
        members, count = sizes.block
        rows = works[0].rows(start, count)
        predict_rows = lambda members=members, rows=rows: collect(_chunks(works, members, rows), rows)
        blocks_left = -(-(num_rows - start) // count)
        if not sizes.settled:
            out, need = measure(works, rows, predict_rows, members=members)
            sizes.note(need)
            yield Step(rows, lambda: None, lambda _, out=out: out, 1)
            del out
        elif (cores := min(_cores(works), sizes.at_once(need, blocks_left))) > 1:
            predict = lambda members=members, rows=rows: list(_chunks(works, members, rows))
            yield Step(rows, predict, lambda parts, rows=rows: collect(parts, rows), cores)
        else:
            yield Step(rows, lambda: None, lambda _, run=predict_rows: jax.block_until_ready(run()), 1)
        start += count


def _chunks(works: Sequence[Work], members: int, rows: np.ndarray) -> Iterator[tuple[Any, PyTree]]:
    """The predictions for some rows, of `members` members per device at a time."""
    for work in works:
        for chunk in blocks_of_members(work.inputs.ensemble.num_members, members, work.call.layout):
            read = batch_arguments(work.call, work.inputs, rows, members=chunk)
            # Each batch is awaited: unfinished ones would occupy memory too.
            out = jax.block_until_ready(compiled_batch(work.pilot.plan, *read))
            yield work.positions_of(chunk), out
