"""The file in which `fit` saves a run: what identifies the call, the state of all members, and their history."""

import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array

from ..._caller import caller
from ..._load import load
from ..._pytree import PyTree
from ..._save import hold, read_header, save
from ...distributed import broadcast_from_first, is_first
from ...distributed._engine import raise_on_all
from .._options import Checkpoint
from .._revive import Revival, Revive
from .._state import MemberConstants, MemberState, TrainState
from .._texts import (
    array_texts,
    check_same_call,
    digest_of,
    function_text,
    option_text,
    program_text,
    shapes_text,
    versions_text,
)
from ..compiled._health import Carry
from ..compiled._loss import Loss
from ..compiled._optimiser import Optimiser, init_member, update_alone
from ..compiled._program import Program
from ..data._source import Cursor, decode, encode, member_shapes
from ._record import History, Record
from ._start import Start

_SECONDS_BETWEEN = 60.0


class Identity(NamedTuple):
    """What identifies a call of `fit`, as short texts by name; digests of its programs; and the shapes of its outputs.

    `value` is the shape of a member's loss, `aux` those of its auxiliary outputs.
    """

    texts: dict[str, str]
    programs: tuple[str, ...]
    value: jax.ShapeDtypeStruct
    aux: PyTree


def identify(
    program: Program, start: Start, batch: PyTree, validation: PyTree, texts: dict[str, str], options: dict[str, Any]
) -> Identity:
    """The identity of a call that begins at `start`.

    **Arguments:**

    - `batch`: the shapes of a batch as one member sees it.
    - `validation`: the validation data on the device.
    - `texts`: those of the data.
    - `options`: the other options of the call.
    """
    state = start.state
    one = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) if eqx.is_array(x) else x
    moving, fixed, ids = jax.tree.map(one, (state.moving, state.fixed, state.ids))
    shared = member_shapes(state.shared)
    loss, ((value, (_, aux)), _) = program_text(_gradient, program.loss, moving, fixed, shared, batch)
    programs = {"loss": loss}
    programs["optimiser"] = program_text(optimiser_step, program.optimiser, fixed.hyper, moving, ids, value)[0]
    if program.score is not None:
        programs["score"] = program_text(_score, program.score, moving, fixed, shared, member_shapes(validation))[0]
    texts = programs | texts | {name: option_text(x) for name, x in options.items() if not isinstance(x, Revive)}
    texts["patience"] = option_text(program.patience)
    if isinstance(how := options["on_diverge"], Revive):
        texts["on_diverge"] = _revive_text(how, fixed.hyper)
    own = state.moving
    texts["weights"] = digest_of((own.params, own.model_state, state.fixed.frozen, state.shared, state.ids))
    texts["optimiser's state"] = digest_of((own.opt_state, own.status, own.stopped_at, state.step, start.selection))
    texts |= {"members' keys": digest_of(state.fixed.key), "batch": shapes_text(batch)}
    texts |= array_texts(state.fixed.hyper, "hyper") | array_texts(validation, "validation")
    texts["versions"] = versions_text()
    return Identity(texts, tuple(programs.values()), value, aux)


def _gradient(loss: Loss, moving: MemberState, fixed: MemberConstants, shared: PyTree, batch: PyTree) -> PyTree:
    rest = (moving.model_state, fixed, shared, batch, fixed.key)
    return jax.value_and_grad(loss, has_aux=True)(moving.params, *rest)


def _score(score: Loss, moving: MemberState, fixed: MemberConstants, shared: PyTree, validation: PyTree) -> PyTree:
    return score(moving.params, moving.model_state, fixed, shared, validation, fixed.key)


def optimiser_step(optimiser: Optimiser, hyper: PyTree, moving: MemberState, member_id: Any, value: Any) -> PyTree:
    """The optimiser's part of a step."""
    first = init_member(optimiser, moving.params, hyper, member_id)
    return first, update_alone(optimiser, moving.params, moving.opt_state, value, hyper)


