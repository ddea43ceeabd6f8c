"""The folder of a call: its lock, `resume=`, the record of the call and its comparison, and its subfolders.

`fit`, the methods of several runs and `fleet.fit` save in such a folder. It holds some of

    fit.lock                        who uses it, while a call does
    call/                           a checkpoint: the record of the call, and its division into shards
    step-000000000100/              checkpoints of one run, with the record of its call
    round-000001/, shard-000003/    subfolders: each the folder of a run, or a checkpoint
"""

import contextlib
import datetime
import errno
import hashlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from .._caller import caller
from .._warnings import warn
from ..distributed import is_first
from ..distributed._engine import raise_on_all
from . import _disk
from ._disk import Lock, has_manifest, is_on_disk, list_folder, open_file
from ._folders import check_overwritable, has_our_manifest, is_checkpoint
from ._formats import STEP, open_checkpoint
from ._record import check_fields, explain_record, is_count, is_list, is_string, is_texts
from ._restore import restore
from ._snapshot import DTYPES, snapshot, versions
from ._write import make_parents, write

# Why it is made like this:
#
# - A call may be killed at any operation, so no two files have to change together. A checkpoint contains the record of
#   its call. Only shards, which many workers write, contain a digest of the record in `call` instead: it is written,
#   atomically, before the first of them, and replaced only while none is complete. Rounds that another `fit` trains
#   cannot contain a record: `call` is written after the first of them, which that `fit` compares by itself.
# - The lock is that of the operating system, which ends with the process. The existence of a file would block the
#   folder after a kill, and a time stamp needs clocks that agree.
# - Calls are compared by short texts, one per argument, so that an error can name the arguments that differ. What a
#   text says of a program or a function changes with the versions of the libraries and with the device. These texts
#   are then left out, with a warning, because an upgrade should not make a folder useless. A text that only one of the
#   calls has, such as that of a score, is a difference under any version.

# The lock of a folder, in which one call works at a time.

LOCK = "fit.lock"
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
        self._folder, self._path = folder, folder / LOCK
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
            _check_free(self._folder, self._holder(), free=free)

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
                    _check_free(self._folder, self._holder(), free=not last)
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
        if holder is not None and holder["token"] != self._token:  # the file system has no locks between machines
            raise BlockingIOError(
                errno.EWOULDBLOCK,
                f"The checkpoint folder `{self._folder}` was taken over by another run: process {holder['pid']} on "
                f"`{holder['host']}`, since {holder['since']}.\nGive each run a folder of its own",
            )

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
                return check_fields(holder, _HOLDER, LOCK)
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


@contextlib.contextmanager
def lock_folder(folder: Path | None) -> Iterator[None]:
    """Holds the lock of a folder, if there is one."""
    if folder is None:
        yield
        return
    lock = RunLock(folder)
    with _explain(folder):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


