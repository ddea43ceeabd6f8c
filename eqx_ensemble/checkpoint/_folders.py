"""Checks of folders, and messages for errors of the operating system."""

import contextlib
import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .._caller import caller
from .._check import CheckpointCorruptError
from . import _disk, _manifest
from . import _snapshot as _layout
from ._check import safe_text
from ._disk import has_manifest, is_on_disk, list_folder, open_file
from ._manifest import NAME

# The names and marks of this library. Nothing with another name, or foreign_content, is ever replaced or removed.

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
    return has_our_manifest(path) or (not foreign_content(path) and any(map(number_of, list_folder(path))))


def foreign_content(path: Any) -> list[str]:
    """The names in a folder that are not ours, or whose content is not, unless a manifest or a mark covers them.

    In object stores the names alone decide.
    """
    if not is_on_disk(path) or is_begun(path) or has_our_manifest(path):
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


def has_our_manifest(path: Any) -> bool:
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


_FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


class NotSyncedError(OSError):
    """The new checkpoint is written, but the system could not confirm that its name is on the disk."""


@contextlib.contextmanager
def explain_writing(path: Any, needed: int | None = None) -> Iterator[None]:
    """Adds the path, and the bytes needed and free, to errors of the operating system."""
    try:
        yield
    except NotSyncedError as error:
        text = f"Could not confirm the checkpoint `{path}`: {error.strerror}; {_free(path)}.\nThe new checkpoint is in "
        text += "place and complete, but a power cut may restore the old one. Check the disk, and save again."
        raise NotSyncedError(error.errno, text) from error
    except OSError as error:
        reason = error.strerror or str(error)
        size = "" if needed is None else f" ({needed} bytes)"
        text = f"Could not write the checkpoint `{path}`{size}: {reason}; {_free(path)}.\nThe previous "
        text += "checkpoint, if any, is intact. " + (
            "Free some space, or save elsewhere." if error.errno in _FULL else "Check the folder and its permissions."
        )
        raise OSError(error.errno, text) from error


def _free(path: Any) -> str:
    if "://" in str(path):
        return "its object store does not report free space"
    folder = Path(path).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return f"{shutil.disk_usage(folder).free} bytes are free in `{folder}`"
    except OSError:
        return "free space is unknown"


def no_sync_message(folder: Any, error: OSError) -> str:
    """The warning for a file system that cannot sync folders."""
    return (
        f"The file system of `{folder}` cannot sync folders ({error.strerror}): checkpoints are saved, and survive a "
        "kill of the process, but a power cut may lose the newest of them."
    )


def check_overwritable(path: Any, *, is_checkpoint: bool, holds: Sequence[str] = ()) -> None:
    """Checks that the path to be written is free or holds a checkpoint."""
    if not is_checkpoint:
        there = f": it holds {names_text(holds)}" if holds else ""
        raise FileExistsError(
            errno.EEXIST,
            f"`{path}` exists and is not a checkpoint, so nothing is overwritten{there}.\nChoose another path",
        )


def check_removable(path: Any, holds: Sequence[str], *, is_link: bool) -> None:
    """Checks that a checkpoint to be removed is a folder without other files."""
    if holds or is_link:
        what = f"holds {names_text(holds)}, which `save` did not write" if holds else "is a link"
        raise FileExistsError(
            errno.EEXIST, f"`{path}` {what}, and is left as it is.\nMove that away, or remove the folder yourself"
        )


def names_text(found: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    text = ", ".join(f"`{name}`" for name in found[:3])
    return text if len(found) <= 3 else f"{text} and {len(found) - 3} more"


def not_a_checkpoint_message(path: Any, kind: str, found: Sequence[str]) -> str:
    """The message for a folder that is not a checkpoint: its kind, and the function that reads it.

    **Arguments:** `kind`, one of those in `_KINDS`; `found`, the names in the folder that show it, in order.
    """
    what, way = _KINDS[kind]
    fields = {"names": names_text(found), "count": len(found), "first": found[0] if found else "", "path": str(path)}
    fields["last"] = found[-1] if found else ""
    what, way = what.format(**fields), way.format(**fields)
    return f"`{caller()}` needs the folder of one checkpoint, as `save` writes it, and `{path}` is {what}.\n{way}"


_KINDS = {
    "fit": (
        "the folder of a run of `fit` ({count} checkpoints, the last one `{last}`)",
        "The same call of `fit` with `checkpoint={path!r}` gives the run; to load the ensemble without it, keep it "
        "with `save(path, run.ensemble)`",
    ),
    "run": (
        "a folder of `checkpoint.Checkpoints` ({count} checkpoints, the last one `{last}`)",
        "`checkpoint.Checkpoints({path!r}).restore(like)` reads the newest; `load` reads one of them, `{path}/{last}`",
    ),
    "files": (
        "a folder with files of single models ({names})",
        "`equinox.tree_deserialise_leaves` or `safetensors` reads them, and `stack` makes an ensemble of models",
    ),
    "shards": (
        "the folder of a run of `fleet.fit(save=...)` ({count} shards)",
        "`fleet.open_run({path!r}, like)` opens it, and its `load(ids)` reads members",
    ),
    "checkpoints": ("a folder that holds checkpoints ({names})", "`load` reads one of them, `{path}/{first}`"),
    "orbax": (
        "a checkpoint that Orbax wrote alone",
        "`orbax.checkpoint` reads it; `load` reads what `save(..., format='orbax')` wrote",
    ),
    "empty": ("an empty folder", "Check the path, and whether the checkpoint was copied or removed"),
    "other": ("another folder (it holds {names})", "Check the path"),
}


def fallback_message(bad: Sequence[tuple[int, Exception]], step: int) -> str:
    """The warning if the newest checkpoints are damaged."""
    damaged = "\n".join(f"  step {number}: {str(error).splitlines()[0]}" for number, error in bad)
    return (
        f"`checkpoint.Checkpoints.restore` went back to step {step}, because newer checkpoints are damaged.\n{damaged}"
    )


def all_damaged_message(bad: Sequence[tuple[int, Exception]], folder: Any) -> str:
    """The message if no checkpoint can be read."""
    damaged = "\n".join(f"  step {number}: {str(error).splitlines()[0]}" for number, error in bad)
    return f"All checkpoints in `{folder}` are damaged.\n{damaged}"


@contextlib.contextmanager
def explain_orbax(path: Any) -> Iterator[None]:
    """Turns errors of Orbax while writing into an `OSError` with the path and the free bytes."""
    with explain_writing(path):
        try:
            yield
        except (ValueError, RuntimeError) as error:
            text = str(error)
            known = [number for number in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT) if os.strerror(number) in text]
            raise OSError(known[0] if known else errno.EIO, f"Orbax says: {safe_text(text)}") from error
