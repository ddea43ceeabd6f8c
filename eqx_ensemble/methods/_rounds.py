"""Methods of several runs: each round is one `fit`, saved in a file of its own. A rerun only reads finished rounds."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from .._caller import caller
from .._check import check_path, kind_text
from ..train._engine import Run, is_batches


def check_folder(folder: Any, data: Any) -> None:
    """Raises unless rounds can be saved in a folder: the place in an iterable of batches is lost between two runs."""
    if folder is None:
        return
    check_path(folder, "checkpoint")
    if Path(folder).is_file():
        raise NotADirectoryError(f"`{caller()}` saves each round in a folder, and `{folder}` is a file.")
    if is_batches(data):
        raise TypeError(
            f"`{caller()}` takes `checkpoint` with data in arrays, got {kind_text(data)}: the position of an iterable "
            "of batches cannot be restored between runs.\nLeave `checkpoint` out, or call `fit`, which saves it."
        )


def saved_in(folder: str | os.PathLike[str] | None, index: int) -> dict[str, Any]:
    """The options with which `fit` saves a round."""
    return {} if folder is None else {"checkpoint": Path(folder) / f"round-{index:03d}.eqx"}


def check_some_score(scores: np.ndarray, training: np.ndarray) -> None:
    """Raises if no member that trains has a validation score by which members could be compared."""
    if np.isnan(scores[training]).all():
        raise ValueError(
            f"`{caller()}` cannot compare members: the validation scores of all {int(training.sum())} members that "
            "train are NaN.\nA metric may be undefined for these rows, such as the recall of a class that they lack: "
            "return a number there."
        )


def last_scores(run: Run) -> Float[np.ndarray, " members"]:
    """The validation scores of the current weights `(members,)`; all NaN if the current step was not validated."""
    scores, steps = run.history.validation, run.history.validation_step
    if scores is None or len(steps) == 0 or steps[-1] != int(run.train_state.step):
        return np.full(len(run.status), np.nan)
    return scores[:, -1]
