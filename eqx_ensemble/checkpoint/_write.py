import contextlib
import errno
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .._check import CheckpointCorruptError
from .._warnings import warn
from . import _disk
from ._check import check_manifest_size
from ._disk import has_manifest, is_on_disk, list_folder
from ._folders import (
    BEGUN,
    MARK,
    REMOVING,
    SAVING,
    UNFINISHED,
    NotSyncedError,
    check_overwritable,
    check_removable,
    explain_writing,
    foreign_content,
    has_our_manifest,
    is_begun,
    is_checkpoint,
    is_ours,
    is_temporary,
    next_number,
    no_sync_message,
    number_of,
    remove_entry,
    remove_ours,
    temporary,
)
from ._hashing import Digests
from ._manifest import LIMIT, NAME, encode
from ._read import read_manifest
from ._snapshot import FileLayout, Snapshot, file_layout, raw

# Commits the files written into a checkpoint's folder, atomically, by renaming the manifest.
#
# Until a sync, a power cut may undo some operations and keep later ones. Contents are therefore synced before the
# rename that shows them, and the arrays' name before the manifest that refers to it: the manifest could otherwise
# survive without its arrays. Old arrays are removed only after the new manifest's name is synced, because the disk may
# return to the old manifest until then. Each operation is a call of `_disk`, at which tests kill, fail and cut the
# power.

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
    if has_our_manifest(folder) or is_begun(folder):
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


_CHUNK = 2**20
_FLUSHED = 2**23
_PAGE = 2**16
_TAKEN = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR, errno.EACCES}


def write(path: Path, content: Snapshot) -> None:
    """Writes a checkpoint at `path`, atomically.

    A new one is written into a temporary folder, which is renamed once it is complete and on the disk. To replace an
    old one, new arrays are written next to the old arrays, and the manifest, which names one of them, is replaced
    atomically. At every moment `path` holds the old checkpoint or the new one.
    """
    path = path.absolute()
    check_own(path)
    plan = file_layout(content.manifest.entries)
    with explain_writing(path, plan.size):
        make_parents(path.parent)
        clean(path.parent, path.name)
        if not os.path.lexists(path):
            try:
                return _write_new(path, content, plan)
            except OSError as error:
                taken = error.errno in _TAKEN and not isinstance(error, NotSyncedError)
                if not (taken and os.path.isdir(path)):
                    raise  # otherwise another process wrote it at the same time
                check_own(path)
        return _overwrite(path, content, plan)


def remove(path: Any) -> None:
    """Removes a checkpoint, never leaving a part of it under its name; `FileExistsError` if it holds other files."""
    check_removable(path, foreign_content(path), is_link=is_on_disk(path) and path.is_symlink())
    if not is_on_disk(path):
        with contextlib.suppress(FileNotFoundError):
            _disk.remove(path / NAME)  # without it, the rest is no checkpoint
        remove_ours(path)
        return
    gone = temporary(path, REMOVING)
    _disk.rename(path, gone)
    remove_ours(gone)


def clean(parent: Any, of: re.Pattern[str] | str) -> None:
    """Removes temporary paths of this name that killed processes left. Those that are being written are locked."""
    if not is_on_disk(parent):
        return
    for left in [Path(entry.path) for entry in os.scandir(parent) if is_temporary(entry.name, of)]:
        with _disk.hold_lock(left, wait=False) as stale, contextlib.suppress(FileNotFoundError):
            if stale and not left.is_symlink():
                remove_ours(left) if left.is_dir() else _disk.remove(left)


def write_file(path: Path, data: bytes) -> None:
    """Writes one file atomically: `path` holds the old content or the new bytes."""
    path = path.absolute()
    with explain_writing(path, len(data)):
        make_parents(path.parent)
        clean(path.parent, path.name)
        _write_file(path, data)
        sync_last(path.parent)


def _write_file(path: Path, data: bytes) -> None:
    with contextlib.ExitStack() as stack:
        new, file = _locked_file(path, stack)
        try:
            _disk.write_all(file, data)
            _disk.sync(file)
            if os.name == "nt":  # which cannot rename open files
                stack.close()
            _disk.replace(new, path)
        except BaseException:
            with contextlib.suppress(OSError):
                _disk.remove(new)
            raise


