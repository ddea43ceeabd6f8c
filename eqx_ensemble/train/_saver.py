"""The file in which `fit` saves a run: what identifies the call, the state of all members, and their history."""

import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .._check import check_path, check_positive_int
from .._load import load
from .._save import hold, read_header, save
from ..distributed import broadcast_from_first, is_first, raise_on_all
from ._history import History
from ._loop import Loop, Position
from ._options import Checkpoint
from ._program import array_text, array_texts, check_same_call, digest_of, option_text, versions_text

_SECONDS_BETWEEN = 60.0


def call_texts(
    digests: dict[str, str], start: Position, inputs: dict[str, Any], options: dict[str, Any]
) -> dict[str, str]:
    """What identifies a call of `fit`, as short texts by name."""
    state, rows = start.state, getattr(inputs["rows"], "value", None)
    texts = digests | {name: option_text(getattr(x, "value", x)) for name, x in options.items()}
    texts |= {f"stop.{name}": option_text(x.value) for name, x in inputs["limits"].items()}
    texts["weights"] = digest_of((state.ensemble, state.model_state))
    texts["optimiser's state"] = digest_of((state.opt_state, state.status, state.step, state.best, state.together))
    texts["key"] = array_text(state.keys)
    texts |= array_texts(state.hyper, "hyper") | array_texts(inputs["data"], "data")
    texts |= array_texts(inputs["validation"], "validation") | array_texts(rows, "rows")
    return texts | {"versions": versions_text()}


class Saver:
    """Saves a run at ends of epochs, and restores it. It holds the file's lock."""

    def __init__(self, checkpoint: Any, texts: dict[str, str]) -> None:
        path, self.every = checkpoint if isinstance(checkpoint, Checkpoint) else (checkpoint, None)
        check_path(path, "checkpoint")
        self.path = Path(os.path.realpath(path))
        if self.every is not None:
            check_positive_int(self.every, "every")
        self.texts, self._held = texts, ExitStack()
        self._saved_at, self._saved_steps = time.perf_counter(), 0

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

    def resume(self, start: Position, end: int, epochs: int | None) -> Position:
        """The saved position, or `start` if there is no file; raises if the call is shorter than what is done."""
        if not broadcast_from_first(self.path.exists()):
            return start
        header = read_header(self.path)
        saved = header.meta.get("fit") if isinstance(header.meta, dict) else None
        if not isinstance(saved, dict):
            raise ValueError(f"`fit` cannot resume from `{self.path}`, which holds no run of `fit`.")
        check_same_call(saved["call"], self.texts, self.path)
        done, epoch = saved["done"], saved["epoch"]
        if done > end or (epochs is not None and epoch > epochs):
            raise ValueError(f"`fit` has done {done} steps in `{self.path}`, which is more than this call asks for.")
        shape = lambda name: header.leaves[name].shape
        self._saved_steps, like = done, start.history
        steps, scores = shape("['history'].step"), shape("['history'].validation_step")
        along = lambda x, count: np.empty((x.shape[0], *count, *x.shape[2:]), x.dtype)
        history = History(
            along(like.loss, steps),
            jax.tree.map(lambda x: along(x, steps), like.aux),
            None if like.validation is None else along(like.validation, scores),
            np.empty(steps, np.int64),
            np.empty(scores, np.int64),
        )
        tree = load(self.path, {"state": start.state, "history": history})
        on_host = jax.tree.map(np.asarray, tree["history"])
        return Position(tree["state"], on_host, done, epoch, saved["seconds"])

    def is_due_at(self, epoch: int) -> bool:
        """Whether a run is saved at the end of an epoch, if that is known before."""
        return self.every is not None and epoch % self.every == 0

    def offer(self, loop: Loop, *, ends: bool) -> None:
        """Saves the run if it is time."""
        if self.every is not None:
            due = ends and loop.epoch % self.every == 0
        else:
            due = broadcast_from_first(time.perf_counter() - self._saved_at >= _SECONDS_BETWEEN)
        if due:
            self.save(loop)

    def save(self, loop: Loop) -> None:
        """Saves the run."""
        meta = {"call": self.texts, "done": loop.done, "epoch": loop.epoch, "seconds": loop.seconds_so_far()}
        meta["trains"] = loop.crew.trains
        save(self.path, {"state": loop.crew.state(), "history": loop.curves()}, meta={"fit": meta})
        self._saved_at, self._saved_steps = time.perf_counter(), loop.done

    def finish(self, loop: Loop) -> None:
        """Saves the run at its end, unless the file holds it."""
        if loop.done > self._saved_steps:
            self.save(loop)
