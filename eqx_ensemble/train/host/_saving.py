import time

from .._revive import Revival
from ..data._source import AbstractSource
from ..resume._resume import Saver
from ._active import ActiveMembers
from ._record import Record


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

    def claim(self) -> None:
        """Locks the folder for this run, before its first step."""
        if self._saver is not None:
            self._saver.claim()

    def save(self, members: ActiveMembers, source: AbstractSource, *, if_due: bool = False) -> None:
        """Saves the run, unless its last step is saved; with `if_due`, if it is time for a checkpoint."""
        saver, step = self._saver, self._record.steps
        if saver is None or saver.step == step or (if_due and not saver.due(step)):
            return
        saver.save(
            members.all(),
            members.constants,
            self._record,
            revived=self._revivals,
            cursor=source.bookmark(),
            seconds=self.seconds,
        )

    def wait(self) -> None:
        """Waits for the last save."""
        if self._saver is not None:
            self._saver.wait()
