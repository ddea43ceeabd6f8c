"""Commits the files written into a checkpoint's folder, atomically, by renaming the manifest."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .._check import CheckpointCorruptError
from .._warnings import warn
from . import _disk
from ._check import check_manifest_size
from ._check_folders import NotSyncedError, check_overwritable, no_sync_message
from ._manifest import LIMIT, NAME
from ._names import (
    BEGUN,
    MARK,
    UNFINISHED,
    foreign_content,
    is_begun,
    is_checkpoint,
    is_ours,
    is_sealed,
    number_of,
    remove_entry,
    remove_ours,
)
from ._path import has_manifest, is_on_disk, list_folder
from ._read import read_manifest

_CANNOT = {errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_unsynced: set[int] = set()
"""The disks whose folders cannot be synced, for which a warning was issued."""


def check_own(path: Any) -> None:
    """Checks that a path is free, or holds a checkpoint or the remains of one, and nothing else."""
    if is_on_disk(path) and not os.path.lexists(path):
        return
    check_overwritable(path, is_checkpoint=is_checkpoint(path), holds=foreign_content(path))


def mark(folder: Path) -> None:
    """Marks a folder without a manifest as ours, before arrays are written in it: a kill may leave any part of them."""
    if is_sealed(folder) or is_begun(folder):
        return
    with contextlib.suppress(FileNotFoundError):
        _disk.remove(folder / BEGUN)
    with new_file(folder / BEGUN) as file:
        _disk.write_all(file, MARK)
        _disk.sync(file)
    sync_names(folder)


def sync_names(folder: Path) -> None:
    """Syncs the names in a folder to the disk; warns once for each disk that cannot do so."""
    try:
        _disk.sync_folder(folder)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
        disk = os.stat(folder).st_dev
        if disk not in _unsynced:
            _unsynced.add(disk)
            warn(no_sync_message(folder, error))


def sync_last(folder: Path) -> None:
    """As `sync_names`, after the operation by which the new checkpoint replaces the old one."""
    try:
        sync_names(folder)
    except FileNotFoundError:
        raise  # the folder was removed, and with it the new checkpoint
    except OSError as error:
        raise NotSyncedError(error.errno, error.strerror) from error


def write_manifest(folder: Path, manifest: bytes, *, arrays: int | None = None) -> None:
    """Writes the manifest under a temporary name.

    The open file of arrays is synced first. The manifest is already being flushed by then, and file systems with a
    journal commit both at once.
    """
    check_manifest_size(len(manifest), LIMIT, folder)
    unfinished = folder / UNFINISHED
    with contextlib.suppress(FileNotFoundError):
        _disk.remove(unfinished)
    with new_file(unfinished) as file:
        _disk.write_all(file, manifest)
        if arrays is not None:
            _disk.flush(file, 0, len(manifest))
            _disk.sync(arrays)
        _disk.sync(file)


def put_manifest(folder: Path) -> None:
    """Renames the manifest that `write_manifest` wrote, which commits the checkpoint."""
    _disk.replace(folder / UNFINISHED, folder / NAME)


def remove_unused(path: Any) -> None:
    """Removes the arrays that the current manifest does not name."""
    with contextlib.suppress(OSError, CheckpointCorruptError):
        used = read_manifest(path).file
        for entry in list_folder(path):
            if is_ours(entry) and entry.name not in (NAME, used):
                remove_entry(entry)


def give_up(path: Any, number: int) -> None:
    """Removes the arrays of a save that failed, and the folder if nothing else is in it."""
    if has_manifest(path):
        return remove_unused(path)
    with contextlib.suppress(OSError):
        for entry in list_folder(path):
            if entry.name == UNFINISHED or number_of(entry) == number:
                remove_entry(entry)
        if path.exists() and all(entry.name == BEGUN for entry in list_folder(path)):
            remove_ours(path)
    return None


def make_parents(folder: Path) -> None:
    """Creates a folder and its parents, and syncs their names."""
    if folder.is_dir():
        return
    make_parents(folder.parent)
    with contextlib.suppress(FileExistsError):
        _disk.make_folder(folder)
    sync_names(folder.parent)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[int]:
    """A new file, open for writing."""
    file = _disk.create(path)
    try:
        yield file
    finally:
        os.close(file)
