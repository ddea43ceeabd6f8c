"""The lock of a run's folder, in which one run trains at a time."""

import contextlib
import datetime
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from . import _disk
from ._check_folders import check_folder_free, check_lock_held
from ._commit import make_parents
from ._disk import Lock

NAME = "fit.lock"
_LIMIT = 4096
_ATTEMPTS, _PAUSE = 10, 0.05


class RunLock:
    """The lock of a folder, held by this process until `release` or until it ends.

    It is the system's lock on a file in the folder; the file's content names the holder. If the file system has no
    locks, or none between machines, the latest run takes over the folder, and `check` raises in the one before.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / NAME
        self._stack: contextlib.ExitStack | None = None
        self._token, self._process = "", 0

    @property
    def is_held(self) -> bool:
        """Whether this process has the lock; a forked child does not."""
        return self._stack is not None and self._process == os.getpid()

    def look(self) -> None:
        """Raises `BlockingIOError` if another run has the lock; changes nothing."""
        try:
            file = os.open(self._path, os.O_RDONLY)
        except OSError:  # there is no lock, or `acquire` raises a better error
            return
        with _disk.closing(file):
            free = _disk.lock(file, wait=False, shared=True) is not Lock.BUSY
            check_folder_free(self._folder, self._holder(), free=free)

    def acquire(self) -> None:
        """Takes the lock; raises `BlockingIOError`, which names its holder."""
        make_parents(self._folder)
        for last in (*[False] * _ATTEMPTS, True):
            with contextlib.ExitStack() as stack:
                file = stack.enter_context(_disk.closing(_disk.open_or_create(self._path)))
                state = _disk.lock(file, wait=False)
                if state is Lock.BUSY:
                    check_folder_free(self._folder, self._holder(), free=not last)
                elif self._is(file):
                    self._token, self._process = _disk.token() + _disk.token(), os.getpid()
                    os.ftruncate(file, 0)
                    _disk.write_all(file, json.dumps(self._self()).encode())
                    self._stack = stack.pop_all()
                    return
            time.sleep(_PAUSE)  # another process was just checking it, or is about to release it

    def check(self) -> None:
        """Raises `BlockingIOError` if another run has taken the folder; takes the lock again if its file is gone."""
        if not self._path.exists():
            self.release()
            self.acquire()
        holder = self._holder()
        check_lock_held(self._folder, holder, ours=holder is None or holder.get("token") == self._token)

    def release(self) -> None:
        """Releases the lock, and removes its file."""
        stack, self._stack = self._stack, None
        if stack is None or self._process != os.getpid():
            return
        with stack, contextlib.suppress(OSError):
            if (self._holder() or {}).get("token") == self._token:
                _disk.remove(self._path)

    def _self(self) -> dict[str, Any]:
        since = datetime.datetime.now(datetime.UTC).isoformat(sep=" ", timespec="seconds")
        return {"host": socket.gethostname(), "pid": self._process, "since": since, "token": self._token}

    def _holder(self) -> dict[str, Any] | None:
        """The holder of the lock, from its file; `None` if it is not written yet."""
        try:
            with open(self._path, "rb") as file:
                holder = json.loads(file.read(_LIMIT))
        except (OSError, ValueError):
            return None
        return holder if isinstance(holder, dict) else None

    def _is(self, file: int) -> bool:
        """Whether an open file still has its name."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(file), os.stat(self._path))
        return False
