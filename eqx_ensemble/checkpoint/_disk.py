"""The one place through which checkpoints change the disk, so that tests can break it at every step.

Each function is one operation that the operating system does or refuses.
"""

import contextlib
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
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Holds the lock of a folder; yields whether it is held. The system lets go of it when the process ends.

    With `wait`, where folders cannot be locked (Windows, some network disks), work goes on without.
    """
    if fcntl is None:
        yield wait
        return
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        if wait:
            raise
        yield False
        return
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            held = True
        except OSError:
            held = wait
        yield held
    finally:
        os.close(folder)


def token() -> str:
    """A name that no other process chooses."""
    return secrets.token_hex(4)
