"""The functions through which checkpoints change the disk; tests make each of them fail."""

import contextlib
import enum
import errno
import io
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .._check import missing_extra_message
from ._check import check_object_store, corrupt_error
from ._manifest import NAME

_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def as_path(path: str | os.PathLike[str]) -> Any:
    """A path as a `Path`, with `~` as the home folder; in an object store (`gs://...`), as an `etils.epath.Path`."""
    text = os.fspath(path)
    if "://" not in text:
        return Path(text).expanduser()
    check_object_store(text)
    try:
        from etils import epath
    except ImportError:
        raise ImportError(missing_extra_message(text, "orbax-checkpoint", "orbax")) from None
    return epath.Path(text)


def absolute(path: Any) -> Any:
    """The absolute path; that of an object store already is.

    `..` is kept: the folder before it may be a link.
    """
    return path.absolute() if is_on_disk(path) else path


def is_on_disk(path: Any) -> bool:
    """Whether a path is in a file system, and not in an object store."""
    return isinstance(path, Path)


def has_manifest(path: Any) -> bool:
    """Whether a folder has a manifest; without one, a checkpoint is unfinished."""
    return (path / NAME).exists()


def list_folder(path: Any) -> list[Any]:
    """The entries of a folder; none if it does not exist, as an object store has no empty folders."""
    try:
        return list(path.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def open_file(file: Any) -> Any:
    """Opens a regular file for reading. Raises for links and pipes."""
    if not is_on_disk(file):
        return file.open("rb")
    try:
        handle = os.open(file, _FLAGS)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise corrupt_error(file, "it is a symbolic link, which is not followed") from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise corrupt_error(file, "it is no ordinary file")
    return io.FileIO(handle, "rb")


try:
    import fcntl
except ImportError:  # Windows: folders cannot be locked, and stale ones are not removed
    fcntl = None


def make_folder(path: Path) -> None:
    """Creates a new folder."""
    os.mkdir(path)


def open_or_create(path: Path) -> int:
    """Opens a file for reading and writing, creating it if needed."""
    return os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0), 0o666)


def create(path: Path) -> int:
    """Creates a new file for writing."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)


def write(file: int, data: bytes | memoryview) -> int:
    """Writes some of the bytes, and returns how many."""
    return os.write(file, data)


def flush(file: int, start: int, size: int) -> None:
    """Asks the system to start writing a part of an open file to the disk in the background. It is only a hint.

    Linux does so when advised that the part is no longer needed.
    """
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(file, start, size, os.POSIX_FADV_DONTNEED)


def sync(file: int) -> None:
    """Syncs the content of an open file to the disk."""
    os.fsync(file)


def sync_folder(path: Path) -> None:
    """Syncs the names in a folder to the disk."""
    if os.name == "nt":
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def rename(old: Path, new: Path) -> None:
    """Renames a folder to an unused name."""
    os.rename(old, new)


def replace(old: Path, new: Path) -> None:
    """Replaces a file by another, atomically."""
    os.replace(old, new)


def remove(path: Any) -> None:
    """Removes a file, also one in an object store."""
    path.unlink()


def remove_empty_folder(path: Path) -> None:
    """Removes an empty folder."""
    os.rmdir(path)


def remove_folder(path: Any) -> None:
    """Removes a folder with its contents, also one in an object store."""
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
    """Holds the lock of a folder or a file; yields whether it is held. The system releases it when the process ends.

    If locking is impossible (Windows, folders on network disks), `wait` continues without a lock.
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
    """The outcome of locking a file."""

    HELD = enum.auto()
    BUSY = enum.auto()
    UNKNOWN = enum.auto()


def lock(file: int, *, wait: bool, shared: bool = False) -> Lock:
    """Locks an open file or folder until it is closed; `UNKNOWN` if the file system has no locks."""
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
    """Closes a file at the end, in the process that opened it."""
    _open.add(file)
    try:
        yield file
    finally:
        if file in _open:
            _open.discard(file)
            os.close(file)


def _close_in_child() -> None:
    """Closes inherited files, through which a child would hold locks longer than its parent."""
    while _open:
        os.close(_open.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def token() -> str:
    """A random name, unique among processes."""
    return secrets.token_hex(4)
