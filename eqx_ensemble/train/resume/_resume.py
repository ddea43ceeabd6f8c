import os
import sys
import time
from types import TracebackType
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Array

from ..._pytree import PyTree
from ..._warnings import warn
from ...checkpoint import Checkpoints, Contents
from ...checkpoint._check_folders import check_overwritable
from ...checkpoint._check_record import check_valid, explain_record
from ...checkpoint._formats import FormatName
from ...checkpoint._names import is_sealed
from ...checkpoint._path import is_on_disk
from ...checkpoint._snapshot import versions
from ...distributed import broadcast_from_first
from .._revive import Revival
from .._state import MemberConstants, TrainState
from ..compiled._carry import Carry
from ..compiled._selection import Mode
from ..data._cursor import Cursor
from ..host._record import History, Record
from ..host._start import Start
from ._check import check_resume, check_run_folder, check_same_call, other_versions_message
from ._claim import Claim
from ._identity import Identity
from ._round import Round
from ._saved_record import SavedRecord, read_record

_SECONDS_BETWEEN = 60.0
_PER_MEMBER = ("moving", "fixed", "ids", "selection", "loss", "aux", "validation")


class Saver:
    """Saves a run at boundaries of its chunks, and restores it.

    **Attributes:**

    - `every`: the number of steps between two checkpoints; about a minute if `None`.
    - `step`: the last saved step, or -1.
    - `failed`: the error of a failed save, after which the run ends.
    - `seconds_before`: the duration of the call before this process.
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike[str] | Checkpoints,
        *,
        every: int | None,
        resume: Literal["auto", "must", "never"],
    ) -> None:
        own = isinstance(checkpoint, Checkpoints)
        self._round = checkpoint if isinstance(checkpoint, Round) else None
        # Arrays on several processes are written by Orbax.
        kind: FormatName = "safetensors" if jax.process_count() == 1 else "orbax"
        self._checkpoints = checkpoint if own else Checkpoints(checkpoint, asynchronous=True, format=kind)
        self.every = every
        self.step = -1
        self.failed: OSError | None = None
        self.seconds_before = 0.0
        self._saved_at = time.perf_counter()
        self.folder = self._checkpoints.path(0).parent
        check_overwritable(self.folder, is_checkpoint=not self.folder.exists() or self.folder.is_dir())
        check_run_folder(self.folder, is_checkpoint=is_on_disk(self.folder) and is_sealed(self.folder))
        check_resume(self._checkpoints.steps, self.folder, resume)
        self._claim = Claim(self._checkpoints)

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None or jax.process_count() == 1:  # after an error, the other processes may be gone
            self._checkpoints.finish()
        self._claim.release()

    def claim(self) -> None:
        """Locks the folder before the first step of the run; a complete run is only read."""
        self._claim.take(self._seen)

    def resume(self, start: Start, identity: Identity) -> Start:
        """The start at the last good checkpoint, or `start` if there is none."""
        goes_on = self._round is not None and self._round.goes_on
        if self._round is not None:
            identity = self._round.identify(identity)
        self._identity, self._begun, self._continued = identity, start.begun, start.seconds
        self._shared, self._ids = start.state.shared, start.state.ids
        self._seen = self._checkpoints.steps
        if not self._seen or goes_on:
            return start
        restored = self._checkpoints.restore(lambda contents: self._like(start, contents))
        self.step, record = restored.step, self._record
        self.seconds_before, self._continued, self._begun = record.seconds, record.continued, record.begun
        tree = restored.tree
        history = History(tree["loss"], tree["aux"], tree["validation"], tree["validation_step"], tree["history_step"])
        return start._replace(
            state=TrainState(tree["moving"], tree["fixed"], tree["shared"], tree["ids"], tree["step"]),
            selection=tree["selection"],
            record=Record(first_step=self._begun, history=history, windows=start.record.columns.windows),
            revived=start.revived if record.revived is None else record.revived,
            cursor=record.place,
            begun=self._begun,
            seconds=self._continued,
        )

    def _like(self, start: Start, contents: Contents) -> dict[str, Any]:
        """The shapes in a checkpoint of this run; raises if it belongs to another run."""
        path = self._checkpoints.path(contents.step or 0)
        record = self._record = read_record(contents, path, self.folder)
        texts, saved, now = dict(self._identity.texts), record.identity, _conditions()
        if record.conditions != now:
            warn(other_versions_message(record.conditions, now, self.folder))
            saved, texts = ({k: v for k, v in t.items() if k not in self._identity.traced} for t in (saved, texts))
        name = "fit" if self._round is None else self._round.name
        check_same_call(saved, texts, self.folder, name=name)
        if self._round is None:  # a round may have begun at the end of another one
            with explain_record(path):
                check_valid("`begun` is not the step at which this call begins", holds=record.begun == start.begun)
        state = start.state
        along = lambda x: np.empty((state.num_members, record.steps, *x.shape), x.dtype)
        count, selection = record.validations, start.selection
        scores = None if selection is None or not count else np.empty((state.num_members, count), selection.score.dtype)
        return _tree(
            Carry(state.moving, selection, state.step),
            state.fixed,
            state.shared,
            state.ids,
            History(
                along(self._identity.value),
                jax.tree.map(along, self._identity.aux),
                scores,
                np.empty(count, np.int64),
                np.empty(record.steps, np.int64),
            ),
        )

    def due(self, step: int) -> bool:
        """Whether to write a checkpoint after `step`."""
        if self.every is None:
            return broadcast_from_first(time.perf_counter() - self._saved_at) >= _SECONDS_BETWEEN
        last = max(self.step, self._begun)
        return step // self.every > last // self.every

    def save(
        self,
        carry: Carry,
        fixed: MemberConstants,
        record: Record,
        *,
        revived: list[Revival] | None,
        cursor: Cursor,
        seconds: float,
    ) -> None:
        """Saves all members. An `OSError` is kept in `failed`, so that the run can end cleanly."""
        history = record.curves()
        tree = _tree(carry, fixed, self._shared, self._ids, history)
        scores = history.validation
        saved = SavedRecord(
            identity=self._identity.texts,
            conditions=_conditions(),
            steps=history.loss.shape[1],
            validations=0 if scores is None else scores.shape[1],
            revived=revived,
            place=cursor,
            seconds=seconds,
            continued=self._continued,
            begun=self._begun,
        )
        try:
            self.claim()
            self._claim.check()
            self._checkpoints.save(
                record.steps,
                tree,
                per_member={name: name in _PER_MEMBER for name in tree},
                ids=self._ids,
                score=None if scores is None else _mean(scores[:, -1], mode=_mode_of(carry)),
                meta={"fit": saved.to_json()},
            )
        except OSError as error:
            self.failed = error
        self.step, self._saved_at = record.steps, time.perf_counter()

    def wait(self) -> None:
        """Waits for the last save."""
        try:
            self._checkpoints.wait()
        except OSError as error:
            self.failed = error


def _tree(carry: Carry, fixed: MemberConstants, shared: PyTree, ids: Array, history: History) -> dict[str, Any]:
    """The saved parts of a run, by name."""
    return {
        "moving": carry.moving,
        "selection": carry.selection,
        "step": carry.step,
        "fixed": fixed,
        "shared": shared,
        "ids": ids,
        "loss": history.loss,
        "aux": history.aux,
        "validation": history.validation,
        "validation_step": history.validation_step,
        "history_step": history.step,
    }


def _conditions() -> dict[str, str]:
    """The conditions, in addition to the call, that determine the last bits of a run."""
    packages = {name: version for name, version in versions().items() if name not in ("python", "numpy")}
    packages["bytecode"] = str(
        sys.implementation.cache_tag
    )  # functions that cannot be traced are compared by their code
    return packages | {"backend": jax.default_backend(), "x64": str(jax.config.read("jax_enable_x64"))}


def _mode_of(carry: Carry) -> Mode:
    return "min" if carry.selection is None else carry.selection.mode


def _mean(scores: np.ndarray, *, mode: Mode) -> float | None:
    """The mean, negated for `mode="max"`: lower scores of checkpoints are better."""
    finite = scores[np.isfinite(scores)] * (1 if mode == "min" else -1)
    return float(finite.mean()) if finite.size else None