def _revive_text(how: Revive, hyper: PyTree) -> str:
    """A text for a `Revive`, with its functions by their programs where they can be traced."""
    key = jax.random.key(0)
    make = None if how.make is None else function_text(how.make, how.make, key)
    perturb = None if how.perturb is None or hyper is None else function_text(how.perturb, how.perturb, hyper, key)
    return f"Revive(make={make}, perturb={perturb}, most={option_text(how.most)})"


class Saver:
    """Saves a run at boundaries of its chunks, and restores it.

    **Attributes:**

    - `every`: the number of steps between two checkpoints; about a minute if `None`.
    - `step`: the last saved step, or -1.
    - `failed`: the error of a failed save, after which the run ends.
    - `seconds_before`: the duration of the call before this process.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.path, self.every = Path(os.path.realpath(checkpoint.path)), checkpoint.every
        self.step, self.seconds_before = -1, 0.0
        self.failed: OSError | None = None
        self._saved_at, self._held = time.perf_counter(), ExitStack()

    def __enter__(self) -> "Saver":
        error = None
        try:
            if is_first():
                self._held.enter_context(hold(self.path))
        except OSError as raised:
            error = raised
        raise_on_all(error)
        return self

    def __exit__(self, *_: Any) -> None:
        self._held.close()

    def resume(self, start: Start, identity: Identity) -> Start:
        """The start at the saved step, or `start` if there is no file."""
        self._identity, self._begun, self._continued = identity, start.begun, start.seconds
        self._shared, self._ids = start.state.shared, start.state.ids
        if not broadcast_from_first(self.path.exists()):
            return start
        header = read_header(self.path)
        saved = header.meta.get("fit") if isinstance(header.meta, dict) else None
        if not isinstance(saved, dict):
            raise ValueError(f"`{caller()}` cannot resume from `{self.path}`, which holds no run of `fit`.")
        check_same_call(saved["call"], identity.texts, self.path)
        state, selection = start.state, start.selection
        size = lambda name: header.leaves[f"['{name}']"].shape[0]
        along = lambda x: np.empty((state.num_members, size("history_step"), *x.shape), x.dtype)
        count = size("validation_step")
        scores = None if selection is None or not count else np.empty((state.num_members, count), selection.score.dtype)
        history = History(
            along(identity.value),
            jax.tree.map(along, identity.aux),
            scores,
            np.empty(count, np.int64),
            np.empty(size("history_step"), np.int64),
        )
        like = _tree(Carry(state.moving, selection, state.step), state.fixed, state.shared, state.ids, history)
        tree = load(self.path, like)
        self.step, self.seconds_before = saved["step"], saved["seconds"]
        self._begun, self._continued = saved["begun"], saved["continued"]
        history = History(tree["loss"], tree["aux"], tree["validation"], tree["validation_step"], tree["history_step"])
        epochs, batches, place, digest = saved["cursor"]
        return start._replace(
            state=TrainState(tree["moving"], tree["fixed"], tree["shared"], tree["ids"], tree["step"]),
            selection=tree["selection"],
            record=Record(first_step=self._begun, history=history, windows=start.record.columns.windows),
            revived=start.revived if saved["revived"] is None else [Revival(*each) for each in saved["revived"]],
            cursor=Cursor(epochs, batches, decode(place), digest),
            begun=self._begun,
            seconds=self._continued,
        )

    def due(self, step: int) -> bool:
        """Whether to save after `step`."""
        if self.every is None:
            return broadcast_from_first(time.perf_counter() - self._saved_at) >= _SECONDS_BETWEEN
        return step // self.every > max(self.step, self._begun) // self.every

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
        meta = {
            "call": self._identity.texts,
            "step": record.steps,
            "begun": self._begun,
            "seconds": seconds,
            "continued": self._continued,
            "revived": None if revived is None else [list(each) for each in revived],
            "cursor": list(cursor._replace(state=encode(cursor.state))),
        }
        try:
            save(self.path, _tree(carry, fixed, self._shared, self._ids, record.curves()), meta={"fit": meta})
        except OSError as error:
            self.failed = error
        self.step, self._saved_at = record.steps, time.perf_counter()


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
