import dataclasses
import os
import time
from types import TracebackType
from typing import Any, NamedTuple, final

import jax
import numpy as np
from jaxtyping import Array

from ..._pytree import PyTree
from ...checkpoint import Checkpoints, Contents
from ...checkpoint._engine import (
    CallRecord,
    Claim,
    FormatName,
    as_checkpoints,
    check_fields,
    check_resume,
    check_run_folder,
    check_same_call,
    check_valid,
    explain_record,
    is_count,
    is_record,
    is_seconds,
    is_string,
)
from ...distributed import broadcast_from_first
from .._revive import Revival
from .._state import MemberConstants, TrainState
from ..compiled._health import Carry
from ..compiled._selection import Mode
from ..data._source import Cursor, decode, encode
from ..host._record import History, Record
from ..host._start import Start
from ._identity import Identity

# What `fit` writes about a run into the metadata of a checkpoint.


class SavedRecord(NamedTuple):
    """The record of a run.

    **Attributes:**

    - `call`: what identifies the call.
    - `steps`, `validations`: the numbers of recorded columns.
    - `revived`, `place`: the revived members, and the position in the data.
    - `seconds`, `continued`: durations of the call, and of the runs that it continues; `begun`: its first step.
    """

    call: CallRecord
    steps: int
    validations: int
    revived: list[Revival] | None
    place: Cursor
    seconds: float
    continued: float
    begun: int

    def to_json(self) -> dict[str, Any]:
        """The record as JSON."""
        revived = None if self.revived is None else [list(each) for each in self.revived]
        place = list(self.place._replace(state=encode(self.place.state)))
        return self._asdict() | {"call": self.call._asdict(), "revived": revived, "place": place}


_KINDS = {
    "call": is_record,
    "steps": is_count,
    "validations": is_count,
    "seconds": is_seconds,
    "continued": is_seconds,
    "begun": is_count,
    "revived": lambda value: value is None or (type(value) is list and all(map(_is_revival, value))),
    "place": lambda value: _is_place(value),
}


def read_record(contents: Contents, path: Any, folder: Any) -> SavedRecord:
    """The record in a checkpoint at `path`; `ValueError` if `fit` did not write it, else `CheckpointCorruptError`."""
    saved = contents.meta.get("fit") if isinstance(contents.meta, dict) else None
    if not (isinstance(saved, dict) and saved):
        raise ValueError(
            f"`fit` cannot resume from `{folder}`: its checkpoints were not written by `fit`.\nChoose another folder."
        )
    with explain_record(path):
        fields = check_fields(saved, _KINDS, "fit")
        for name, word in (("history_step", "steps"), ("validation_step", "validations")):
            expected = f"i64[{fields[word]}]"
            check_valid(f"`{word}` is not what was recorded", holds=contents.leaves.get(f"['{name}']") == expected)
        done = -1 if contents.step is None else contents.step
        check_valid("it begins after its step", holds=fields["begun"] <= done)
        epochs, batches, state, digest = fields["place"]
        # Each epoch has a batch, and each step takes one: more of them would only be counted.
        check_valid("`place` is after the step", holds=max(epochs, batches) <= done + 1)
        revived = None if fields["revived"] is None else [Revival(*each) for each in fields["revived"]]
        read = {"revived": revived, "place": Cursor(epochs, batches, decode(state), digest)}
        read["call"] = CallRecord.read(fields["call"], "call")
        return SavedRecord(**{name: fields[name] for name in SavedRecord._fields} | read)


def _is_revival(value: Any) -> bool:
    return (
        type(value) is list
        and len(value) == 3
        and all(map(is_count, value[:2]))
        and (value[2] is None or is_count(value[2]))
    )


def _is_place(value: Any) -> bool:
    if type(value) is not list or len(value) != len(Cursor._fields):
        return False
    return is_count(value[0]) and is_count(value[1]) and (value[3] is None or is_string(value[3]))


@final
@dataclasses.dataclass(eq=False)
class Round:
    """The `checkpoint` of a run that is one of several runs of a method.

    The first run in a process starts from the arguments of the method's call: it has the identity of that call, and
    resumes where an earlier process stopped. Later runs continue a run of this process, and only write.

    **Attributes:**

    - `checkpoints`: the checkpoints of this run.
    - `own`, `functions`: texts of the method's own arguments, which are part of the identity; those of functions are
        `code` of a `CallRecord`.
    - `call`: what identifies the call, known after the first run of this process.
    """

    checkpoints: Checkpoints
    own: dict[str, str]
    functions: dict[str, str]
    call: CallRecord | None

    def __fspath__(self) -> str:
        return os.fspath(self.checkpoints.folder)

    def identify(self, run: CallRecord) -> CallRecord:
        """What identifies the call, of which `run` is one run."""
        if self.call is None:
            texts = self.own | self.functions | run.texts
            self.call = CallRecord(texts, (*run.code, *self.functions), run.conditions)
        return self.call


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

    def __init__(self, checkpoint: str | os.PathLike[str] | Checkpoints) -> None:
        self._round = checkpoint if isinstance(checkpoint, Round) else None
        given = checkpoint if self._round is None else self._round.checkpoints
        # Arrays on several processes are written by Orbax.
        kind: FormatName = "safetensors" if jax.process_count() == 1 else "orbax"
        self._checkpoints = as_checkpoints(given, asynchronous=True, format=kind)
        self.every = self._checkpoints.every
        self.step = -1
        self.failed: OSError | None = None
        self.seconds_before = 0.0
        self._saved_at = time.perf_counter()
        self.folder = self._checkpoints.folder
        check_run_folder(self.folder)
        steps = self._checkpoints.steps
        check_resume(self._checkpoints.resume, self.folder, f"checkpoints (up to step {steps[-1]})" if steps else "")
        self._claim = Claim(self.folder, lambda: self._checkpoints.steps)

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
        continues = self._round is not None and self._round.call is not None
        self._call = identity.call if self._round is None else self._round.identify(identity.call)
        self._identity, self._begun, self._continued = identity, start.begun, start.seconds
        self._shared, self._ids = start.state.shared, start.state.ids
        self._seen = self._checkpoints.steps
        if not self._seen or continues:
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
        check_same_call(record.call, self._call, self.folder, effect="the result will not be the same bit for bit")
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
            call=self._call,
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


def _mode_of(carry: Carry) -> Mode:
    return "min" if carry.selection is None else carry.selection.mode


def _mean(scores: np.ndarray, *, mode: Mode) -> float | None:
    """The mean, negated for `mode="max"`: lower scores of checkpoints are better."""
    finite = scores[np.isfinite(scores)] * (1 if mode == "min" else -1)
    return float(finite.mean()) if finite.size else None
