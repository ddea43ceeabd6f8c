"""Checks for methods that save several runs in one folder."""

import errno
import os
from typing import Any

import jax

from .._check import kind_text
from ..checkpoint import Checkpoints
from ..checkpoint._check_folders import check_overwritable
from ..checkpoint._names import is_sealed
from ..checkpoint._path import is_on_disk
from ..train.data._data import is_batches
from ..train.resume._check import check_checkpoint_options, check_run_folder


def check_saving(checkpoint: Any, every: Any, resume: Any, data: Any, *, name: str) -> None:
    """Raises for invalid checkpoint options, and for data whose position cannot be restored between two runs."""
    check_checkpoint_options(checkpoint, every, resume, name=name)
    if checkpoint is None:
        return
    if isinstance(checkpoint, Checkpoints):
        raise TypeError(
            f"`{name}` needs `checkpoint` to be the path of a folder, got {kind_text(checkpoint)}: each of its runs "
            "has a folder of its own in it."
        )
    if is_batches(data):
        raise TypeError(
            f"`{name}` takes `checkpoint` with data in arrays, got {kind_text(data)}: the position of an iterable of "
            "batches cannot be restored between runs.\nLeave `checkpoint` out, or call `fit`, which saves it."
        )
    if jax.process_count() > 1:
        raise NotImplementedError(f"`{name}` takes `checkpoint` on one process, not on {jax.process_count()}.")


def check_folder(folder: Any, *, name: str) -> None:
    """Raises for a path that holds something else: a file, a checkpoint, or the run of one `fit`."""
    if not is_on_disk(folder):
        raise TypeError(f"`{name}` needs `checkpoint` to be a folder in a file system, got `{folder}`.")
    check_overwritable(folder, is_checkpoint=not folder.exists() or folder.is_dir())
    check_run_folder(folder, is_checkpoint=is_sealed(folder), name=name)
    if Checkpoints(folder).steps:
        raise FileExistsError(
            errno.EEXIST,
            f"`{name}` needs a folder of its own as `checkpoint`, and `{folder}` holds the checkpoints of one run.\n"
            "Choose another folder",
        )


def check_resume_rounds(folder: Any, resume: str, *, begun: bool, name: str) -> None:
    """Raises for `resume="must"` without checkpoints, and for `"never"` with some."""
    if resume == "must" and not begun:
        raise FileNotFoundError(errno.ENOENT, f"`{name}` must resume, and found no checkpoint in `{folder}`")
    if resume == "never" and begun:
        raise FileExistsError(
            errno.EEXIST,
            f"`{name}` must not resume, and `{folder}` holds checkpoints, which are not overwritten.\nChoose another "
            "folder, or remove this one",
        )


def went_back_message(folder: Any, error: Exception, *, name: str) -> str:
    """The warning that training resumes from the previous round, because all checkpoints of this one are damaged."""
    round_ = os.path.basename(folder)
    return (
        f"`{name}` resumes from the round before `{round_}`: all checkpoints of `{round_}` are damaged.\n"
        f"  {str(error).splitlines()[0]}"
    )
