"""The folder of a run: its checkpoints, and their retention."""

import contextlib
import datetime
import errno
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .._warnings import warn
from . import _disk
from ._disk import Lock, list_folder, open_file
from ._folders import check_folder_free, check_lock_held, foreign_content, is_unfinished
from ._formats import STEP, Format
from ._read import read_manifest
from ._record import check_fields, explain_record, is_count, is_string
from ._write import clean, make_parents, remove

# The lock of a run's folder, in which one run trains at a time.

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
        if not (start.startswith(_START) or _START.startswith(start)):
            raise FileExistsError(
                errno.EEXIST,
                f"`{path}` is the file of a lock for runs of `fit`, and was not written by `fit`, so it is not "
                "overwritten.\nMove it away, or save in another folder",
            )


class Retention(NamedTuple):
    """Which checkpoints are kept: the `last` newest, the `best` by score, and every multiple of `keep_period`."""

    last: int
    best: int
    keep_period: int | None

    def superfluous(self, scores: Mapping[int, float | None], newest: int) -> list[int]:
        """The steps that are not kept, given the scores of all; `newest`, the one just saved, always is."""
        kept = {newest, *sorted(scores)[-self.last :]}
        scored = [(score, -step) for step, score in scores.items() if score is not None]
        kept |= {-step for _, step in sorted(scored)[: self.best]}
        return [step for step in scores if step not in kept and not (self.keep_period and step % self.keep_period == 0)]


class RunFolder:
    """Checkpoints in one folder, numbered by step; old ones are removed after each save."""

    def __init__(self, path: Any, format: Format, retention: Retention) -> None:
        self._path, self._format, self._retention = path, format, retention
        self._scores: dict[int, float | None] = {}
        self._warned: set[int] = set()

    def step_path(self, step: int) -> Any:
        """The folder of one checkpoint."""
        return self._path / f"step-{step:012d}"

    def steps(self) -> list[int]:
        """The step numbers of the complete checkpoints, in order."""
        return sorted(step for step, entry in self._entries() if self._format.stands(entry))

    def finish(self, step: int, write: Callable[[], None], score: float | None) -> None:
        """Writes a checkpoint, then removes those that are not kept."""
        write()
        self._scores[step] = score
        if not self._format.leads():
            return
        try:
            clean(self._path, STEP)
            for old in self._retention.superfluous(self._kept_scores(), step):
                self._remove(old)
        except OSError as error:
            warn(f"Step {step} is saved, but an old checkpoint could not be removed: {error}")

    def _entries(self) -> list[tuple[int, Any]]:
        """The folders of checkpoints, also of those that were never finished, with their steps."""
        matches = [(STEP.fullmatch(entry.name), entry) for entry in list_folder(self._path)]
        found = [(int(match[1]), entry) for match, entry in matches if match]
        return [(step, entry) for step, entry in found if step in self._scores or entry.is_dir()]

    def _kept_scores(self) -> dict[int, float | None]:
        """The scores of the complete checkpoints. Those that a killed process did not finish are removed.

        One whose manifest cannot be read has no score: it is neither counted nor removed. Each is read once.
        """
        entries = self._entries()
        for step, entry in entries:
            if step in self._scores:
                continue
            if is_unfinished(entry) and not foreign_content(entry):
                remove(entry)
            elif self._format.stands(entry):
                with contextlib.suppress(ValueError, OSError):
                    self._scores[step] = read_manifest(entry).score
        return {step: self._scores[step] for step, _ in entries if step in self._scores}

    def _remove(self, step: int) -> None:
        """Removes an old checkpoint; one that contains other files is kept, with one warning."""
        try:
            remove(self.step_path(step))
            del self._scores[step]
        except FileExistsError as error:
            if step not in self._warned:
                self._warned.add(step)
                warn(f"An old checkpoint is kept: {error}")
