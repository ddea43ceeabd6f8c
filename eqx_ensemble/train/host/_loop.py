import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np

from ...distributed import to_host
from .._state import MemberState
from .._status import Status
from ..compiled._carry import Carry
from ..compiled._chunk import compiled_validation
from ..compiled._program import Program
from ..compiled._select import Occasion
from ..compiled._selection import rescore
from ..data._cursor import Cursor, Length
from ..data._source import AbstractSource, AbstractWork, EpochEnd, Setting
from ._active import ActiveMembers, width_for
from ._callbacks import Callbacks
from ._executor import Executor
from ._pacing import Pacing
from ._recording import Recording
from ._saving import Saving
from ._stopping import Stopping


@dataclasses.dataclass(frozen=True)
class Host:
    """The components of the training loop."""

    executor: Executor
    members: ActiveMembers
    pacing: Pacing
    recording: Recording
    stopping: Stopping
    saving: Saving
    callbacks: Callbacks

    def should_stop(self) -> bool:
        """Whether to end the run."""
        return self.stopping.should_stop(self.members, begun=self.recording.record.has_steps)


def run(source: AbstractSource, host: Host, length: Length, cursor: Cursor) -> None:
    """The training loop; `host.members` and `host.recording` hold its results."""
    executor, members, pacing, recording = host.executor, host.members, host.pacing, host.recording
    record = recording.record
    host.stopping.revive(members)  # those that diverged in an earlier run
    source.start(_setting(host, length, cursor))
    recording.start(source.num_steps, record.steps - length.begun)
    pacing.recall(executor.key)
    while not host.should_stop() and (work := source.next(pacing.steps, members.slots)) is not None:
        if isinstance(work, EpochEnd):
            end_epoch(source, host)
            continue
        started = time.perf_counter()
        host.saving.claim()
        try:
            carry, results = executor.call(work)
            source.prefetch()  # while the device works
            outcome = work.unpack(to_host(results), carry)
        except RuntimeError:
            if not _can_halve(work):
                raise
            source.put_back(work.split(pacing.halve(work.num_steps)))
            continue
        recording.add(outcome, members.slots)
        members.carry = carry
        epoch_ended = source.advance(work, outcome)  # after a divergence, parts of the work come next
        if epoch_ended:  # before members are revived or stopped there, as inside a chunk
            end_epoch(source, host)
        steps_left = None if source.last_step is None else source.last_step - record.steps
        if not outcome.rest:
            seconds, width = time.perf_counter() - started, len(members.slots.index)
            pacing.measure(outcome.num_steps, seconds, width=width, steps_left=steps_left)
        if outcome.num_steps > 0:
            recording.report(outcome.num_steps, members)
            host.stopping.handle_stopped(members)  # not before steps that are run again in parts
        host.callbacks.call(members, source)
        host.saving.save(members, source, if_due=True)
        if not host.should_stop():
            drop_inactive(host, steps_left)
    host.saving.save(members, source)
    source.finish(record.steps)
    _validate_last(host)
    host.callbacks.finish(members, source)


def end_epoch(source: AbstractSource, host: Host) -> None:
    """Validates at the end of an epoch, and moves the source to the next one."""
    validate(host.executor.program, host.members, host.recording, Occasion.EPOCH_END)
    source.advance(EpochEnd())


def drop_inactive(host: Host, steps_left: int | None) -> None:
    """Removes members that no longer train from the compiled arrays, if that saves time.

    The remaining length counts up to the steps done so far; if it is unknown, it is assumed to equal them.
    """
    executor, members, pacing, recording = host.executor, host.members, host.pacing, host.recording
    if pacing.is_trial:
        return
    steps = recording.record.steps
    width, before = width_for(members, executor.program.plan), len(members.slots.index)
    if pacing.pays(width, before, steps if steps_left is None else min(steps_left, steps)):
        pacing.restart()
        validate_stopped(executor.program, members, recording)
        members.shrink(width)


def _setting(host: Host, length: Length, cursor: Cursor) -> Setting:
    """The setting of the run, for its source."""
    executor, members = host.executor, host.members
    steps = members.inputs.limits.steps
    limits = np.unique(np.asarray([] if steps is None else to_host(steps), np.int64))
    periods = tuple(every for every in (host.saving.every, host.callbacks.every) if every is not None)
    return Setting(
        length, host.recording.record.steps, cursor, periods, limits, host.stopping.seconds_between_looks,
        host.stopping.must_end, executor.program, members.slots, executor.inspect, executor.cost,
    )  # fmt: skip


def _can_halve(work: AbstractWork) -> bool:
    """Whether work that raised can be rerun in halves, so that the run ends just before the failing step."""
    return work.may_raise and work.num_steps > 1 and jax.process_count() == 1


def _validate_last(host: Host) -> None:
    """Validates a run that ends within an epoch: all members that train, or only stopped ones if it ended early."""
    program, members, recording = host.executor.program, host.members, host.recording
    if program.score is None or recording.record.is_validated:
        return
    if host.should_stop():
        validate_stopped(program, members, recording)
    else:
        validate(program, members, recording, Occasion.RUN_END)


def validate(program: Program, members: ActiveMembers, recording: Recording, occasion: Occasion) -> None:
    """Scores members between chunks, if there are validation data."""
    if program.score is None:
        return
    carry, scores = compiled_validation((program, members.inputs, jnp.int32(occasion)), members.carry)
    recording.add_scores(to_host(scores), members.slots, of_all=occasion != Occasion.MEMBERS_STOPPED)
    members.carry = carry


def validate_best(program: Program, members: ActiveMembers) -> None:
    """Scores the best weights of an earlier run again: its validation data or its score may have been others.

    Scores that agree up to rounding are kept, so that a run in two parts equals one.
    """
    carry = members.carry
    moving, selection = carry.moving, carry.selection
    if program.score is None or selection is None or not (to_host(selection.step) >= 0).any():
        return
    stopped = jnp.full_like(moving.status, Status.STOPPED)
    best = MemberState(selection.params, moving.opt_state, selection.model_state, stopped, selection.step, moving.fault)
    unseen = Carry(best, dataclasses.replace(selection, scored=selection.step - 1), carry.step)
    _, scores = compiled_validation((program, members.inputs, jnp.int32(Occasion.MEMBERS_STOPPED)), unseen)
    scores, before, found = to_host((scores, selection.score, selection.step >= 0))
    is_half = any(x.dtype.itemsize < 4 for x in jax.tree.leaves(moving.params))
    # Another program sums in another order: a thousandth is far above that in float32, and far below other data.
    changed = found & ~np.isclose(scores, before, rtol=0.05 if is_half else 1e-3, atol=1e-7, equal_nan=True)
    if changed.any():
        members.carry = dataclasses.replace(carry, selection=rescore(selection, changed, scores))


def validate_stopped(program: Program, members: ActiveMembers, recording: Recording) -> None:
    """Scores members that stopped within an epoch, if the last weights of any are not validated yet."""
    moving, selection = members.carry.moving, members.carry.selection
    if program.score is None or selection is None:
        return
    status, stopped_at, scored = to_host((moving.status, moving.stopped_at, selection.scored))
    if ((status == Status.STOPPED) & (stopped_at != scored)).any():
        validate(program, members, recording, Occasion.MEMBERS_STOPPED)
