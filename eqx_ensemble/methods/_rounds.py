"""Checkpoints of methods that consist of several runs: one folder per run, and one lock for all of them."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np

from .._check import CheckpointCorruptError
from .._pytree import PyTree
from .._warnings import warn
from ..checkpoint import Checkpoints
from ..checkpoint._check_folders import explain_folder
from ..checkpoint._path import absolute, as_path
from ..checkpoint._run_lock import RunLock
from ..train._errors import NotSavedError
from ..train._fit import fit as fit_here
from ..train._run import Run
from ..train.resume._program_text import function_text
from ..train.resume._round import Round
from ._call_record import check_recorded, texts_of, write_record
from ._check_rounds import check_folder, check_resume_rounds, went_back_message
from ._fit_round import check_rounds_of
from ._round_folders import has_checkpoints, remove_round, remove_rounds, round_path, saved_rounds

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
        checkpoint: str | os.PathLike[str] | None,
        *,
        own: dict[str, Any],
        every: int | None,
        resume: str,
        name: str,
        fit: Callable[..., Any] = fit_here,
    ) -> None:
        self.fit = check_rounds_of(fit, name=name)
        self._given_fit, self._replays = fit, fit is not fit_here
        self._folder: Any = None if checkpoint is None else absolute(as_path(checkpoint))
        self._own, self._every, self._name = own, every, name
        self._functions: dict[str, str] = {}
        self._round: Round | None = None
        if self._folder is not None:
            check_folder(self._folder, name=name)
            check_resume_rounds(self._folder, resume, begun=has_checkpoints(self._folder), name=name)
            texts = texts_of(own, name=name)
            check_recorded(self._folder, texts, other_fit=self._replays, name=name)

    def add_function(self, word: str, fn: Callable[..., Any], *args: PyTree) -> None:
        """Adds a function argument of the method to the identity of the call; `args` are examples of its arguments."""
        if self._folder is not None:
            self._functions[word] = function_text(fn, *args)

    def inside(self, folder: str, **own: Any) -> "Rounds":
        """The rounds of a method that this one calls, in a subfolder."""
        below = None if self._folder is None else self._folder / folder
        return Rounds(
            below, own=self._own | own, every=self._every, resume="auto", name=self._name, fit=self._given_fit
        )

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
                write_record(self._folder, texts_of(self._own, name=self._name))
            return 0, result
        saved = [] if self._folder is None else saved_rounds(self._folder)
        index = saved[-1] if saved else 0
        while True:
            self._round = None
            try:
                return index, train(index, **self.saving(index))
            except CheckpointCorruptError as error:
                if index - 1 not in saved:
                    raise
                warn(went_back_message(round_path(self._folder, index), error, name=self._name))
                remove_round(self._folder, index)
                index -= 1

    def saving(self, index: int) -> dict[str, Any]:
        """The options with which `fit` saves a round."""
        if self._folder is None:
            return {}
        path = round_path(self._folder, index)
        if self._replays:
            return {"checkpoint": path, "checkpoint_every": self._every}
        before = None if self._round is None else self._round.identity
        own = texts_of(self._own, name=self._name)
        self._round = Round(path, name=self._name, own=own, functions=self._functions, identity=before)
        return {"checkpoint": self._round, "checkpoint_every": self._every}

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
