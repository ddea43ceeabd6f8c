import errno
import os
import re
from collections.abc import Mapping
from typing import Any

from ..._caller import caller
from ..._check import kind_text
from ...checkpoint import Checkpoints

_DIGEST = re.compile(r",? ?[0-9a-f]{64}")


def check_checkpoint(checkpoint: Any) -> None:
    """Raises unless `checkpoint` is a path, `Checkpoints` or `None`."""
    if checkpoint is not None and not isinstance(checkpoint, str | os.PathLike | Checkpoints):
        raise TypeError(f"`{caller()}` needs `checkpoint` to be a path or `Checkpoints`, got {kind_text(checkpoint)}.")


def check_run_folder(folder: Any, *, is_checkpoint: bool) -> None:
    """Raises for a folder that `save` wrote: checkpoints of a run would be written among its arrays."""
    if is_checkpoint:
        raise FileExistsError(
            errno.EEXIST,
            f"`{caller()}` needs a folder for checkpoints as `checkpoint`; `{folder}` is a single checkpoint written "
            "by `save`.\n"
            "Choose another folder; `load` reads this one",
        )


def check_resume(steps: list[int], folder: Any, resume: str) -> None:
    """Raises unless the folder has checkpoints with `resume="must"`, and none with `"never"`."""
    if resume == "must" and not steps:
        raise FileNotFoundError(errno.ENOENT, f"`fit` must resume, and found no checkpoint in `{folder}`")
    if resume == "never" and steps:
        raise FileExistsError(
            errno.EEXIST,
            f"`fit` must not resume, and `{folder}` holds checkpoints (up to step {steps[-1]}), which are not "
            "overwritten.\nChoose another folder, or remove this one",
        )


def check_of_fit(meta: Any, folder: Any) -> Any:
    """Raises unless `fit` wrote the checkpoint. Returns what it recorded about the run."""
    if not (isinstance(meta, dict) and isinstance(meta.get("fit"), dict) and meta["fit"]):
        raise ValueError(
            f"`fit` cannot resume from `{folder}`: its checkpoints were not written by `fit`.\nChoose another folder."
        )
    return meta["fit"]


def check_same_call(saved: Mapping[str, str], now: Mapping[str, str], folder: Any) -> None:
    """Raises unless the call matches the one that was interrupted."""
    words = [*saved, *(word for word in now if word not in saved)]
    differ = [word for word in words if saved.get(word) != now.get(word)]
    if differ:
        lines = "\n".join(f"  `{word}`: {_difference_text(saved.get(word), now.get(word))}" for word in differ)
        raise ValueError(
            f"`{caller()}` cannot resume from `{folder}`: this call differs from the one that wrote "
            f"it.\n{lines}\nRepeat that call, or save in another folder; to continue with changes, call `fit` on the "
            "run that it returns."
        )


def _difference_text(saved: str | None, now: str | None) -> str:
    if saved is None or now is None:
        return f"saved {'without' if saved is None else 'with'} it, now {'without' if now is None else 'with'} it"
    before, after = (_DIGEST.sub("", text) for text in (saved, now))
    if before != after:
        return f"saved {before or 'another one'}, now {after or 'another one'}"
    return f"{before + ', ' if before else ''}not the same as saved"


def other_versions_message(saved: Mapping[str, str], now: Mapping[str, str], folder: Any) -> str:
    """The warning that a run resumes with other versions or on another kind of device."""
    differ = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
    changes = ", ".join(f"{name} {saved.get(name)} -> {now.get(name)}" for name in differ)
    return (
        f"`fit` resumes from `{folder}`, saved under other conditions ({changes}): the result will not be the same bit "
        "for bit, and loss and optimiser cannot be compared."
    )


def not_saved_message(error: OSError, step: int) -> str:
    """The message that a run ended because it could not be saved."""
    return (
        f"`fit` ended after {step} steps, because the run could not be saved: {error.strerror or error}\nThis error's "
        "`run` is the run so far; the same call resumes from the last checkpoint."
    )
