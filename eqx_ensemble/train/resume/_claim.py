import errno
import os
from collections.abc import Callable

from ...checkpoint import Checkpoints
from ...checkpoint._check_folders import check_nothing_newer, explain_folder
from ...checkpoint._commit import make_parents
from ...checkpoint._path import is_on_disk
from ...checkpoint._run_lock import RunLock
from ...distributed import is_first
from ...distributed._collectives import raise_on_all


class Claim:
    """A run's lock on its folder, held by one process for all processes of the run.

    Object stores have no locks.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._folder = checkpoints.path(0).parent
        self._lock = RunLock(self._folder) if is_on_disk(self._folder) and is_first() else None
        self._taken = False
        self._call(self._prepare)

    def take(self, seen: list[int]) -> None:
        """Takes the lock before the first step; `seen` are the checkpoints that the run resumed from."""
        if not self._taken:
            self._call(lambda lock: self._take(lock, seen))
            self._taken = True

    def check(self) -> None:
        """Raises if another run has taken the folder."""
        self._call(RunLock.check)

    def release(self) -> None:
        """Releases the lock."""
        if self._lock is not None:
            self._lock.release()

    def _call(self, job: Callable[[RunLock], None]) -> None:
        """Calls `job` with the lock in the process that holds it; an error is raised in all processes."""
        failed = None
        try:
            if self._lock is not None:
                job(self._lock)
        except OSError as error:
            failed = error
        raise_on_all(failed)

    def _prepare(self, lock: RunLock) -> None:
        """Raises, before compiling, if the run cannot be saved."""
        with explain_folder(self._folder):
            make_parents(self._folder)
            if not self._checkpoints.steps and not os.access(self._folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        lock.look()

    def _take(self, lock: RunLock, seen: list[int]) -> None:
        with explain_folder(self._folder):
            lock.acquire()
        check_nothing_newer(self._folder, seen, self._checkpoints.steps)
