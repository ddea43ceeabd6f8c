import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..._pytree import PyTree
from ...distributed import broadcast_from_first, to_host
from ...distributed._engine import all_gather
from .._callback import Every, Progress, check_answer, other_process_message
from .._revive import Revival, Revive, revive_members
from .._state import TrainState, copy_arrays
from .._status import Status
from ..compiled._health import Carry
from ..compiled._optimiser import Optimiser
from ..compiled._selection import reset_best, stop_at_limits, stop_members
from ..data._source import AbstractSource
from ._active import ActiveMembers
from ._record import History, Record, Taken, curves_since
from ._saver import Saver


class Saving:
    """Saves a run, if a checkpoint is given, and measures its duration."""

    def __init__(self, saver: Saver | None, record: Record, revivals: list[Revival] | None) -> None:
        self._saver, self._record, self._revivals = saver, record, revivals
        self._started = time.perf_counter() - (0.0 if saver is None else saver.seconds_before)

    @property
    def is_on(self) -> bool:
        """Whether the run is saved."""
        return self._saver is not None

    @property
    def every(self) -> int | None:
        """The number of steps between two checkpoints, if that is given."""
        return None if self._saver is None else self._saver.every

    @property
    def seconds(self) -> float:
        """The time since the call began, including the time before it was resumed."""
        return time.perf_counter() - self._started

    @property
    def error(self) -> OSError | None:
        """The error of a save that failed, after which the run ends."""
        return None if self._saver is None else self._saver.failed

    def save(self, members: ActiveMembers, source: AbstractSource, *, if_due: bool = False) -> None:
        """Saves the run, unless it has no step or its last one is saved; with `if_due`, if it is time for it."""
        saver, step = self._saver, self._record.steps
        if saver is None or saver.step == step or not self._record.has_steps or (if_due and not saver.due(step)):
            return
        saver.save(
            members.all(),
            members.constants,
            self._record,
            revived=self._revivals,
            cursor=source.bookmark(),
            seconds=self.seconds,
        )


class Reviver:
    """Revives members during a run, and counts the revivals of each."""

    def __init__(
        self, how: Revive, optimiser: Optimiser, shared: PyTree, ids: Array, before: list[Revival], *, key: Any
    ) -> None:
        self.revivals = list(before)
        self._how, self._optimiser, self._shared = how, optimiser, shared
        self._ids, self._key = to_host(ids), key
        self._times = (self._ids[:, None] == [revival.member for revival in before]).sum(axis=1)

    def revive(self, members: ActiveMembers) -> None:
        """Revives the members that diverged, except those that were revived `most` times already."""
        slots, carry, inputs = members.slots, members.carry, members.inputs
        lost = np.flatnonzero(members.latest.status == Status.DIVERGED)
        lost = lost[self._times[slots.members[lost]] < self._how.most]
        if len(lost) == 0:
            return
        ids, times = jnp.asarray(slots.distinct(self._ids)), self._times[slots.members[lost]]
        state = TrainState(carry.moving, inputs.fixed, self._shared, ids, carry.step)
        moving, fixed, revived = revive_members(state, self._optimiser, self._how, lost, times, key=self._key)
        if revived:
            self._times[slots.members[lost]] += 1
            self.revivals += revived
            moving = stop_at_limits(moving, inputs.limits, carry.step)
            members.replace(Carry(moving, reset_best(carry.selection, moving, lost), carry.step), fixed)


_SECONDS = 1.0


