"""What disks and folders refuse, and what is refused because of what stands in a folder."""

import contextlib
import errno
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


class NotSyncedError(OSError):
    """The new checkpoint is in place, and the system could not say that its name is on the disk."""


@contextlib.contextmanager
def explained_writing(path: Any, needed: int | None = None) -> Iterator[None]:
    """Adds path, needed and free bytes to whatever the operating system refuses."""
    try:
        yield
    except NotSyncedError as error:
        text = f"Could not confirm the checkpoint `{path}`: {error.strerror}; {_free(path)}.\nThe new checkpoint is in "
        text += "place and whole, but a power cut may bring back what was there before. Check the disk, and save again."
        raise NotSyncedError(error.errno, text) from error
    except OSError as error:
        reason = error.strerror or str(error)
        size = "" if needed is None else f" ({needed} bytes)"
        text = f"Could not write the checkpoint `{path}`{size}: {reason}; {_free(path)}.\nWhat was there before "
        text += "is still whole. " + (
            "Free some space, or save elsewhere." if error.errno in _FULL else "Check the folder and its permissions."
        )
        raise OSError(error.errno, text) from error


def _free(path: Any) -> str:
    if "://" in str(path):
        return "its object store does not say how much is free"
    folder = Path(path).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return f"{shutil.disk_usage(folder).free} bytes are free in `{folder}`"
    except OSError:
        return "how much is free could not be found out"


@contextlib.contextmanager
def explained_folder(path: Any) -> Iterator[None]:
    """Adds the path to whatever keeps the folder of a run from being made or written."""
    try:
        yield
    except BlockingIOError:
        raise  # it is in use, and says so
    except OSError as error:
        raise OSError(
            error.errno,
            f"`fit` cannot save in the checkpoint folder `{path}`: {error.strerror or error}.\nNothing is trained yet: "
            "check the folder and its permissions, or save elsewhere.",
        ) from error


def no_sync(folder: Any, error: OSError) -> str:
    """The warning that a file system cannot do what a power cut asks for."""
    return (
        f"The file system of `{folder}` cannot sync folders ({error.strerror}): checkpoints are saved there, and kills "
        "leave them whole, but a power cut may lose the newest of them."
    )


def own_folder(path: Any, *, is_checkpoint: bool, holds: Sequence[str] = ()) -> None:
    """What stands at the path to be written is a checkpoint, or nothing."""
    if not is_checkpoint:
        there = f": it holds {names(holds)}" if holds else ""
        raise FileExistsError(
            errno.EEXIST,
            f"`{path}` exists and is not a checkpoint, so nothing is overwritten{there}.\nChoose another path",
        )


def nothing_else(path: Any, holds: Sequence[str], *, is_link: bool) -> None:
    """A checkpoint to be removed is a folder that holds nothing that others put there."""
    if holds or is_link:
        what = f"holds {names(holds)}, which `save` did not write" if holds else "is a link"
        raise FileExistsError(
            errno.EEXIST, f"`{path}` {what}, and is left as it is.\nMove that away, or remove the folder yourself"
        )


def names(found: Sequence[str]) -> str:
    """Some names, the first ones written out."""
    text = ", ".join(f"`{name}`" for name in found[:3])
    return text if len(found) <= 3 else f"{text} and {len(found) - 3} more"


def folder_free(path: Any, holder: dict[str, Any] | None, *, free: bool) -> None:
    """No other run holds the folder."""
    if not free:
        who = "another process"
        if holder:
            who = f"process {holder.get('pid')} on `{holder.get('host')}`, since {holder.get('since')}"
        raise BlockingIOError(
            errno.EWOULDBLOCK,
            f"`fit` needs a checkpoint folder that no other run uses, and `{path}` is in use: by {who}.\nWait for that "
            "run to end, end it, or save in another folder",
        )


def still_ours(path: Any, holder: dict[str, Any] | None, *, ours: bool) -> None:
    """No other run has taken over the folder, where the file system has no locks between machines."""
    if not ours:
        holder = holder or {}
        raise BlockingIOError(
            errno.EWOULDBLOCK,
            f"The checkpoint folder `{path}` was taken over by another run: process {holder.get('pid')} on "
            f"`{holder.get('host')}`, since {holder.get('since')}.\nGive each run a folder of its own",
        )


def nothing_newer(path: Any, read: Sequence[int], now: Sequence[int]) -> None:
    """Nobody has saved in the folder between the moment when it was read and the one when it was locked."""
    if now[-1:] != read[-1:]:
        raise BlockingIOError(
            errno.EWOULDBLOCK,
            f"Another run has saved step {now[-1] if now else None} in the checkpoint folder `{path}` since this one "
            "read it.\nCall `fit` again, or save in another folder",
        )
