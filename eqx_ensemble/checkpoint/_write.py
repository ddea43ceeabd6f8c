import contextlib
import errno
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from .. import _check
from .._check import CheckpointCorruptError
from . import _disk
from ._digests import Digests
from ._dtypes import raw
from ._layout import Layout, layout
from ._manifest import LIMIT, NAME, encode
from ._read import read_manifest
from ._snapshot import Snapshot

SAVING, REMOVING = "saving", "removing"
_LEFT = re.compile(rf"\.({SAVING}|{REMOVING})-[0-9a-f]{{8}}$")
_CHUNK = 2**20
_TAKEN = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR, errno.EACCES}


def write(path: Path, content: Snapshot) -> None:
    """Writes a checkpoint at `path`, or leaves what is there.

    A new one is written into a folder beside it that is renamed once it is whole and on the disk. In the place of an
    old one, new arrays are written beside the old arrays, and the manifest, which says which of them are meant, is
    replaced in one step. So at every moment `path` holds the old checkpoint or the new one, whole.
    """
    path = Path(os.path.abspath(path))
    if os.path.lexists(path):
        known = path.is_dir() and (not any(path.iterdir()) or (path / NAME).is_file())
        _check.own_folder(path, is_checkpoint=known)
    plan = layout(content.manifest.entries)
    with _check.explained_writing(path, plan.size):
        _make_parents(path.parent)
        clean(path.parent, f".{path.name}.")
        if not os.path.lexists(path):
            try:
                return _write_new(path, content, plan)
            except OSError as error:
                if error.errno not in _TAKEN or not os.path.isdir(path):
                    raise  # otherwise somebody else wrote it at the same time
        return _overwrite(path, content, plan)


def remove(path: Path) -> None:
    """Removes a checkpoint, so that no part of it ever stands under its name."""
    gone = path.parent / f".{path.name}.{REMOVING}-{_disk.token()}"
    _disk.rename(path, gone)
    _disk.remove_folder(gone)


def clean(parent: Path, start: str) -> None:
    """Removes what processes that were killed left under names with this start. What a living one writes is locked."""
    for left in [Path(entry.path) for entry in os.scandir(parent) if entry.name.startswith(start)]:
        if _LEFT.search(left.name):
            with _disk.locked(left, wait=False) as stale, contextlib.suppress(FileNotFoundError):
                if stale:
                    _disk.remove_folder(left)


def write_file(path: Path, data: bytes) -> None:
    """Writes one file as a checkpoint is written: `path` holds what was there or the new bytes, whole."""
    path = Path(os.path.abspath(path))
    with _check.explained_writing(path, len(data)):
        _make_parents(path.parent)
        temporary = path.parent / f".{path.name}.{SAVING}-{_disk.token()}"
        try:
            with _new_file(temporary) as file:
                _disk.write_all(file, data)
                _disk.sync(file)
            _disk.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                _disk.remove(temporary)
            raise
        _disk.sync_folder(path.parent)


def _make_parents(folder: Path) -> None:
    if folder.is_dir():
        return
    _make_parents(folder.parent)
    with contextlib.suppress(FileExistsError):
        _disk.make_folder(folder)
    _disk.sync_folder(folder.parent)


def _write_new(path: Path, content: Snapshot, plan: Layout) -> None:
    with _temporary(path) as temporary:
        _write_files(temporary, 1, content, plan)
        _disk.replace(temporary / f"{NAME}.{SAVING}", temporary / NAME)
        _disk.sync_folder(temporary)
        _disk.rename(temporary, path)
        _disk.sync_folder(path.parent)


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """A folder beside `path`, locked for as long as it is written, and removed if it still has its name then."""
    with contextlib.ExitStack() as stack:
        while True:
            temporary = path.parent / f".{path.name}.{SAVING}-{_disk.token()}"
            _disk.make_folder(temporary)
            # Before the lock is held, another process may take the folder for a stale one and remove it.
            with contextlib.suppress(FileNotFoundError):
                stack.enter_context(_disk.locked(temporary))
                if temporary.exists():
                    break
        try:
            yield temporary
        finally:
            with contextlib.suppress(OSError):
                if temporary.exists():
                    _disk.remove_folder(temporary)


def _overwrite(path: Path, content: Snapshot, plan: Layout) -> None:
    with _disk.locked(path):
        number = 1 + max((_number(file.name) for file in path.iterdir()), default=0)
        try:
            _write_files(path, number, content, plan)
            _disk.sync_folder(path)  # the arrays' name is on the disk before the manifest that names them
            _disk.replace(path / f"{NAME}.{SAVING}", path / NAME)
            _disk.sync_folder(path)
        finally:
            with contextlib.suppress(OSError, CheckpointCorruptError):
                _remove_unused(path)


def _number(name: str) -> int:
    """The number of a file of arrays, 0 for other files."""
    number = name.removeprefix("arrays-").removesuffix(".safetensors")
    return int(number) if name == f"arrays-{number}.safetensors" and number.isdecimal() and len(number) < 10 else 0


def _remove_unused(path: Path) -> None:
    """Removes the files that the manifest which is there now does not name; which one that is, only it can tell."""
    used = read_manifest(path).file
    for file in list(path.iterdir()):
        if file.name == f"{NAME}.{SAVING}" or (_number(file.name) and file.name != used):
            _disk.remove(file)


def _write_files(folder: Path, number: int, content: Snapshot, plan: Layout) -> None:
    name = f"arrays-{number:04d}.safetensors"
    with _new_file(folder / name) as file:
        checksums = _write_arrays(file, content, plan)
        _disk.sync(file)
    entries = tuple(entry._replace(checksum=checksums[entry.tensor]) for entry in content.manifest.entries)
    manifest = encode(content.manifest._replace(file=name, entries=entries))
    _check.manifest_size(len(manifest), LIMIT, folder)
    unfinished = folder / f"{NAME}.{SAVING}"
    with contextlib.suppress(FileNotFoundError):
        _disk.remove(unfinished)
    with _new_file(unfinished) as file:
        _disk.write_all(file, manifest)
        _disk.sync(file)


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[int]:
    file = _disk.create(path)
    try:
        yield file
    finally:
        os.close(file)


def _write_arrays(file: int, content: Snapshot, plan: Layout) -> dict[str, str]:
    """Writes header, tensors and the table of checksums, in large pieces. Returns each tensor's checksum."""
    with Digests(plan.size) as digests:
        found = {}
        for entry in plan.order:
            pieces = entry.shape[0] if entry.kind == "members" else 1
            found[entry.tensor] = digests.add(raw(content.arrays[entry.tensor]), pieces)
        rest = _write_tensors(file, content, plan)
    table, checksums = bytearray(), {}
    for entry in plan.order:
        joined = b"".join(found[entry.tensor])
        if entry.kind == "members":
            table += joined
            joined = hashlib.sha256(joined).digest()
        checksums[entry.tensor] = joined.hex()
    _disk.write_all(file, memoryview(rest + table))
    return checksums


def _write_tensors(file: int, content: Snapshot, plan: Layout) -> bytearray:
    """Writes header and tensors; returns what is to be written with what follows."""
    pending = bytearray(plan.header)
    for entry in plan.order:
        data = raw(content.arrays[entry.tensor])
        if len(data) < _CHUNK:
            pending += data
            data = memoryview(b"")
        if data or len(pending) >= _CHUNK:
            _disk.write_all(file, memoryview(pending))
            _disk.write_all(file, data)
            pending = bytearray()
    return pending
