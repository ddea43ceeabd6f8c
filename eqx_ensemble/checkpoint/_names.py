"""The names and marks of this library. Nothing with another name, or foreign_content, is ever replaced or removed."""

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
BEGUN = f"{NAME}.begun"
"""The mark of a folder in which arrays are written before it has a manifest; its content is `MARK`."""
MARK = _manifest.FORMAT.encode()
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
    named = entry.name in (NAME, UNFINISHED, BEGUN) or _COPY.fullmatch(entry.name)
    return bool(named) and not entry.is_dir() and not _is_link(entry)


def is_written(entry: Any) -> bool:
    """Whether an entry shows that a checkpoint was written here; others may use the manifest's name."""
    return bool(number_of(entry)) or entry.name in (UNFINISHED, BEGUN)


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
    if not has_manifest(path):
        return not foreign_content(path)
    return is_sealed(path) or (not foreign_content(path) and any(map(number_of, list_folder(path))))


def foreign_content(path: Any) -> list[str]:
    """The names in a folder that are not ours, or whose content is not, unless a manifest or a mark covers them.

    In object stores the names alone decide.
    """
    if not is_on_disk(path) or is_begun(path) or is_sealed(path):
        return foreign(path)
    return sorted(entry.name for entry in list_folder(path) if not (is_ours(entry) and _is_ours_by_content(entry)))


def _is_ours_by_content(entry: Path) -> bool:
    """Whether the content of an entry is ours, damaged or not. Temporary names, which no one else chooses, suffice."""
    if entry.is_dir():
        return "." in entry.name or any(map(_has_our_table, entry.glob("*/_METADATA")))
    if number_of(entry):
        return _has_our_header(entry)
    if entry.name in (UNFINISHED, BEGUN):
        start = _start_of(entry)
        seal = _manifest.SEAL.partition(b"%")[0]
        return MARK.startswith(start) or seal.startswith(start[: len(seal)])
    return True  # a damaged manifest, which its arrays make ours, or a temporary file of rsync


def is_begun(path: Path) -> bool:
    """Whether a folder has the mark that arrays are written in it."""
    return _start_of(path / BEGUN) == MARK


def is_sealed(path: Any) -> bool:
    """Whether a folder has a manifest that begins as ours do."""
    return _manifest.begins_as_ours(_start_of(path / NAME))


def _start_of(file: Any) -> bytes:
    """The first bytes of a file, zeros excepted, which a crash of the system may leave; none if it cannot be read."""
    with contextlib.suppress(OSError, CheckpointCorruptError), open_file(file) as opened:
        return opened.read(256).rstrip(b"\0")
    return b""


def _has_our_header(entry: Any) -> bool:
    with contextlib.suppress(OSError, CheckpointCorruptError), open_file(entry) as file:
        return _layout.begins_as_ours(file)
    return False


def _has_our_table(file: Path) -> bool:
    """Whether metadata of Orbax name our table."""
    with contextlib.suppress(OSError, CheckpointCorruptError), open_file(file) as opened:
        return _manifest.TABLE.encode() in opened.read(_manifest.LIMIT)
    return False


def is_unfinished(path: Any) -> bool:
    """Whether a folder is empty, or holds only arrays without a manifest that Orbax wrote or a mark covers."""
    if is_on_disk(path) and is_begun(path):
        return not has_manifest(path)
    names = UNFINISHED, BEGUN
    return all((number_of(entry) and entry.is_dir()) or entry.name in names for entry in list_folder(path))


def next_number(path: Any) -> int:
    """The first number above those of all arrays in a folder."""
    return 1 + max(map(number_of, list_folder(path)), default=0)


def temporary(path: Path, kind: str) -> Path:
    """A hidden path next to `path`, unique among processes."""
    return path.parent / f".{_short(path.name)}.{kind}-{_disk.token()}"


def is_temporary(name: str, of: re.Pattern[str] | str) -> bool:
    """Whether a name is one that `temporary` makes for the name `of`, or for names of this pattern."""
    if not name.startswith("."):  # most entries of a folder, for which no pattern is needed
        return False
    base = of.pattern if isinstance(of, re.Pattern) else re.escape(_short(of))
    return re.fullmatch(rf"\.{base}\.({SAVING}|{REMOVING})-[0-9a-f]{{8}}", name) is not None


def _short(name: str) -> str:
    """A name short enough for the suffixes added to it: file systems allow 143 to 255 bytes."""
    encoded = os.fsencode(name)
    return name if len(encoded) <= _LONGEST else hashlib.sha256(encoded).hexdigest()[:32]


def remove_ours(folder: Any) -> None:
    """Removes our entries of a checkpoint's folder, its mark last, and the folder itself if it is then empty."""
    for entry in sorted(list_folder(folder), key=lambda entry: entry.name == BEGUN):
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
