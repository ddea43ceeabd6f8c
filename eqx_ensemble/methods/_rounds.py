"""Checkpoints of methods that consist of several runs: one folder per run, and one lock for all of them."""

import contextlib
import dataclasses
import errno
import functools as ft
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import Float

from .._caller import caller
from .._check import CheckpointCorruptError, MemberMismatchError, check_function, kind_text
from .._pytree import PyTree
from .._warnings import warn
from ..checkpoint import Checkpoints, _disk
from ..checkpoint._engine import NAME as LOCK
from ..checkpoint._engine import (
    STEP,
    RunLock,
    as_checkpoints,
    check_overwritable,
    checkpoints_inside,
    clean,
    explain_folder,
    has_our_manifest,
    is_on_disk,
    list_folder,
    remove,
)
from ..distributed import to_host
from ..train._engine import (
    NotSavedError,
    Round,
    Run,
    check_checkpoint,
    check_run_folder,
    check_same_call,
    function_text,
    is_batches,
    is_data_function,
    option_text,
)
from ..train._engine import fit as fit_here
from ._check import check_options, check_whole_epochs

# A record of the arguments of a method whose rounds are trained by another `fit`: its runs do not record them.

_OTHER_FIT = {"fit": "another function"}


def texts_of(own: dict[str, Any], *, name: str) -> dict[str, str]:
    """A method's own arguments, as texts."""
    return {"method": name} | {word: option_text(value) for word, value in own.items() if value is not None}


def _record(folder: Path) -> Checkpoints:
    return Checkpoints(folder / "call")


# The function `fit` with which a method trains its rounds: that of this library, or another with its signature.

_IN_FILES = ("save", "ids")  # options of `fleet.fit`


def check_rounds_of(fit: Callable[..., Any]) -> Callable[..., Any]:
    """Raises unless `fit` is a function. Returns it, with checks of what it returns if it is not that of this library.

    Rounds that another function ends early, before all members were trained, have not taken place.
    """
    if fit is fit_here:
        return fit
    check_function(fit, "fit", example="functools.partial(ee.fleet.fit, executor)")
    return ft.partial(_fit_round, fit)


def _fit_round(fit: Callable[..., Any], begun: Any, loss: Any, optimiser: Any, data: Any, **options: Any) -> Run[Any]:
    check_options(getattr(fit, "keywords", {}) | options, _IN_FILES, "it compares members in this process")
    if options.get("steps") is not None and is_data_function(data):
        data = ft.partial(_make_data, data)
    before = _not_trained(begun) if isinstance(begun, Run) else None
    try:
        run = fit(begun, loss, optimiser, data, **options)
    except KeyboardInterrupt:
        if before is None:
            raise
        return before
    if not isinstance(run, Run):
        raise TypeError(
            f"`{caller()}` needs `fit` to return a run, as that of this library does; got {kind_text(run)}."
        )
    missing = np.setdiff1d(_ids(begun), _ids(run)).tolist()
    if missing and not run.interrupted:
        raise MemberMismatchError(
            f"`{caller()}` needs the runs of all members to compare them; `fit` returned without {len(missing)} of "
            f"them, ids {missing[:8]}.\n"
            "Rerun the call: with `checkpoint=`, it resumes."
        )
    return before if missing and before is not None else run


def _not_trained(begun: Run[Any]) -> Run[Any]:
    """The run that a round was to continue, with the members that were stopped before it, as after Ctrl-C."""
    state = begun.train_state.moving
    status, stopped_at = to_host(state.status), to_host(state.stopped_at)
    return dataclasses.replace(begun, status=status, stopped_at=stopped_at, interrupted=True)


def _ids(begun: Any) -> np.ndarray:
    return np.asarray(begun.train_state.ids if isinstance(begun, Run) else begun.ids)


def _make_data(make: Callable[..., Any], ids: np.ndarray) -> Any:
    data = make(ids)
    check_whole_epochs(1, is_batches=is_batches(data))
    return data


# The subfolders of rounds in the folder of a method.

_ROUND = re.compile(r"round-([0-9]{6})")


def round_path(folder: Any, index: int) -> Any:
    """The folder of a round."""
    return folder / f"round-{index:06d}"


def has_checkpoints(folder: Any) -> bool:
    """Whether a folder or any of its subfolders holds a checkpoint."""
    return any(STEP.fullmatch(path.name) for path in folder.glob("**/step-*"))


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


# Checks for methods that save several runs in one folder.


def check_saving(checkpoint: Any, data: Any) -> None:
    """Raises for invalid checkpoint options, and for data whose position cannot be restored between two runs."""
    check_checkpoint(checkpoint)
    if checkpoint is None:
        return
    if is_batches(data):
        raise TypeError(
            f"`{caller()}` takes `checkpoint` with data in arrays, got {kind_text(data)}: the position of an iterable "
            "of batches cannot be restored between runs.\nLeave `checkpoint` out, or call `fit`, which saves it."
        )
    if jax.process_count() > 1:
        raise NotImplementedError(f"`{caller()}` takes `checkpoint` on one process, not on {jax.process_count()}.")


def check_folder(folder: Any) -> None:
    """Raises for a path that holds something else: a file, a checkpoint, or the run of one `fit`."""
    if not is_on_disk(folder):
        raise TypeError(f"`{caller()}` needs `checkpoint` to be a folder in a file system, got `{folder}`.")
    check_overwritable(folder, is_checkpoint=not folder.exists() or folder.is_dir())
    check_run_folder(folder, is_checkpoint=has_our_manifest(folder))
    if Checkpoints(folder).steps:
        raise FileExistsError(
            errno.EEXIST,
            f"`{caller()}` needs a folder of its own as `checkpoint`, and `{folder}` holds the checkpoints of one "
            "run.\nChoose another folder",
        )


