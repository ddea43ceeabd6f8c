"""Checks of folders, and messages for errors of the operating system."""

import contextlib
import errno
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ._check import safe_text

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


@contextlib.contextmanager
def explain_folder(path: Any) -> Iterator[None]:
    """Adds the path to errors of making or writing the folder of a run."""
    try:
        yield
    except (BlockingIOError, FileExistsError):
        raise  # the folder is in use, or has a lock that is not ours: the message says so
    except OSError as error:
        raise OSError(
            error.errno,
            f"`fit` cannot save in the checkpoint folder `{path}`: {error.strerror or error}.\nNothing is trained yet: "
            "check the folder and its permissions, or save elsewhere.",
        ) from error


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


def check_folder_free(path: Any, holder: dict[str, Any] | None, *, free: bool) -> None:
    """Checks that no other run holds the folder."""
    if not free:
        who = "another process"
        if holder:
            who = f"process {holder.get('pid')} on `{holder.get('host')}`, since {holder.get('since')}"
            if holder.get("pid") == os.getpid() and holder.get("host") == socket.gethostname():
                who += ", which is this process: another thread, possibly left by an interrupted call"
        raise BlockingIOError(
            errno.EWOULDBLOCK,
            f"`fit` needs a checkpoint folder that no other run uses, and `{path}` is in use: by {who}.\nWait for that "
            "run to end, end it, or save in another folder",
        )


def check_own_lock(path: Any, *, is_own: bool) -> None:
    """Checks that the file of a lock was written by this library."""
    if not is_own:
        raise FileExistsError(
            errno.EEXIST,
            f"`{path}` is the file of a lock for runs of `fit`, and was not written by `fit`, so it is not overwritten."
            "\nMove it away, or save in another folder",
        )


def check_lock_held(path: Any, holder: dict[str, Any] | None, *, ours: bool) -> None:
    """Checks that no other run has taken over the folder, if the file system has no locks between machines."""
    if not ours:
        holder = holder or {}
        raise BlockingIOError(
            errno.EWOULDBLOCK,
            f"The checkpoint folder `{path}` was taken over by another run: process {holder.get('pid')} on "
            f"`{holder.get('host')}`, since {holder.get('since')}.\nGive each run a folder of its own",
        )


def check_nothing_newer(path: Any, read: Sequence[int], now: Sequence[int]) -> None:
    """Checks that no other run has saved in the folder between reading and locking it."""
    if now[-1:] != read[-1:]:
        raise BlockingIOError(
            errno.EWOULDBLOCK,
            f"Another run has saved step {now[-1] if now else None} in the checkpoint folder `{path}` since this one "
            "read it.\nCall `fit` again, or save in another folder",
        )


def check_folder_exists(path: Any, *, name: str) -> None:
    """Checks that there is a folder at `path`."""
    if not os.path.exists(path):
        raise FileNotFoundError(errno.ENOENT, f"`{name}` found no checkpoint at `{path}`")
    if not os.path.isdir(path):
        raise NotADirectoryError(
            errno.ENOTDIR,
            f"`{name}` needs the folder that `save` wrote, and `{path}` is a file.\nFiles of "
            "`equinox.tree_serialise_leaves` and safetensors files are read by `load_members`",
        )


def not_a_checkpoint_message(path: Any, kind: str, found: Sequence[str], *, name: str) -> str:
    """The message for a folder that is not a checkpoint: its kind, and the function that reads it.

    **Arguments:** `kind`, one of those in `_KINDS`; `found`, the names in the folder that show it, in order.
    """
    what, way = _KINDS[kind]
    fields = {"names": names_text(found), "count": len(found), "first": found[0] if found else "", "path": str(path)}
    fields["last"] = found[-1] if found else ""
    what, way = what.format(**fields), way.format(**fields)
    return f"`{name}` needs the folder of one checkpoint, as `save` writes it, and `{path}` is {what}.\n{way}"


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
    "members": (
        "a folder of `export_members` ({count} files, the first one `{first}`)",
        "`load_members(sorted(pathlib.Path({path!r}).glob('member-*')), like)` reads them",
    ),
    "files": (
        "a folder with files of single models ({names})",
        "`load_members(paths, like)` reads files of `equinox.tree_serialise_leaves` and of safetensors",
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


def check_step_exists(folder: Any, step: int | None, steps: Sequence[int]) -> None:
    """Checks that a step has a checkpoint."""
    if step is None and not steps:
        raise FileNotFoundError(errno.ENOENT, f"`checkpoint.Checkpoints.restore` found no checkpoint in `{folder}`")
    if step is not None and step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise FileNotFoundError(
            errno.ENOENT,
            f"`checkpoint.Checkpoints.restore` found no checkpoint of step {step} in `{folder}`; existing steps: "
            f"{there}",
        )


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


def check_finished(path: Any, *, finished: bool, name: str) -> None:
    """Checks that a checkpoint is finished: its manifest is written last."""
    if not finished:
        raise FileNotFoundError(errno.ENOENT, f"`{name}` found no finished checkpoint at `{path}`")