class Claim:
    """A run's lock on its folder, held by one process for all processes of the run.

    Object stores have no locks. `steps` returns the steps of the folder's checkpoints.
    """

    def __init__(self, folder: Any, steps: Callable[[], list[int]]) -> None:
        self._folder, self._steps = folder, steps
        self._lock = RunLock(folder) if is_on_disk(folder) and is_first() else None
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
        with _explain(self._folder):
            make_parents(self._folder)
            if not self._steps() and not os.access(self._folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        lock.look()

    def _take(self, lock: RunLock, seen: list[int]) -> None:
        with _explain(self._folder):
            lock.acquire()
        now = self._steps()
        if now[-1:] != seen[-1:]:
            raise BlockingIOError(
                errno.EWOULDBLOCK,
                f"Another run has saved step {now[-1] if now else None} in the checkpoint folder `{self._folder}` "
                "since this one read it.\nCall `fit` again, or save in another folder",
            )


@contextlib.contextmanager
def _explain(path: Any) -> Iterator[None]:
    """Adds the path to errors of making or writing the folder of a run."""
    try:
        yield
    except (BlockingIOError, FileExistsError):
        raise  # the folder is in use, or has a lock that is not ours: the message says so
    except OSError as error:
        raise OSError(
            error.errno,
            f"`fit` cannot save in the checkpoint folder `{path}`: {error.strerror or error}.\nNothing is trained yet: "
            "check the folder and its permissions, or save elsewhere.",
        ) from error


def _check_free(path: Any, holder: dict[str, Any] | None, *, free: bool) -> None:
    """Checks that no other run holds the folder."""
    if not free:
        who = "another process"
        if holder:
            who = f"process {holder.get('pid')} on `{holder.get('host')}`, since {holder.get('since')}"
            if holder.get("pid") == os.getpid() and holder.get("host") == socket.gethostname():
                who += ", which is this process: another thread, possibly left by an interrupted call"
        raise BlockingIOError(
            errno.EWOULDBLOCK,
            f"`fit` needs a checkpoint folder that no other run uses, and `{path}` is in use: by {who}.\nWait for that "
            "run to end, end it, or save in another folder",
        )


def check_run_folder(folder: Any) -> None:
    """Raises for a file, and for a folder that `save` wrote: checkpoints would be written among its arrays."""
    check_overwritable(folder, is_checkpoint=not folder.exists() or folder.is_dir())
    if is_on_disk(folder) and has_our_manifest(folder):
        raise FileExistsError(
            errno.EEXIST,
            f"`{caller()}` needs a folder for checkpoints as `checkpoint`; `{folder}` is a single checkpoint written "
            "by `save`.\n"
            "Choose another folder; `load` reads this one",
        )


def check_resume(resume: str, folder: Any, found: str) -> None:
    """Raises for `resume="must"` if a folder holds no checkpoints, and for `"never"` if it does.

    `found` names them for the message; it is empty if there are none.
    """
    if resume == "must" and not found:
        raise FileNotFoundError(errno.ENOENT, f"`{caller()}` must resume, and found no checkpoint in `{folder}`")
    if resume == "never" and found:
        raise FileExistsError(
            errno.EEXIST,
            f"`{caller()}` must not resume, and `{folder}` holds {found}, which are not overwritten.\nChoose another "
            "folder, or remove this one",
        )


def has_checkpoints(folder: Any) -> bool:
    """Whether a folder or any of its subfolders holds a checkpoint of a run."""
    return any(STEP.fullmatch(path.name) for path in folder.glob("**/step-*"))


# The record of a call, and its comparison with another one.

_DIGEST = re.compile(r",? ?[0-9a-f]{64}")
_FIELDS = {"texts": is_texts, "code": lambda value: is_list(value, str), "conditions": is_texts}


class CallRecord(NamedTuple):
    """What identifies a call.

    **Attributes:**

    - `texts`: one for each argument, by name.
    - `code`: the names of the texts of programs and functions, which can be compared under equal conditions only.
    - `conditions`: what else determines the last bits, as `conditions` returns it.
    """

    texts: dict[str, str]
    code: tuple[str, ...]
    conditions: dict[str, str]

    @classmethod
    def read(cls, value: Any, name: str) -> "CallRecord":
        """A record from JSON; `InvalidRecordError`, with its name, for anything else."""
        fields = check_fields(value, _FIELDS, name)
        return cls(fields["texts"], tuple(fields["code"]), fields["conditions"])

    @property
    def digest(self) -> str:
        """The SHA-256 digest of the texts and conditions."""
        return hashlib.sha256(json.dumps([self.texts, self.conditions], sort_keys=True).encode()).hexdigest()


def conditions(**settings: str) -> dict[str, str]:
    """The versions of the libraries, the kind of device, and some settings of JAX."""
    packages = {name: version for name, version in versions().items() if name not in ("python", "numpy")}
    packages["bytecode"] = str(sys.implementation.cache_tag)  # by which functions that cannot be traced are compared
    return packages | {"backend": jax.default_backend()} | settings


def check_same_call(
    saved: CallRecord, now: CallRecord, folder: Any, *, effect: str, harmless: Collection[str] = ()
) -> None:
    """Raises if a folder was written by a different call; warns if by the same call under other conditions.

    **Arguments:**

    - `effect`: what other conditions change, for the warning.
    - `harmless`: the conditions under which texts of code can be compared nevertheless.
    """
    before, after = saved.texts, now.texts
    changed = _differences(saved.conditions, now.conditions)
    comparable = {*changed} <= {*harmless}
    if not comparable:
        code = {*saved.code} & {*now.code}
        before, after = ({word: x for word, x in texts.items() if word not in code} for texts in (before, after))
    differ = _differences(before, after)
    if differ:
        lines = "\n".join(f"  `{word}`: {_difference_text(before.get(word), after.get(word))}" for word in differ)
        raise ValueError(
            f"`{caller()}` cannot resume from `{folder}`: this call differs from the one that wrote "
            f"it.\n{lines}\nRepeat that call, or save in another folder; to continue with changes, call `fit` on the "
            "run that it returns."
        )
    if changed:
        changes = ", ".join(f"{word} {saved.conditions.get(word)} -> {now.conditions.get(word)}" for word in changed)
        warn(
            f"`{caller()}` resumes from `{folder}`, saved under other conditions ({changes}): {effect}"
            f"{'' if comparable else ', and functions cannot be compared'}."
        )


def _differences(saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [word for word in {**saved, **now} if saved.get(word) != now.get(word)]


def _difference_text(saved: str | None, now: str | None) -> str:
    if saved is None or now is None:
        return f"saved {'without' if saved is None else 'with'} it, now {'without' if now is None else 'with'} it"
    before, after = (_DIGEST.sub("", text) for text in (saved, now))
    if before != after:
        return f"saved {before or 'another one'}, now {after or 'another one'}"
    return f"{before + ', ' if before else ''}not the same as saved"


# The call of a folder, and the children of a folder.

CALL = "call"


def write_call(folder: Path, record: CallRecord, arrays: dict[str, np.ndarray]) -> None:
    """Saves the record of a call, and some arrays, atomically; replaces the one that is there."""
    write(folder / CALL, snapshot(arrays, meta={CALL: record._asdict()}))


def has_call(folder: Path) -> bool:
    """Whether the call of a folder is saved, damaged or not."""
    return is_saved(folder / CALL)


def is_saved(path: Path) -> bool:
    """Whether there is a checkpoint, damaged or not."""
    return has_manifest(path) and is_checkpoint(path)


def read_call(folder: Path) -> tuple[CallRecord, dict[str, np.ndarray]]:
    """Reads the record of a call and the arrays; an empty record and none if the checkpoint is not that of a call."""
    with open_checkpoint(folder / CALL) as reader, explain_record(folder / CALL):
        meta: Any = reader.manifest.meta
        if not (isinstance(meta, dict) and CALL in meta):
            return CallRecord({}, (), {}), {}
        record = CallRecord.read(meta[CALL], CALL)
        like = {entry.path[2:-2]: np.empty(entry.shape, DTYPES[entry.dtype]) for entry in reader.manifest.entries}
        return record, restore(reader, like, rows=None, cast=None, strict=True)


def child(folder: Any, kind: str, number: int) -> Any:
    """The subfolder of a round, a shard and the like."""
    return folder / f"{kind}-{number:06d}"


def children(folder: Any, kind: str) -> list[int]:
    """The numbers of the subfolders of one kind, in order."""
    matches = [re.fullmatch(rf"{kind}-([0-9]{{6,}})", entry.name) for entry in list_folder(folder) if entry.is_dir()]
    return sorted(int(match[1]) for match in matches if match)
