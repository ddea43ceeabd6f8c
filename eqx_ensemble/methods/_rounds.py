"""Checkpoints of methods that consist of several runs: one folder per run, and one lock for all of them."""

import dataclasses
import errno
import functools as ft
import os
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import Float

from .._caller import caller
from .._check import CheckpointCorruptError, MemberMismatchError, check_function, kind_text
from .._pytree import PyTree
from .._warnings import warn
from ..checkpoint import Checkpoints
from ..checkpoint._engine import (
    CallRecord,
    as_checkpoints,
    check_resume,
    check_run_folder,
    check_same_call,
    checkpoints_inside,
    child,
    children,
    has_call,
    has_checkpoints,
    is_on_disk,
    read_call,
    remove_run,
    write_call,
)
from ..distributed import to_host
from ..train._engine import (
    NotSavedError,
    Round,
    Run,
    check_checkpoint,
    function_text,
    is_batches,
    is_data_function,
    option_text,
)
from ..train._engine import fit as fit_here
from ._check import check_options, check_whole_epochs

_ROUND, _DECISIONS = "round", "decisions"

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


def remove_round(folder: Any, index: int) -> None:
    """Removes a round, with leftovers of killed processes. If other files are in its folder, warns and keeps them."""
    try:
        remove_run(child(folder, _ROUND, index))
    except OSError as error:
        warn(f"The checkpoints of an earlier round could not be removed: {error}")


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


def check_folder(folder: Any, resume: str) -> None:
    """Raises for a path that holds something else, such as the run of one `fit`, and for what `resume` forbids."""
    if not is_on_disk(folder):
        raise TypeError(f"`{caller()}` needs `checkpoint` to be a folder in a file system, got `{folder}`.")
    check_run_folder(folder)
    if Checkpoints(folder).steps:
        raise FileExistsError(
            errno.EEXIST,
            f"`{caller()}` needs a folder of its own as `checkpoint`, and `{folder}` holds the checkpoints of one "
            "run.\nChoose another folder",
        )
    check_resume(resume, folder, "checkpoints" if has_checkpoints(folder) else "")


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
        self.folder: Any = None if self._checkpoints is None else self._checkpoints.folder
        self._own, self._name = own, name
        self._texts = {"method": name} | {word: option_text(x) for word, x in own.items() if x is not None}
        self._functions: dict[str, str] = {}
        self._round: Round | None = None
        if self._checkpoints is not None:
            check_folder(self.folder, self._checkpoints.resume)
            # Another `fit` leaves `call` before its second round.
            if self._replays and not has_call(self.folder) and any(children(self.folder, _ROUND)):
                raise ValueError(
                    f"`{caller()}` cannot resume from `{self.folder}` with another `fit`: its rounds were trained by "
                    "that of this library.\nRepeat that call, or save in another folder."
                )
            if has_call(self.folder):
                check_same_call(read_call(self.folder)[0], self._record(), self.folder, effect="")

    def add_function(self, word: str, fn: Callable[..., Any], *args: PyTree) -> None:
        """Adds a function argument of the method to the identity of the call; `args` are examples of its arguments."""
        if self.folder is not None:
            self._functions[word] = function_text(fn, *args)

    def _record(self) -> CallRecord:
        """The arguments that rounds depend on, where another `fit` trains them: its runs do not record them."""
        return CallRecord(self._texts | {"fit": "another function"} if self._replays else {}, (), {})

    def inside(self, kind: str, number: int) -> "Rounds":
        """The rounds of a method that this one calls, in a subfolder."""
        below = self._checkpoints
        if below is not None:
            below = checkpoints_inside(below, child(self.folder, kind, number).name, resume="auto")
        return Rounds(below, own=self._own | {kind: number}, name=self._name, fit=self._given_fit)

    def resume(self, train: Callable[..., T]) -> tuple[int, T]:
        """Calls `train(index, **saving)` for the newest saved round, or the first. Returns the index and the result.

        `train` starts from the arguments of the method's call. If all checkpoints of the newest round are damaged, the
        previous round is used.
        """
        if self._replays:
            result = train(0, **self.saving(0))
            if self.folder is not None and not has_call(self.folder):  # after a round: a call that fails may change
                write_call(self.folder, self._record(), {})
            return 0, result
        rounds = [] if self.folder is None else children(self.folder, _ROUND)
        saved = [index for index in rounds if Checkpoints(child(self.folder, _ROUND, index)).steps]
        index = saved[-1] if saved else 0
        while True:
            self._round = None
            try:
                return index, train(index, **self.saving(index))
            except CheckpointCorruptError as error:
                if index - 1 not in saved:
                    raise
                name = child(self.folder, _ROUND, index).name
                warn(
                    f"`{caller()}` resumes from the round before `{name}`: all checkpoints of `{name}` are damaged.\n"
                    f"  {str(error).splitlines()[0]}"
                )
                remove_round(self.folder, index)
                index -= 1

    def saving(self, index: int) -> dict[str, Any]:
        """The options with which `fit` saves a round."""
        if self._checkpoints is None:
            return {}
        checkpoints = checkpoints_inside(self._checkpoints, child(self.folder, _ROUND, index).name, resume="auto")
        if self._replays:
            return {"checkpoint": checkpoints}
        before = None if self._round is None else self._round.call
        self._round = Round(checkpoints, self._texts, self._functions, before)
        return {"checkpoint": self._round}

    def decide(self, index: int, run: Run[Any], decisions: Callable[[], PyTree] | None = None) -> None:
        """Saves all decisions up to the end of a round, and removes the earlier rounds."""
        if self.folder is None or self._replays:
            return
        try:
            if decisions is not None:
                self._journal().save(index + 1, decisions())
        except OSError as error:
            raise NotSavedError(error, run) from error
        for earlier in children(self.folder, _ROUND):
            if earlier < index:
                remove_round(self.folder, earlier)

    def decisions(self, index: int, like: PyTree) -> PyTree:
        """Restores the decisions before a round; each array of `like` has a leading axis of rounds."""
        along = lambda x: np.empty((index, *x.shape[1:]), x.dtype)
        return self._journal().restore(jax.tree.map(along, like), step=index).tree

    def _journal(self) -> Checkpoints:
        return Checkpoints(self.folder / _DECISIONS, last=2)
