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
from ._check_folders import check_folder_free, check_lock_held, check_own_lock
from ._check_record import check_fields, explain_record, is_count, is_string
from ._commit import make_parents
from ._disk import Lock
from ._path import open_file

NAME = "fit.lock"
_LIMIT = 4096
_HOLDER = {"host": is_string, "pid": is_count, "since": is_string, "token": is_string}
_START = b'{"host": "'
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
            file = os.open(self._path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        except OSError:  # there is no lock, or `acquire` raises a better error
            return
        with _disk.closing(file):
            _check_own(self._path)
            free = _disk.lock(file, wait=False, shared=True) is not Lock.BUSY
            check_folder_free(self._folder, self._holder(), free=free)

    def acquire(self) -> None:
        """Takes the lock; raises `BlockingIOError`, which names its holder."""
        make_parents(self._folder)
        if os.path.lexists(self._path):
            _check_own(self._path)
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
            holder = json.loads(_read(self._path))
            with explain_record(self._path):
                return check_fields(holder, _HOLDER, NAME)
        except (OSError, ValueError, RecursionError):
            return None

    def _is(self, file: int) -> bool:
        """Whether an open file still has its name."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(file), os.stat(self._path))
        return False


def _read(path: Path) -> bytes:
    with open_file(path) as file:
        return file.read(_LIMIT)


def _check_own(path: Path) -> None:
    """Raises unless a file is a lock of ours, possibly empty or cut off, which may be overwritten."""
    with contextlib.suppress(FileNotFoundError):
        start = _read(path).strip(b"\0")
        check_own_lock(path, is_own=start.startswith(_START) or _START.startswith(start))