def _locked_file(path: Path, stack: contextlib.ExitStack) -> tuple[Path, int]:
    """A temporary file, locked while it is open: one whose lock is free was left by a killed process."""
    while True:
        new = temporary(path, SAVING)
        file = stack.enter_context(_disk.closing(_disk.create(new)))
        _disk.lock(file, wait=True)
        if new.exists():  # otherwise another process took it for such a file, and removed it, before it was locked
            return new, file


def _write_new(path: Path, content: Snapshot, plan: FileLayout) -> None:
    with _temporary(path) as folder:
        _write_files(folder, 1, content, plan)
        put_manifest(folder)
        sync_names(folder)
        _disk.rename(folder, path)
        sync_last(path.parent)


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """A temporary folder, locked while it is written, and removed at the end unless it was renamed."""
    with contextlib.ExitStack() as stack:
        while True:
            folder = temporary(path, SAVING)
            _disk.make_folder(folder)
            # Before the lock is held, another process may take the folder for a stale one and remove it.
            with contextlib.suppress(FileNotFoundError):
                stack.enter_context(_disk.hold_lock(folder))
                if folder.exists():
                    break
        try:
            yield folder
        finally:
            with contextlib.suppress(OSError):
                if folder.exists():
                    remove_ours(folder)


def _overwrite(path: Path, content: Snapshot, plan: FileLayout) -> None:
    with _disk.hold_lock(path):
        try:
            mark(path)
            _write_files(path, next_number(path), content, plan)
            sync_names(path)  # the arrays' name is on the disk before the manifest that names them
            put_manifest(path)
            sync_last(path)
        except NotSyncedError:
            raise  # the disk may still return to the old manifest, which names the old arrays
        except BaseException:
            remove_unused(path)
            raise
        remove_unused(path)


def _write_files(folder: Path, number: int, content: Snapshot, plan: FileLayout) -> None:
    name = f"arrays-{number:04d}.safetensors"
    with new_file(folder / name) as file:
        checksums = _write_arrays(file, content, plan)
        entries = tuple(entry._replace(checksum=checksums[entry.tensor]) for entry in content.manifest.entries)
        write_manifest(folder, encode(content.manifest._replace(file=name, entries=entries)), arrays=file)


def _write_arrays(file: int, content: Snapshot, plan: FileLayout) -> dict[str, str]:
    """Writes header, tensors and the table of checksums, in large pieces. Returns each tensor's checksum."""
    with Digests(plan.size) as digests:
        pending = {}
        for entry in plan.order:
            pieces = entry.shape[0] if entry.kind == "members" else 1
            pending[entry.tensor] = digests.add(raw(content.arrays[entry.tensor]), pieces)
        rest = _write_tensors(file, content, plan)
        found = {tensor: digests.result(each) for tensor, each in pending.items()}
    table, checksums = bytearray(), {}
    for entry in plan.order:
        joined = b"".join(found[entry.tensor])
        if entry.kind == "members":
            table += joined
            joined = hashlib.sha256(joined).digest()
        checksums[entry.tensor] = joined.hex()
    _disk.write_all(file, memoryview(rest + table))
    return checksums


def _write_tensors(file: int, content: Snapshot, plan: FileLayout) -> bytearray:
    """Writes header and tensors; returns the rest, to be written with what follows."""
    pending, end = bytearray(plan.header), 0
    for entry in plan.order:
        data = raw(content.arrays[entry.tensor])
        if len(data) < _CHUNK:
            pending += data
            data = memoryview(b"")
        if data or len(pending) >= _CHUNK:
            end = _write_and_flush(file, memoryview(pending), end)
            end = _write_and_flush(file, data, end)
            pending = bytearray()
    return pending


def _write_and_flush(file: int, data: memoryview, start: int) -> int:
    """Writes from `start` on, and asks the system to flush full pages meanwhile; returns the end."""
    for first in range(0, len(data), _FLUSHED):
        part = data[first : first + _FLUSHED]
        _disk.write_all(file, part)
        begin, end = (start + first) // _PAGE * _PAGE, (start + first + len(part)) // _PAGE * _PAGE
        if end > begin:
            _disk.flush(file, begin, end - begin)
    return start + len(data)
