"""How what was written into a checkpoint's folder becomes the checkpoint: its manifest takes its name, in one step."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import _check
from .._check import CheckpointCorruptError
from . import _disk
from ._manifest import LIMIT, NAME
from ._place import has_manifest, listed
from ._read import read_manifest

SAVING = "saving"
_UNFINISHED = f"{NAME}.{SAVING}"
_FILE = re.compile(r"arrays-([0-9]{1,9})\.safetensors")
_FOLDER = re.compile(r"orbax-([0-9]{1,9})(?:\..*)?")  # Orbax adds something to the name until it is done


def check_own(path: Any) -> None:
    """Refuses to write where something stands that is not a checkpoint, nor what is left of one."""
    known = path.is_dir() and (has_manifest(path) or is_unfinished(path))
    _check.own_folder(path, is_checkpoint=known)


def is_unfinished(path: Any) -> bool:
    """Whether a folder holds nothing but arrays of Orbax for which there is no manifest, or nothing at all yet."""
    return all(_FOLDER.fullmatch(entry.name) or entry.name == _UNFINISHED for entry in listed(path))


def next_number(path: Any) -> int:
    """A number that no arrays in a folder have yet."""
    return 1 + max((_number(entry.name) for entry in listed(path)), default=0)


def _number(name: str) -> int:
    """The number of a file or a folder of arrays, 0 for other names."""
    match = _FILE.fullmatch(name) or _FOLDER.fullmatch(name)
    return int(match[1]) if match else 0


def write_manifest(folder: Path, manifest: bytes) -> None:
    """Writes the manifest under a name under which it does not count yet."""
    _check.manifest_size(len(manifest), LIMIT, folder)
    unfinished = folder / _UNFINISHED
    with contextlib.suppress(FileNotFoundError):
        _disk.remove(unfinished)
    with new_file(unfinished) as file:
        _disk.write_all(file, manifest)
        _disk.sync(file)


def commit(folder: Path) -> None:
    """Makes the manifest count that `write_manifest` wrote, and returns when it is on the disk."""
    _disk.replace(folder / _UNFINISHED, folder / NAME)
    _disk.sync_folder(folder)


def remove_unused(path: Any) -> None:
    """Removes the arrays that the manifest which is there now does not name; which ones these are, only it can tell."""
    with contextlib.suppress(OSError, CheckpointCorruptError):
        used = read_manifest(path).file
        for entry in listed(path):
            if entry.name == _UNFINISHED or (_number(entry.name) and entry.name != used):
                _disk.remove_folder(entry) if entry.is_dir() else _disk.remove(entry)


def give_up(path: Any, name: str) -> None:
    """Removes what was written of arrays that no manifest will name, and the folder if there is nothing else in it."""
    if has_manifest(path):
        return remove_unused(path)
    with contextlib.suppress(OSError):
        for entry in listed(path):
            if entry.name == _UNFINISHED or entry.name.partition(".")[0] == name:
                _disk.remove_folder(entry) if entry.is_dir() else _disk.remove(entry)
        if path.exists() and not listed(path):
            _disk.remove_folder(path)
    return None


def make_parents(folder: Path) -> None:
    """Makes a folder and those that lead to it, and returns when their names are on the disk."""
    if folder.is_dir():
        return
    make_parents(folder.parent)
    with contextlib.suppress(FileExistsError):
        _disk.make_folder(folder)
    _disk.sync_folder(folder.parent)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[int]:
    """A file that was not there, open for writing."""
    file = _disk.create(path)
    try:
        yield file
    finally:
        os.close(file)