class Interruption:
    """Defers Ctrl-C until the state of a run is consistent.

    Between a donating call and the assignment of its result, the old state is deleted and the new one not yet assigned:
    a `KeyboardInterrupt` there loses both. In this context the first Ctrl-C is only recorded; the second one raises.

    **Attributes:**

    - `is_requested`: whether the end of the run is requested.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._before = None

    def __enter__(self) -> "Interruption":
        own = threading.current_thread() is threading.main_thread()
        if own and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_requested:
            raise KeyboardInterrupt
        self.is_requested = True


class Ending:
    """Decides when a run ends, stops members after their `seconds`, and revives those that diverged."""

    def __init__(
        self,
        interruption: Interruption,
        saving: Saving,
        reviver: Reviver | None,
        *,
        on_diverge: Literal["freeze", "raise"] | Revive,
        lost_before: int,
        seconds: np.ndarray | None,
    ) -> None:
        self._interruption, self._saving, self._reviver = interruption, saving, reviver
        self._most_lost = lost_before if on_diverge == "raise" else None
        self._seconds = seconds
        self._ended = False

    @property
    def ended_early(self) -> bool:
        """Whether Ctrl-C or a callback ended the run."""
        return self._interruption.is_requested or self._ended

    def end(self) -> None:
        """Ends the run at this boundary, as Ctrl-C does. All processes must call it."""
        self._ended = True

    @property
    def seconds_between_looks(self) -> float:
        """The time between inspections of the results of steps on batches; 0 for every step.

        It is 0 if a diverged member must end the run or be revived before the next step, and with several processes,
        which must inspect the same steps.
        """
        if self._most_lost is not None or self._reviver is not None or jax.process_count() > 1:
            return 0.0
        return _SECONDS if self._seconds is None else _SECONDS / 100

    def must_end(self) -> bool:
        """Whether the run ends regardless of its members: it is interrupted, or cannot be saved."""
        return self._interruption.is_requested or self._saving.error is not None

    def should_stop(self, members: ActiveMembers, *, begun: bool) -> bool:
        """Whether the run ends: it is interrupted, a save failed, no member trains, or one diverged under `"raise"`."""
        if self._saving.error is not None:
            return True
        failed = self._most_lost is not None and (members.status == Status.DIVERGED).sum() > self._most_lost
        interrupted = broadcast_from_first(self._interruption.is_requested) and begun  # a run has at least one step
        return bool(interrupted or self._ended or failed or not members.latest.num_training)

    def stop(self, members: ActiveMembers, chosen: np.ndarray) -> None:
        """Stops those of the `chosen` members `(members,)` that are training."""
        carry, here = members.carry, chosen[members.slots.index]
        if here.any():
            members.carry = dataclasses.replace(carry, moving=stop_members(carry.moving, here, carry.step))

    def handle_stopped(self, members: ActiveMembers) -> None:
        """Stops members after their `seconds`, and revives those that diverged."""
        if self._seconds is not None:
            self.stop(members, broadcast_from_first(self._saving.seconds) >= self._seconds)
        self.revive(members)

    def revive(self, members: ActiveMembers) -> None:
        """Revives members that diverged, if `on_diverge` says so."""
        if self._reviver is not None:
            self._reviver.revive(members)


class NewRecords:
    """The records since the last `take`, which was after `steps` steps."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._taken = self._now
        self._all_taken = True
        self._open_taken_at = -1

    @property
    def _now(self) -> Taken:
        return Taken(self._record.steps, self._record.columns.num_ended, len(self._record.scores))

    @property
    def steps(self) -> int:
        """The number of steps done at the last `take`."""
        return self._taken.steps

    @property
    def any(self) -> bool:
        """Whether there are new steps or validations."""
        return self._now != self._taken

    @property
    def any_left(self) -> bool:
        """Whether there are new records, or a window that the last `take` left out because it had not ended."""
        return self.any or not self._all_taken

    def take(self, *, last_step: int | None, ends: bool) -> tuple[Callable[[], History], int]:
        """A function that returns the new curves, and the last step.

        They are trimmed like those of the run if no member trains after `last_step`. A last window that has not ended
        is left out, unless the run `ends`.
        """
        record, taken = self._record, self._taken
        is_known = record.columns.has_open and self._open_taken_at == record.steps  # a validation may have followed it
        self._taken = self._now
        self._all_taken = ends or not record.columns.has_open
        if ends and record.columns.has_open:
            self._open_taken_at = record.steps
        if last_step is None:
            return curves_since(record, taken, with_open=ends and not is_known), record.steps
        history = record.history(last_step)
        loss, aux, step = jax.tree.map(
            lambda curves: curves[(slice(None),) * (curves.ndim > 1) + (slice(taken.windows + is_known, None),)],
            (history.loss, history.aux, history.step),
        )
        scores = None if history.validation is None else history.validation[:, taken.validations :]
        new = History(loss, aux, scores, history.validation_step[taken.validations :], step)
        return lambda: new, int(history.step[-1])


