import errno
import re
from collections.abc import Mapping
from typing import Any

from ._leaves import kind_text
from ._options import check_positive_int, check_word

RESUME = ("auto", "must", "never")
_DIGEST = re.compile(r",? ?[0-9a-f]{64}")


def checkpoint_options(checkpoint: Any, kinds: tuple[type, ...], every: Any, resume: Any) -> None:
    """Where to save, how often, and whether to go on from there."""
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
            raise TypeError(f"`fit` takes {', '.join(given)} with `checkpoint=`, the folder to save the run in.")
        return
    if not isinstance(checkpoint, kinds):
        raise TypeError(f"`fit` needs `checkpoint` to be a path or `Checkpoints`, got {kind_text(checkpoint)}.")
    check_word(resume, "resume", RESUME, name="fit")
    if every is not None:
        check_positive_int(every, "checkpoint_every", name="fit")


def folder_of_runs(folder: Any, *, is_checkpoint: bool) -> None:
    """The folder is not itself what `save` wrote: checkpoints of a run would lie among its arrays."""
    if is_checkpoint:
        raise FileExistsError(
            errno.EEXIST,
            f"`fit` needs a folder of its own as `checkpoint`, and `{folder}` is a checkpoint that `save` wrote.\n"
            "Choose another folder; `eqx_ensemble.load` reads this one",
        )


def something_to_resume(steps: list[int], folder: Any, resume: str) -> None:
    """What `resume` asks for fits to what is in the folder."""
    if resume == "must" and not steps:
        raise FileNotFoundError(errno.ENOENT, f"`fit` must resume, and found no checkpoint in `{folder}`")
    if resume == "never" and steps:
        raise FileExistsError(
            errno.EEXIST,
            f"`fit` must not resume, and `{folder}` holds checkpoints (up to step {steps[-1]}), which are not "
            "overwritten.\nChoose another folder, or remove this one",
        )


_OF_FIT = {
    "identity": dict,
    "conditions": dict,
    "steps": int,
    "validations": int,
    "revived": list | None,
    "place": list,
    "seconds": float,
}


def of_fit(meta: Any, folder: Any) -> Mapping[str, Any]:
    """What `fit` wrote about a run."""
    fit = meta.get("fit") if isinstance(meta, dict) else None
    if not isinstance(fit, dict) or not all(name in fit and isinstance(fit[name], _OF_FIT[name]) for name in _OF_FIT):
        raise ValueError(
            f"`fit` cannot resume from `{folder}`: its checkpoints were not written by `fit`.\nChoose another folder."
        )
    return meta["fit"]


def same_call(saved: Mapping[str, str], now: Mapping[str, str], folder: Any) -> None:
    """The call that resumes is the one that was interrupted."""
    names = [*saved, *(name for name in now if name not in saved)]
    differ = [name for name in names if saved.get(name) != now.get(name)]
    if differ:
        lines = "\n".join(f"  `{name}`: {_difference(saved.get(name), now.get(name))}" for name in differ)
        raise ValueError(
            f"`fit` cannot resume from `{folder}`: this call is not the one that wrote it.\n{lines}\nRepeat that call, "
            "or save in another folder; to go on with something changed, call `fit` on the run that it returns."
        )


def _difference(saved: str | None, now: str | None) -> str:
    if saved is None or now is None:
        return f"saved {'without' if saved is None else 'with'} it, now {'without' if now is None else 'with'} it"
    before, after = (_DIGEST.sub("", text) for text in (saved, now))
    if before != after:
        return f"saved {before or 'another one'}, now {after or 'another one'}"
    return f"{before + ', ' if before else ''}not the same as saved"


def other_versions(saved: Mapping[str, str], now: Mapping[str, str], folder: Any) -> str:
    """The warning that a run goes on under other libraries or on another kind of device."""
    differ = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
    changes = ", ".join(f"{name} {saved.get(name)} -> {now.get(name)}" for name in differ)
    return (
        f"`fit` resumes from `{folder}`, saved under other conditions ({changes}): it goes on, but not bit for bit, "
        "and whether loss and optimiser are the same cannot be told."
    )


def not_beyond(done: int, wanted: int | None, unit: str) -> None:
    """A run that resumes is not asked to end before the place where it stands."""
    if wanted is not None and done > wanted:
        raise ValueError(
            f"`fit` cannot resume: {done} {unit} are done, and the call asks for {wanted} in all.\nAsk for at least "
            "as many, or save in another folder."
        )


def same_batches(digest: str, saved: Any) -> None:
    """An iterable of batches that is drawn again gives the batches that it gave before."""
    if digest != saved:
        raise ValueError(
            "`fit` cannot resume: the iterable gives other batches than it gave before the interruption.\nSeed it "
            "anew in each process, or give it `get_state` and `set_state`, so that it can say where it stands."
        )


def place_not_savable(value: Any, path: str) -> str:
    """The message that an iterator's state cannot be saved."""
    return (
        f"`fit` cannot save where the iterator of batches stands: its state{path and f' at `{path}`'} is "
        f"{kind_text(value)}.\nIt may hold dicts, lists, tuples, strings, bytes, numbers and arrays of numbers."
    )


def ended_by_an_error(step: int, *, saved: bool, failed: OSError | None) -> str:
    """The note on an error that ended a run on the way."""
    note = f"`fit` ended after {step} steps; this error's `run` is the run so far."
    if failed is not None:
        return f"{note} It could not be saved: {failed.strerror or failed}"
    return f"{note} The same call goes on from there." if saved else note


def run_is_lost(error: Exception) -> str:
    """The note on an error that ended a run which is lost."""
    return f"`fit` could not keep the run so far: {type(error).__name__}: {error}"


def not_saved(error: OSError, step: int) -> str:
    """The message that a run ended because it could not be saved."""
    return (
        f"`fit` ended after {step} steps, because the run could not be saved: {error.strerror or error}\nThis error's "
        "`run` is the run so far; the same call goes on from the last checkpoint."
    )
