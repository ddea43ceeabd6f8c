"""The one place through which checkpoints change the disk, so that tests can break it at every step.

Each function is one operation that the operating system does or refuses.
"""

import contextlib
import enum
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: folders cannot be locked, and stale ones are left for the user
    fcntl = None


def make_folder(path: Path) -> None:
    """Makes a folder that is not there."""
    os.mkdir(path)


def open_or_create(path: Path) -> int:
    """Opens a file for reading and writing; it stays what it is if it is there."""
    return os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0), 0o666)


def create(path: Path) -> int:
    """Opens a file that is not there for writing."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)


def write(file: int, data: bytes | memoryview) -> int:
    """Writes some of the bytes, and says how many."""
    return os.write(file, data)


def sync(file: int) -> None:
    """Returns when the content of an open file is on the disk."""
    os.fsync(file)


def sync_folder(path: Path) -> None:
    """Returns when the names in a folder are on the disk."""
    if os.name == "nt":
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def rename(old: Path, new: Path) -> None:
    """Gives a folder a name that is free."""
    os.rename(old, new)


def replace(old: Path, new: Path) -> None:
    """Puts a file in the place of another, in one step."""
    os.replace(old, new)


def remove(path: Any) -> None:
    """Removes a file, also one in an object store."""
    path.unlink()


def remove_empty_folder(path: Path) -> None:
    """Removes a folder in which there is nothing."""
    os.rmdir(path)


def remove_folder(path: Any) -> None:
    """Removes a folder with all that is in it, also one in an object store."""
    if isinstance(path, Path):
        shutil.rmtree(path)
    else:
        path.rmtree()


def write_all(file: int, data: bytes | memoryview) -> None:
    """Writes all of the bytes."""
    view = memoryview(data)
    while view:
        view = view[write(file, view) :]


@contextlib.contextmanager
def hold_lock(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Holds the lock of a folder or a file; yields whether it is held. The system frees it when the process ends.

    With `wait`, where they cannot be locked (Windows, folders on network disks), work goes on without.
    """
    if fcntl is None:
        yield wait
        return
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        if wait:
            raise
        yield False
        return
    with closing(file):
        yield lock(file, wait=wait) is Lock.HELD or wait


class Lock(enum.Enum):
    """What became of the wish to lock a file."""

    HELD = enum.auto()
    BUSY = enum.auto()
    UNKNOWN = enum.auto()


def lock(file: int, *, wait: bool, shared: bool = False) -> Lock:
    """Locks an open file or folder, until it is closed; says whether that can be done there at all."""
    if fcntl is None:
        return Lock.UNKNOWN
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        return Lock.BUSY if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else Lock.UNKNOWN
    return Lock.HELD


_open: set[int] = set()
"""Files that are locked, or are about to be."""


@contextlib.contextmanager
def closing(file: int) -> Iterator[int]:
    """Closes a file at the end, unless this is then another process than the one that opened it."""
    _open.add(file)
    try:
        yield file
    finally:
        if file in _open:
            _open.discard(file)
            os.close(file)


def _close_in_child() -> None:
    """A child has the files of its parent, and with them would hold their locks after the parent's end."""
    while _open:
        os.close(_open.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def token() -> str:
    """A name that no other process chooses."""
    return secrets.token_hex(4)
