import errno
import io
import os
import stat
from pathlib import Path
from typing import Any

from .._check import missing_extra_message
from ._check import check_object_store
from ._damage import corrupt_error
from ._manifest import NAME

_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def as_path(path: str | os.PathLike[str]) -> Any:
    """Where a path leads: a `Path`, or for an object store (`gs://...`) what Orbax takes for one."""
    text = os.fspath(path)
    if "://" not in text:
        return Path(text)
    check_object_store(text)
    try:
        from etils import epath
    except ImportError:
        raise ImportError(missing_extra_message(text, "orbax-checkpoint", "orbax")) from None
    return epath.Path(text)


def absolute(path: Any) -> Any:
    """The whole path; that of an object store is whole already.

    `..` stays where it is: what comes before may be a link, which leads elsewhere than its name says.
    """
    return path.absolute() if is_on_disk(path) else path


def is_on_disk(path: Any) -> bool:
    """Whether a path from `as_path` leads to this machine's file systems, and not to an object store."""
    return isinstance(path, Path)


def has_manifest(path: Any) -> bool:
    """Whether a checkpoint stands there: without a manifest, it is one that is still written or was never finished."""
    return (path / NAME).exists()


def list_folder(path: Any) -> list[Any]:
    """What is in a folder. One that is not there holds nothing: an object store has no folders without objects."""
    try:
        return list(path.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def open_file(file: Any) -> Any:
    """Opens a regular file for reading, and neither what a link leads to nor a pipe."""
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
