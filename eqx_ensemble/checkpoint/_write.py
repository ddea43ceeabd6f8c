import contextlib
import errno
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import _disk
from ._check_folders import NotSyncedError, check_removable, explain_writing
from ._commit import (
    check_own,
    make_parents,
    mark,
    new_file,
    put_manifest,
    remove_unused,
    sync_last,
    sync_names,
    write_manifest,
)
from ._dtypes import raw
from ._hashing import Digests
from ._layout import FileLayout, file_layout
from ._manifest import NAME, encode
from ._names import REMOVING, SAVING, foreign_content, is_temporary, next_number, remove_ours, temporary
from ._path import is_on_disk
from ._snapshot import Snapshot

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
