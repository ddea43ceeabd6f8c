"""The subfolders of rounds in the folder of a method."""

import contextlib
import re
from typing import Any

from .._warnings import warn
from ..checkpoint import Checkpoints, _disk
from ..checkpoint._kind import STEP
from ..checkpoint._path import list_folder
from ..checkpoint._run_lock import NAME as LOCK
from ..checkpoint._write import clean, remove

_ROUND = re.compile(r"round-([0-9]{6})")


def round_path(folder: Any, index: int) -> Any:
    """The folder of a round."""
    return folder / f"round-{index:06d}"


def has_checkpoints(folder: Any) -> bool:
    """Whether a folder or any of its subfolders holds a checkpoint."""
    return any(STEP.fullmatch(path.name) for path in folder.glob("**/step-*"))


def saved_rounds(folder: Any) -> list[int]:
    """The indices of the rounds with a complete checkpoint, in order."""
    return [index for index in _rounds(folder) if Checkpoints(round_path(folder, index)).steps]


def remove_rounds(folder: Any, before: int) -> None:
    """Removes all earlier rounds, including leftovers of killed processes."""
    for index in _rounds(folder):
        if index < before:
            remove_round(folder, index)


def remove_round(folder: Any, index: int) -> None:
    """Removes a round. If other files are in its folder, warns and keeps them."""
    path = round_path(folder, index)
    try:
        for step in Checkpoints(path).steps:
            remove(Checkpoints(path).path(step))
        clean(path, STEP)
        with contextlib.suppress(FileNotFoundError):
            _disk.remove(path / LOCK)  # left by a killed process
        _disk.remove_empty_folder(path)
    except OSError as error:
        warn(f"The checkpoints of an earlier round could not be removed: {error}")


def _rounds(folder: Any) -> list[int]:
    matches = [_ROUND.fullmatch(entry.name) for entry in list_folder(folder) if entry.is_dir()]
    return sorted(int(match[1]) for match in matches if match)
