"""The exact names that this library writes. Nothing with another name is ever replaced or removed."""

import contextlib
import hashlib
import os
import re
from pathlib import Path
from typing import Any

from .._check import CheckpointCorruptError
from . import _disk, _layout, _manifest
from ._manifest import NAME
from ._path import has_manifest, is_on_disk, list_folder, open_file

SAVING, REMOVING = "saving", "removing"
UNFINISHED = f"{NAME}.{SAVING}"
_FILE = re.compile(r"arrays-([0-9]{4,9})\.safetensors")
# Orbax adds a suffix to the name until it is done.
_FOLDER = re.compile(r"orbax-([0-9]{4,9})(?:(?:\.partial_save)?\.orbax-checkpoint-tmp(?:-[0-9]+)?)?")
# A temporary file of a killed rsync.
_COPY = re.compile(r"\.(?:checkpoint\.json|arrays-[0-9]{4,9}\.safetensors)\.[A-Za-z0-9]{6}")
_LONGEST = 64


def number_of(entry: Any) -> int:
    """The number of a file or a folder of arrays, 0 for anything else."""
    pattern = _FOLDER if entry.is_dir() else _FILE
    match = None if _is_link(entry) else pattern.fullmatch(entry.name)
    return int(match[1]) if match else 0


def is_ours(entry: Any) -> bool:
    """Whether this library writes an entry of this name and kind into a checkpoint's folder."""
    if number_of(entry):
        return True
    named = entry.name in (NAME, UNFINISHED) or _COPY.fullmatch(entry.name)
    return bool(named) and not entry.is_dir() and not _is_link(entry)


def is_written(entry: Any) -> bool:
    """Whether an entry shows that a checkpoint was written here; others may use the manifest's name."""
    return bool(number_of(entry)) or entry.name == UNFINISHED


def _is_link(entry: Any) -> bool:
    return is_on_disk(entry) and entry.is_symlink()


def foreign(path: Any) -> list[str]:
    """The names in a folder that are not ours."""
    return sorted(entry.name for entry in list_folder(path) if not is_ours(entry))


def is_checkpoint(path: Any) -> bool:
    """Whether a folder is a checkpoint, damaged or not, or the remains of one, and may be overwritten.

    The beginning of the manifest decides. If it is damaged or missing, everything in the folder must be ours.
    """
    if not path.is_dir():
        return False
    if has_manifest(path):
        return is_sealed(path) or (not foreign(path) and has_arrays(path))
    return not foreign(path)


def is_sealed(path: Any) -> bool:
    """Whether a folder has a manifest that begins as ours do."""
    with contextlib.suppress(OSError, CheckpointCorruptError), open_file(path / NAME) as file:
        return _manifest.begins_as_ours(file.read(256))
    return False


def _has_our_header(entry: Any) -> bool:
    with contextlib.suppress(OSError, CheckpointCorruptError), open_file(entry) as file:
        return _layout.begins_as_ours(file)
    return False


def has_arrays(path: Any) -> bool:
    """Whether a folder has arrays of ours, by name and content, damaged or not."""
    return any(number_of(entry) and (entry.is_dir() or _has_our_header(entry)) for entry in list_folder(path))


def is_unfinished(path: Any) -> bool:
    """Whether a folder is empty, or holds only arrays of Orbax without a manifest."""
    return all((number_of(entry) and entry.is_dir()) or entry.name == UNFINISHED for entry in list_folder(path))


def next_number(path: Any) -> int:
    """The first number above those of all arrays in a folder."""
    return 1 + max(map(number_of, list_folder(path)), default=0)


def temporary(path: Path, kind: str) -> Path:
    """A hidden path next to `path`, unique among processes."""
    return path.parent / f".{_short(path.name)}.{kind}-{_disk.token()}"


def is_temporary(name: str, of: re.Pattern[str] | str) -> bool:
    """Whether a name is one that `temporary` makes for the name `of`, or for names of this pattern."""
    base = of.pattern if isinstance(of, re.Pattern) else re.escape(_short(of))
    return re.fullmatch(rf"\.{base}\.({SAVING}|{REMOVING})-[0-9a-f]{{8}}", name) is not None


def _short(name: str) -> str:
    """A name short enough for the suffixes added to it: file systems allow 143 to 255 bytes."""
    encoded = os.fsencode(name)
    return name if len(encoded) <= _LONGEST else hashlib.sha256(encoded).hexdigest()[:32]


def remove_ours(folder: Any) -> None:
    """Removes our entries of a checkpoint's folder, and the folder itself if it is then empty."""
    for entry in list_folder(folder):
        if is_ours(entry):
            remove_entry(entry)
    if list_folder(folder):
        return
    if is_on_disk(folder):
        _disk.remove_empty_folder(folder)
    else:
        with contextlib.suppress(FileNotFoundError):
            _disk.remove_folder(folder)


def remove_entry(entry: Any) -> None:
    """Removes a file, or a folder with its contents."""
    _disk.remove_folder(entry) if entry.is_dir() else _disk.remove(entry)
