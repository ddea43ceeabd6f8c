import os
from typing import Any

from ..._caller import caller
from ..._check import check_positive_int, check_word, kind_text
from ...checkpoint import Checkpoints

RESUME = ("auto", "must", "never")


def check_checkpoint_options(checkpoint: Any, every: Any, resume: Any) -> None:
    """Raises for invalid options of saving, and for such options without `checkpoint`."""
    if checkpoint is None:
        given = [
            f"`{word}`"
            for word, there in (
                ("checkpoint_every", every is not None),
                ("resume", not isinstance(resume, str) or resume != "auto"),
            )
            if there
        ]
        if given:
            raise TypeError(f"`{caller()}` takes {', '.join(given)} with `checkpoint=`, the folder to save the run in.")
        return
    if not isinstance(checkpoint, str | os.PathLike | Checkpoints):
        raise TypeError(f"`{caller()}` needs `checkpoint` to be a path or `Checkpoints`, got {kind_text(checkpoint)}.")
    check_word(resume, "resume", RESUME)
    if every is not None:
        check_positive_int(every, "checkpoint_every")
