from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..._pytree import PyTree
from ...distributed import to_host
from ...distributed._arrays import all_gather
from .._callback import Progress, check_answer, other_process_message
from .._state import TrainState, copy_arrays
from ..data._source import AbstractSource
from ._active import ActiveMembers
from ._record import History, Record, Taken
from ._saving import Saving
from ._stopping import Stopping


class NewRecords:
    """The records since the last `take`, which was after `steps` steps."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._taken = self._now
        self._num_windows = record.columns.num_ended
        self._all_taken = True
        self._open_taken_at = -1

    @property
    def _now(self) -> Taken:
        return Taken(self._record.steps, self._record.columns.num_parts, len(self._record.scores))

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

    def take(self, *, last_step: int | None, ends: bool) -> tuple[History, int]:
        """The new curves and the last step; trimmed like those of the run if no member trains after `last_step`.

        A last window that has not ended is left out, unless the run `ends`.
        """
        record, taken, num_windows = self._record, self._taken, self._num_windows
        is_known = record.columns.has_open and self._open_taken_at == record.steps  # a validation may have followed it
        self._taken, self._num_windows = self._now, record.columns.num_ended
        self._all_taken = ends or not record.columns.has_open
        if ends and record.columns.has_open:
            self._open_taken_at = record.steps
        if last_step is None:
            return record.curves(since=taken, with_open=ends and not is_known), record.steps
        history = record.history(last_step)
        loss, aux, step = jax.tree.map(
            lambda curves: curves[(slice(None),) * (curves.ndim > 1) + (slice(num_windows + is_known, None),)],
            (history.loss, history.aux, history.step),
        )
        scores = None if history.validation is None else history.validation[:, taken.validations :]
        new = History(loss, aux, scores, history.validation_step[taken.validations :], step)
        return new, int(history.step[-1])


class Callbacks:
    """Calls the callbacks of a run between chunks, and stops the members or the run that they select.

    All processes call theirs at the same steps, and the return values of the first process are used.

    **Attributes:**

    - `every`: the number of steps between two calls; `None` for a call after every chunk.
    """

    def __init__(
        self,
        callbacks: Sequence[Callable[..., Any]],
        *,
        every: int | None,
        begun: int,
        start: TrainState,
        record: Record,
        saving: Saving,
        stopping: Stopping,
    ):
        self.every = every
        self._callbacks, self._record, self._saving, self._stopping = callbacks, record, saving, stopping
        self._start, self._ids = start, to_host(start.ids) if callbacks else None
        self._new = NewRecords(record)
        self._begun, self._has_run = begun, False

    def call(self, members: ActiveMembers, source: AbstractSource) -> None:
        """Calls the callbacks after a chunk, if it is time and the chunk added steps or validations."""
        self._has_run = True
        if not self._callbacks or not self._new.any:
            return
        step, every = self._record.steps, self.every
        if every is None or step // every > self._new.steps // every:
            ends, stopping = self._answers(members, source)
            self._stopping.stop(members, stopping)
            if ends:
                self._stopping.end()

    def finish(self, members: ActiveMembers, source: AbstractSource) -> None:
        """Calls the callbacks at the end of a run, if anything is new. Members that they select have ended already."""
        if self._callbacks and self._has_run and self._new.any_left:
            ends, _ = self._answers(members, source, last=True)
            if ends:
                self._stopping.end()

    def _answers(
        self, members: ActiveMembers, source: AbstractSource, *, last: bool = False
    ) -> tuple[bool, np.ndarray]:
        """Whether the run ends, and which members `(members,)` stop."""
        count = members.slots.num_members
        asked = np.zeros(count + 1, bool)
        progress, snapshots = self._progress(members, source, last=last)
        error: Exception | None = None
        try:
            for callback in self._callbacks:
                answer = check_answer(callback(progress), callback, count)
                if isinstance(answer, np.ndarray):
                    asked[:-1] |= answer
                else:
                    asked[-1] |= answer
        except Exception as raised:
            error = raised
        finally:
            snapshots.clear()
        asked = self._agree(asked, error, members, source)
        return bool(asked[-1]), asked[:-1]

    def _agree(
        self, asked: np.ndarray, error: Exception | None, members: ActiveMembers, source: AbstractSource
    ) -> np.ndarray:
        """The return values of the first process. If a callback raised in any, saves the run and raises in all."""
        gathered = all_gather(np.append(asked, error is not None))
        failed = gathered[:, -1]
        if failed.any() and jax.process_count() > 1:
            self._saving.save(members, source)
            self._saving.wait()
        if error is not None:
            raise error
        if failed.any():
            raise RuntimeError(other_process_message(np.flatnonzero(failed).tolist()))
        return gathered[0, :-1]

    def _progress(self, members: ActiveMembers, source: AbstractSource, *, last: bool) -> tuple[Progress, list]:
        record, status, last_step = self._record, members.status, members.last_step
        ends = last or last_step is not None or record.steps == source.last_step
        history, step = self._new.take(last_step=last_step, ends=ends)
        snapshots = [lambda: self._snapshot(members)]
        seen = (self._ids, status, record.latest_loss, record.latest_score, history)
        ids, status, loss, score, history = jax.tree.map(_read_only, seen)
        progress = Progress(
            step, source.last_step, self._num_epochs(source, step), self._saving.seconds, ids, status, loss, score,
            history, snapshots,
        )  # fmt: skip
        return progress, snapshots

    def _num_epochs(self, source: AbstractSource, step: int) -> int:
        """The number of epochs of this run that have ended."""
        order = source.order
        return source.cursor.epochs if order is None else step // order.epoch - self._begun // order.epoch

    def _snapshot(self, members: ActiveMembers) -> TrainState:
        carry, start = members.all(), self._start
        moving, step = copy_arrays((carry.moving, carry.step))
        return TrainState(moving, members.constants, start.shared, start.ids, step)


def _read_only(x: PyTree) -> PyTree:
    if isinstance(x, np.ndarray):
        x = x.view()
        x.flags.writeable = False
    return x