class Callbacks:
    """Calls the callbacks of a run between chunks, and stops the members or the run that they select.

    All processes call theirs at the same steps, and the return values of the first process are used.

    **Attributes:**

    - `periods`: the numbers of steps between two calls.
    """

    def __init__(
        self,
        callbacks: Sequence[Every],
        *,
        begun: int,
        start: TrainState,
        record: Record,
        saving: Saving,
        stopping: Ending,
    ):
        # Those of one period are called together, with the records since their last call.
        found = dict.fromkeys(each.steps for each in callbacks)
        self._due = {every: ([x for x in callbacks if x.steps == every], NewRecords(record)) for every in found}
        self.periods = [every for every in found if every is not None]
        self._record, self._saving, self._stopping = record, saving, stopping
        self._start, self._ids = start, to_host(start.ids) if callbacks else None
        self._begun, self._has_run = begun, False

    def call(self, members: ActiveMembers, source: AbstractSource) -> None:
        """Calls the callbacks after a chunk, if it is time and the chunk added steps or validations."""
        self._has_run = True
        step = self._record.steps
        due = [
            every
            for every, (_, new) in self._due.items()
            if new.any and (every is None or step // every > new.steps // every)
        ]
        if due:
            ends, stopping = self._answers(members, source, due)
            self._stopping.stop(members, stopping)
            if ends:
                self._stopping.end()

    def finish(self, members: ActiveMembers, source: AbstractSource) -> None:
        """Calls the callbacks at the end of a run, if anything is new. Members that they select have ended already."""
        due = [every for every, (_, new) in self._due.items() if new.any_left]
        if due and self._has_run:
            ends, _ = self._answers(members, source, due, last=True)
            if ends:
                self._stopping.end()

    def _answers(
        self, members: ActiveMembers, source: AbstractSource, due: list[int | None], *, last: bool = False
    ) -> tuple[bool, np.ndarray]:
        """Whether the run ends, and which members `(members,)` stop, by the callbacks of the periods `due`."""
        count = members.slots.num_members
        asked = np.zeros(count + 2, bool)  # of each member, of the run, and whether a callback raised
        error: Exception | None = None
        snapshots = [lambda: self._snapshot(members)]
        try:
            for callbacks, new in map(self._due.__getitem__, due):
                progress = self._progress(members, source, new, snapshots, last=last)
                for callback in callbacks:
                    answer = check_answer(callback(progress), callback.callback, count)
                    if isinstance(answer, np.ndarray):
                        asked[:-2] |= answer
                    else:
                        asked[-2] |= answer
        except Exception as raised:
            error, asked[-1] = raised, True
        finally:
            snapshots.clear()
        asked = self._agree(asked, error, members, source)
        return bool(asked[-2]), asked[:-2]

    def _agree(
        self, asked: np.ndarray, error: Exception | None, members: ActiveMembers, source: AbstractSource
    ) -> np.ndarray:
        """The return values of the first process. If a callback raised in any, saves the run and raises in all."""
        gathered = all_gather(asked)
        failed = gathered[:, -1]
        if failed.any() and jax.process_count() > 1:
            self._saving.save(members, source)
        if error is not None:
            raise error
        if failed.any():
            raise RuntimeError(other_process_message(np.flatnonzero(failed).tolist()))
        return gathered[0]

    def _progress(
        self, members: ActiveMembers, source: AbstractSource, new: NewRecords, snapshots: list, *, last: bool
    ) -> Progress:
        record, status, last_step = self._record, members.status, members.last_step
        ends = last or last_step is not None or record.steps == source.last_step
        curves, step = new.take(last_step=last_step, ends=ends)
        ids, status, loss, score = map(_read_only, (self._ids, status, record.latest_loss, record.latest_score))
        return Progress(
            step, source.last_step, self._num_epochs(source, step), self._saving.seconds, ids, status, loss, score,
            lambda: jax.tree.map(_read_only, curves()), snapshots,
        )  # fmt: skip

    def _num_epochs(self, source: AbstractSource, step: int) -> int:
        """The number of epochs of this run that have ended."""
        epoch = None if source.order is None else source.epoch
        return source.cursor.epochs if epoch is None else step // epoch - self._begun // epoch

    def _snapshot(self, members: ActiveMembers) -> TrainState:
        carry, start = members.all(), self._start
        moving, step = copy_arrays((carry.moving, carry.step))
        return TrainState(moving, members.constants, start.shared, start.ids, step)


def _read_only(x: PyTree) -> PyTree:
    if isinstance(x, np.ndarray):
        x = x.view()
        x.flags.writeable = False
    return x
