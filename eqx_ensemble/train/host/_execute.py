import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from ... import _axes
from ..._progress import members_in_words, progress_line
from ..._pytree import PyTree
from ...distributed import to_host
from ...plan import AbstractPlan
from ...plan._engine import explain_memory
from .._callback import Every
from .._check_run import warn_of_undefined_scores
from .._revive import Revival, Revive
from .._run import Run
from .._state import TrainState, copy_arrays, ensemble_of
from ..compiled._health import Carry, Inputs, fault_path, nan_is_data
from ..compiled._program import Program
from ..compiled._selection import Limits, stop_at_limits
from ..data._source import AbstractSource, Length
from ._active import ActiveMembers
from ._callbacks import Callbacks, Ending, Interruption, Reviver, Saving
from ._check import ended_message, lost_run_message
from ._loop import Executor, Host, Pacing, Recording, run, validate_best
from ._saver import Saver
from ._start import Start


def execute(
    program: Program,
    start: Start,
    source: AbstractSource,
    length: Length,
    *,
    limits: Limits,
    validation: PyTree,
    on_diverge: Literal["freeze", "raise"] | Revive,
    lost_before: np.ndarray,
    seconds: np.ndarray | None,
    saver: Saver | None,
    progress: bool | None,
    callbacks: Sequence[Every],
    key: Any,
) -> Run:
    """Sets up and runs the training loop, and collects the run."""
    first, record, plan = start.state, start.record, program.plan
    carry = Carry(stop_at_limits(first.moving, limits, first.step), start.selection, first.step)
    inputs = Inputs(first.fixed, first.shared, source.data, validation, limits, source.order)
    members = ActiveMembers(inputs, carry, program.layout)
    reviver = None
    if isinstance(on_diverge, Revive):
        reviver = Reviver(on_diverge, program.optimiser, first.shared, first.ids, start.revived, key=key)
    revivals = start.revived if reviver is None else reviver.revivals
    with (
        saver or contextlib.nullcontext(),
        Interruption() as interruption,
        progress_line(show=progress, description=members_in_words(first.num_members), unit="step") as line,
        nan_is_data(),
    ):
        saving = Saving(saver, record, None if reviver is None else revivals)
        lost = int(lost_before.sum())
        stopping = Ending(interruption, saving, reviver, on_diverge=on_diverge, lost_before=lost, seconds=seconds)
        stops = program.patience is not None or limits.target is not None or seconds is not None
        executor = Executor(program, members)
        pacing = Pacing(lambda: executor.program.plan, members_stop=stops)
        calls = Callbacks(callbacks, begun=length.begun, start=first, record=record, saving=saving, stopping=stopping)
        host = Host(
            executor, members, pacing, Recording(record, line), stopping, saving, calls
        )  # fmt: skip
        collect = lambda **options: collect_run(start, host, source, plan, revivals, **options)
        with _attach_run(host, source, collect), explain_memory(plan, first.num_members):
            members.begin()
            if saver is None or saver.step < 0:
                validate_best(program, members)
            run(source, host, length, start.cursor)
    ended = collect(interrupted=stopping.ended_early)
    warn_of_undefined_scores(ended, [step for step in record.validated if step > length.begun])
    return ended


@contextlib.contextmanager
def _attach_run(host: Host, source: AbstractSource, collect: Any) -> Iterator[None]:
    """Attaches the run so far to an error that ends it, and saves it if a checkpoint is given.

    With several processes it does neither: one may be alone with its error, and would block while it waits for others.
    """
    record, saving = host.recording.record, host.saving
    first_step = record.steps
    try:
        yield
    except Exception as error:
        if record.steps > first_step and jax.process_count() == 1 and not _is_gone(host.members.carry):
            try:
                saving.save(host.members, source)
                error.run = collect(interrupted=False)  # pyright: ignore[reportAttributeAccessIssue]
                error.add_note(ended_message(record.steps, saved=saving.is_on, failed=saving.error))
            except Exception as second:
                error.add_note(lost_run_message(second))
        raise


def _is_gone(carry: Carry) -> bool:
    """Whether a failed call has donated the only copy."""
    return any(x.is_deleted() for x in jax.tree.leaves(carry) if isinstance(x, jax.Array))


def collect_run(
    start: Start, host: Host, source: AbstractSource, plan: AbstractPlan, revivals: list[Revival], *, interrupted: bool
) -> Run:
    """The run: all members in their order, each with its best weights if there are any."""
    first, cursor = start.state, source.cursor
    carry, fixed = host.members.all(), host.members.constants
    status, last_step = to_host(carry.moving.status), host.members.last_step
    history, step = host.recording.record.history(last_step), carry.step
    if last_step is not None:  # the last chunk may have been longer than any member's training
        step = jnp.minimum(step, max([host.recording.record.first_step + 1, *history.step[-1:].tolist()]))
    last = TrainState(carry.moving, fixed, first.shared, first.ids, step)
    moving, selection = carry.moving, carry.selection
    params, state, best_step, best_score, member = moving.params, moving.model_state, None, None, None
    if selection is not None:
        best_step, best_score = to_host((selection.step, selection.score))
        found, member = best_step >= 0, best_step.argmax()
        best = selection.params, selection.model_state
        params, state = copy_arrays(best) if found.all() else _where(found, best, (params, state))
    return Run(
        ensemble=ensemble_of(last, params, member),
        state=state,
        history=history,
        status=status,
        stopped_at=to_host(moving.stopped_at),
        fault=np.array([fault_path(fault, moving.params) for fault in to_host(moving.fault).tolist()]),
        revived=revivals,
        best_step=best_step,
        best_score=best_score,
        train_state=last,
        selection=selection,
        rows=_rows_of_all(start.rows, source.rows),
        data_state=cursor.state if cursor.batches > 0 else None,
        plan=plan,
        interrupted=interrupted,
        seconds=start.seconds + host.saving.seconds,
        epoch=source.epoch,
    )


@eqx.filter_jit
def _where(found: Bool[Array, " members"], best: PyTree, last: PyTree) -> PyTree:
    return jax.tree.map(lambda x, y: _axes.where_members(found, x, y), best, last)


def _rows_of_all(before: np.ndarray | None, now: np.ndarray | None) -> np.ndarray | None:
    """The rows that members have seen in this run and in earlier ones; `None` if that is all of them."""
    if before is None or now is None:
        return None
    return now if before.size == 0 or np.array_equal(before, now) else np.concatenate([before, now], axis=1)
