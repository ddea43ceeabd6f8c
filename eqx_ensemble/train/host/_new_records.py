import jax

from ._record import History, Record, Taken


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
