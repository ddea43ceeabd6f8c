"""The loop over the rows of a prediction."""

import contextvars
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from .. import _check
from .._axes import explain_rows
from .._caller import caller, name_in_threads
from .._cores import on_cores
from .._progress import members_in_words, progress_line
from .._pytree import PyTree
from ..plan import AbstractPlan
from ..plan._engine import explain_memory, free_bytes
from ._batch import (
    MemberCall,
    OutputBuffer,
    PredictionInputs,
    batch_arguments,
    compiled_batch,
    compiled_rows,
    first_rows,
    some_rows,
)
from ._check import check_rows_of_result


class Work(NamedTuple):
    """The rows of a call to be predicted by an ensemble."""

    plan: AbstractPlan
    call: MemberCall
    inputs: PredictionInputs
    num_rows: int
    batch_size: int

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


_SAFETY = 0.5  # of the free memory
_WORTH_THREADS = 2**26  # bytes of intermediate arrays, about two milliseconds; threads take half of one to start


Collect = Callable[[PyTree, np.ndarray], PyTree]
"""Makes the result for some rows from the predictions of all members."""


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


def run_work(work: Work, collect: Collect, *, axis: int, progress: bool | None) -> PyTree:
    """The result for all rows, along its axis `axis`; 0 if members are combined."""
    num_rows, num_members = work.num_rows, work.inputs.ensemble.num_members
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
        explain_memory(work.plan, num_members),
    ):
        steps = _batches(work, collect)
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


def _cores(work: Work) -> int:
    """The number of cores that may predict at the same time; 1 on other devices, and in a transformation."""
    arrays = [x for x in jax.tree.leaves(work.inputs) if isinstance(x, jax.Array)]
    if not work.is_flat or jax.process_count() > 1:
        return 1
    if not all(isinstance(x.sharding, SingleDeviceSharding) for x in arrays):
        return 1
    return work.plan.blocks(work.inputs.ensemble.num_members).cores


def _batches(work: Work, collect: Collect) -> Iterator[Step]:
    """The rows in batches of one size. The first one may compile; it is predicted alone."""
    num_rows, size = work.num_rows, work.batch_size
    most, cores = _cores(work), None
    for start in range(0, num_rows, size):
        rows, batches_left = work.rows(start, size), (num_rows - 1 - start) // size
        if cores is None:
            cores = 1 if most == 1 else _cores_for(work, rows, most, batches_left + 1)
        predict = lambda rows=rows: _predict_batch(work, rows)
        yield Step(rows, predict, lambda out, rows=rows: collect(out, rows), cores or 1)


def _cores_for(work: Work, rows: np.ndarray, most: int, count: int) -> int | None:
    """The number of cores for `count` batches; `None` if the next one may compile."""
    traits = compiled_rows.traits((work.plan, *work.flat_inputs(rows)))
    if traits is None:
        return None
    if traits.runs_alone or traits.bytes * count < _WORTH_THREADS:
        return 1
    free = free_bytes()
    return max(min(most, count, most if free is None else int(_SAFETY * free) // traits.bytes), 1)


def _predict_batch(work: Work, rows: np.ndarray) -> PyTree:
    """The predictions of all members for some rows."""
    with explain_rows(work.inputs.x):
        if work.is_flat:
            return compiled_rows((work.plan, *work.flat_inputs(rows)))[1]
        return compiled_batch(work.plan, *batch_arguments(work.call, work.inputs, rows))