def check_resume_rounds(folder: Any, resume: str, *, begun: bool) -> None:
    """Raises for `resume="must"` without checkpoints, and for `"never"` with some."""
    if resume == "must" and not begun:
        raise FileNotFoundError(errno.ENOENT, f"`{caller()}` must resume, and found no checkpoint in `{folder}`")
    if resume == "never" and begun:
        raise FileExistsError(
            errno.EEXIST,
            f"`{caller()}` must not resume, and `{folder}` holds checkpoints, which are not overwritten.\nChoose "
            "another folder, or remove this one",
        )


def went_back_message(folder: Any, error: Exception) -> str:
    """The warning that training resumes from the previous round, because all checkpoints of this one are damaged."""
    round_ = os.path.basename(folder)
    return (
        f"`{caller()}` resumes from the round before `{round_}`: all checkpoints of `{round_}` are damaged.\n"
        f"  {str(error).splitlines()[0]}"
    )


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


_DECISIONS = "decisions"
T = TypeVar("T")


class Rounds:
    """The successive runs of a method, saved in subfolders of `checkpoint`; not saved if it is `None`.

    The folder of a round is kept until the next round has ended: a complete checkpoint always exists, and usually an
    older one to fall back on. Decisions between two rounds are saved before the second one starts.

    Another function `fit` than that of this library saves each round by itself, in its own way. Then all rounds are
    kept, and a rerun calls it for each of them again, which reads completed ones.
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike[str] | Checkpoints | None,
        *,
        own: dict[str, Any],
        name: str,
        fit: Callable[..., Any] = fit_here,
    ) -> None:
        self.fit = check_rounds_of(fit)
        self._given_fit, self._replays = fit, fit is not fit_here
        self._checkpoints = None if checkpoint is None else as_checkpoints(checkpoint)
        self._folder: Any = None if self._checkpoints is None else self._checkpoints.folder
        self._own, self._name = own, name
        self._functions: dict[str, str] = {}
        self._round: Round | None = None
        if self._checkpoints is not None:
            check_folder(self._folder)
            check_resume_rounds(self._folder, self._checkpoints.resume, begun=has_checkpoints(self._folder))
            texts = texts_of(own, name=name)
            record = _record(self._folder)
            if record.steps:
                check_same_call(record.restore({}).meta, texts | _OTHER_FIT if self._replays else {}, self._folder)

    def add_function(self, word: str, fn: Callable[..., Any], *args: PyTree) -> None:
        """Adds a function argument of the method to the identity of the call; `args` are examples of its arguments."""
        if self._folder is not None:
            self._functions[word] = function_text(fn, *args)

    def inside(self, folder: str, **own: Any) -> "Rounds":
        """The rounds of a method that this one calls, in a subfolder."""
        below = None if self._checkpoints is None else checkpoints_inside(self._checkpoints, folder, resume="auto")
        return Rounds(below, own=self._own | own, name=self._name, fit=self._given_fit)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the lock of the folder, so that only one process trains in it."""
        if self._folder is None:
            yield
            return
        lock = RunLock(self._folder)
        with explain_folder(self._folder):
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def resume(self, train: Callable[..., T]) -> tuple[int, T]:
        """Calls `train(index, **saving)` for the newest saved round, or the first. Returns the index and the result.

        `train` starts from the arguments of the method's call. If all checkpoints of the newest round are damaged, the
        previous round is used.
        """
        if self._replays:
            result = train(0, **self.saving(0))
            if self._folder is not None:
                record = _record(self._folder)
                if not record.steps:  # after the first round: a call that fails in it may change its arguments
                    record.save(0, {}, meta=texts_of(self._own, name=self._name) | _OTHER_FIT)
            return 0, result
        begun = [] if self._folder is None else _rounds(self._folder)
        saved = [index for index in begun if Checkpoints(round_path(self._folder, index)).steps]  # complete ones
        index = saved[-1] if saved else 0
        while True:
            self._round = None
            try:
                return index, train(index, **self.saving(index))
            except CheckpointCorruptError as error:
                if index - 1 not in saved:
                    raise
                warn(went_back_message(round_path(self._folder, index), error))
                remove_round(self._folder, index)
                index -= 1

    def saving(self, index: int) -> dict[str, Any]:
        """The options with which `fit` saves a round."""
        if self._checkpoints is None:
            return {}
        checkpoints = checkpoints_inside(self._checkpoints, round_path(self._folder, index).name, resume="auto")
        if self._replays:
            return {"checkpoint": checkpoints}
        before = None if self._round is None else self._round.identity
        own = texts_of(self._own, name=self._name)
        self._round = Round(checkpoints, own=own, functions=self._functions, identity=before)
        return {"checkpoint": self._round}

    def decide(self, index: int, run: Run[Any], decisions: Callable[[], PyTree] | None = None) -> None:
        """Saves all decisions up to the end of a round, and removes the earlier rounds."""
        if self._folder is None or self._replays:
            return
        try:
            if decisions is not None:
                self._journal().save(index + 1, decisions())
        except OSError as error:
            raise NotSavedError(error, run) from error
        remove_rounds(self._folder, before=index)

    def decisions(self, index: int, like: PyTree) -> PyTree:
        """Restores the decisions before a round; each array of `like` has a leading axis of rounds."""
        along = lambda x: np.empty((index, *x.shape[1:]), x.dtype)
        return self._journal().restore(jax.tree.map(along, like), step=index).tree

    def _journal(self) -> Checkpoints:
        return Checkpoints(self._folder / _DECISIONS, last=2)
