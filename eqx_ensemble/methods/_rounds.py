"""Methods of several runs: each round is one `fit`, saved in a file of its own. A rerun only reads finished rounds."""

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from .._caller import caller
from .._check import kind_text
from .._load import contents
from .._save import save
from ..train._engine import Checkpoint, Run, as_checkpoint, check_same_call, is_batches, option_text


def begin(checkpoint: Any, data: Any, *, method: str, **own: Any) -> Checkpoint | None:
    """The folder of a method's rounds, which holds `own`, the options that `fit` does not see; raises for others."""
    folder = as_checkpoint(checkpoint)
    if folder is None:
        return None
    if is_batches(data):
        raise TypeError(
            f"`{caller()}` takes `checkpoint` with data in arrays, got {kind_text(data)}: the position of an iterable "
            "of batches cannot be restored between runs.\nLeave `checkpoint` out, or call `fit`, which saves it."
        )
    if Path(folder.path).is_file():
        raise NotADirectoryError(f"`{caller()}` saves each round in a file of a folder, and `{folder.path}` is a file.")
    path, texts = Path(folder.path) / "call.eqx", {"method": method, "versions": ""}
    texts |= {name: option_text(x) for name, x in own.items() if x is not None}
    if path.exists():
        check_same_call(contents(path).meta, texts, path)
    else:
        save(path, {}, meta=texts)
    return folder


def round_in(folder: Checkpoint | None, index: int) -> Checkpoint | None:
    """Where `fit` saves a round."""
    return None if folder is None else folder._replace(path=Path(folder.path) / f"round-{index:03d}.eqx")


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
