import errno
import io
import os
import stat
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
