"""How what was written into a checkpoint's folder becomes the checkpoint: its manifest takes its name, in one step."""

import contextlib
import errno
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .._check import CheckpointCorruptError
from . import _disk
from ._check import check_manifest_size
from ._check_folders import NotSyncedError, check_overwritable, no_sync_message
from ._manifest import LIMIT, NAME
from ._names import UNFINISHED, foreign, is_checkpoint, is_ours, number_of, remove_entry, remove_ours
from ._path import has_manifest, list_folder
from ._read import read_manifest

_CANNOT = {errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_unsynced: set[int] = set()
"""The disks of which a warning has said that their folders cannot be synced."""


def check_own(path: Any) -> None:
    """Refuses to write where something stands that is not a checkpoint, nor what is left of one."""
    check_overwritable(path, is_checkpoint=is_checkpoint(path), holds=foreign(path))


def sync_names(folder: Path) -> None:
    """Returns when the names in a folder are on the disk, or at once, with a warning, where that cannot be had."""
    try:
        _disk.sync_folder(folder)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
        disk = os.stat(folder).st_dev
        if disk not in _unsynced:
            _unsynced.add(disk)
            warnings.warn(no_sync_message(folder, error), stacklevel=2)


def sync_last(folder: Path) -> None:
    """As `sync_names`, after the operation by which the new checkpoint takes the place of the old one."""
    try:
        sync_names(folder)
    except FileNotFoundError:
        raise  # somebody has removed the folder, and with it what is new
    except OSError as error:
        raise NotSyncedError(error.errno, error.strerror) from error


def write_manifest(folder: Path, manifest: bytes) -> None:
    """Writes the manifest under a name under which it does not count yet."""
    check_manifest_size(len(manifest), LIMIT, folder)
    unfinished = folder / UNFINISHED
    with contextlib.suppress(FileNotFoundError):
        _disk.remove(unfinished)
    with new_file(unfinished) as file:
        _disk.write_all(file, manifest)
        _disk.sync(file)


def put_manifest(folder: Path) -> None:
    """Makes the manifest count that `write_manifest` wrote."""
    _disk.replace(folder / UNFINISHED, folder / NAME)


def remove_unused(path: Any) -> None:
    """Removes the arrays that the manifest which is there now does not name; which ones these are, only it can tell."""
    with contextlib.suppress(OSError, CheckpointCorruptError):
        used = read_manifest(path).file
        for entry in list_folder(path):
            if is_ours(entry) and entry.name not in (NAME, used):
                remove_entry(entry)


def give_up(path: Any, number: int) -> None:
    """Removes what was written of arrays that no manifest will name, and the folder if there is nothing else in it."""
    if has_manifest(path):
        return remove_unused(path)
    with contextlib.suppress(OSError):
        for entry in list_folder(path):
            if entry.name == UNFINISHED or number_of(entry) == number:
                remove_entry(entry)
        if path.exists() and not list_folder(path):
            remove_ours(path)
    return None


def make_parents(folder: Path) -> None:
    """Makes a folder and those that lead to it, and returns when their names are on the disk."""
    if folder.is_dir():
        return
    make_parents(folder.parent)
    with contextlib.suppress(FileExistsError):
        _disk.make_folder(folder)
    sync_names(folder.parent)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[int]:
    """A file that was not there, open for writing."""
    file = _disk.create(path)
    try:
        yield file
    finally:
        os.close(file)
