"""The loop over the rows of a prediction, of one ensemble or of the parts of a group."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from .._axes._check_rows import explain_rows
from .._progress import members_in_words, progress_line
from .._pytree import PyTree
from ..plan._pilot import explain_memory
from ._batch import batch_arguments, compiled_batch, on_one_device, predict_batch
from ._block_sizes import BlockSizes, measure
from ._blocks import blocks_of_members, members_of_device
from ._check import check_rows_of_result
from ._output import OutputBuffer
from ._rows import first_rows
from ._work import Work

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
            explained.enter_context(explain_memory(work.pilot, own, name="predict"))
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
