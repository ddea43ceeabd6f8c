from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from ..._axes import SHARED
from ..._brief import brief_doc
from ..._pytree import PyTree
from ..compiled._check import check_same_outputs
from ..compiled._windows import Windows


class Columns:
    """The outputs of consecutive windows of steps: the columns of a history.

    **Attributes:**

    - `windows`: which steps' outputs are recorded.
    - `has_open`: whether the last window has not ended.
    """

    def __init__(self, windows: Windows) -> None:
        self.windows = windows
        self._outputs: list[PyTree] = []  # of windows that have ended, `(windows, members, ...)`, in parts
        self._ends: list[np.ndarray] = []
        self._open: tuple[PyTree, np.ndarray] | None = None

    @property
    def has_open(self) -> bool:
        return self._open is not None

    @property
    def num_parts(self) -> int:
        """The number of parts of windows that have ended."""
        return len(self._outputs)

    @property
    def num_ended(self) -> int:
        """The number of windows that have ended."""
        return sum(map(len, self._ends))

    def add(self, outputs: PyTree, step: int, num_steps: int) -> None:
        """Adds outputs `(windows, members, ...)` of `num_steps` steps after `step`."""
        if self._outputs or self.has_open:
            parts = (self.parts()[0][-1], outputs)
            check_same_outputs(*(jax.tree.map(lambda x: x[0], part) for part in parts))
        if self._open is not None:
            outputs = _continue_window(outputs, self._open[0])
        still_open = bool(self.windows.continues(step + num_steps))
        self.restore(outputs, self.windows.ends(step, num_steps), last_is_open=still_open)

    def restore(self, outputs: PyTree, ends: np.ndarray, *, last_is_open: bool) -> None:
        """Adds outputs of windows with these ends, unchanged."""
        self._open = None
        if last_is_open:
            self._open = (jax.tree.map(lambda x: x[-1:], outputs), ends[-1:])
            outputs, ends = jax.tree.map(lambda x: x[:-1], outputs), ends[:-1]
        if len(ends) or not last_is_open:
            self._outputs.append(outputs)
            self._ends.append(ends)

    def parts(self, since: int = 0, *, with_open: bool = True) -> tuple[list[PyTree], list[np.ndarray]]:
        """The parts from `since` on, at least one, and the ends of their windows."""
        outputs, ends = self._outputs[since:], self._ends[since:]
        if self._open is not None and with_open:
            outputs, ends = [*outputs, self._open[0]], [*ends, self._open[1]]
        if not outputs:
            some = self._outputs[0] if self._open is None else self._open[0]
            outputs, ends = [jax.tree.map(lambda x: x[:0], some)], [np.zeros(0, np.int64)]
        return outputs, ends


def _continue_window(outputs: PyTree, window: PyTree) -> PyTree:
    """Merges outputs `(windows, members, ...)` whose first window continues `window`.

    In that window, members without a finite loss, which stopped earlier or diverged, keep their old outputs.
    """
    finite = np.isfinite(outputs[0][0])

    def merge(new: np.ndarray, old: np.ndarray) -> np.ndarray:
        chosen = finite.reshape(finite.shape + (1,) * (new.ndim - 2))
        return np.concatenate([np.where(chosen, new[:1], old), new[1:]])

    return jax.tree.map(merge, outputs, window)


class History(eqx.Module):
    """The curves of a run, on the host.

    **Attributes:**

    - `loss`: `(members, steps)`, the training loss before each step's update; NaN after a member stopped or diverged.
        A run continued from a training state has only its own steps. With `fit(history=...)` not all steps are
        recorded: a column is each member's latest finite loss since the previous column.
    - `aux`: the loss's auxiliary outputs, each `(members, steps, ...)`, NaN (zero for integers) after a member
        stopped or diverged; `None` without `has_aux`.
    - `validation`: `(members, validations)`; `None` without validation data. A member that stopped within an epoch is
        validated once more, at its last weights, and has NaN afterwards.
    - `validation_step`: `(validations,)`, the number of steps done at each validation.
    - `step`: `(steps,)`, the number of steps done after each recorded one, including earlier runs.

    ```python
    def mse(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)


    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, key=key)
    data = (jnp.ones((64, 3)), jnp.zeros((64, 1)))
    held_out = (jnp.ones((16, 3)), jnp.zeros((16, 1)))
    history = ee.fit(
        ensemble, mse, optax.sgd(0.1), data, epochs=3, validation=held_out, key=key
    ).history
    history.loss.shape, history.validation.shape  # (4, 6), (4, 3)
    ```
    """

    loss: Float[np.ndarray, "members steps"]
    aux: PyTree
    validation: Float[np.ndarray, "members validations"] | None
    validation_step: Int[np.ndarray, " validations"] = eqx.field(metadata=SHARED)
    step: Int[np.ndarray, " steps"] = eqx.field(metadata=SHARED)

    __pdoc__ = brief_doc


class Taken(NamedTuple):
    """How much of a record was taken: steps, parts of its outputs, and validations."""

    steps: int = 0
    parts: int = 0
    validations: int = 0


NOTHING_TAKEN = Taken()


class Record:
    """Collects a run's outputs on the host, piece by piece.

    **Attributes:**

    - `first_step`, `steps`: the step at which the run begins, and the current one.
    - `columns`: the outputs of the steps that are recorded.
    - `scores`, `score_steps`: validation scores `(members,)`, and the steps after which they were taken.
    - `latest_loss`, `latest_score`: `(members,)`, each member's latest finite loss and validation score, NaN if
        there is none; `None` before the first.
    - `validated`: the steps after which all members that trained were scored; of earlier runs only the last.
    """

    def __init__(self, *, first_step: int = 0, history: History | None = None, windows: Windows | None = None) -> None:
        self.columns = Columns(Windows() if windows is None else windows)
        self.scores: list[np.ndarray] = []
        self.score_steps: list[int] = []
        self.latest_loss: np.ndarray | None = None
        self.latest_score: np.ndarray | None = None
        self.validated: list[int] = []
        self.first_step = self.steps = first_step
        if history is not None:
            self._restore(history)

    def _restore(self, history: History) -> None:
        """Restores the records of earlier runs, or of this one before it was resumed."""
        outputs = jax.tree.map(lambda curves: np.moveaxis(curves, 1, 0), (history.loss, history.aux))
        self.steps = max([self.first_step, *history.step[-1:].tolist()])
        # Windows of earlier runs are closed: each continued run starts a new column.
        last_is_open = self.steps > self.first_step and bool(self.columns.windows.continues(self.steps))
        self.columns.restore(outputs, history.step, last_is_open=last_is_open)
        self.latest_loss = last_finite(history.loss)
        if history.validation is not None:
            self.scores = list(history.validation.T)
            self.latest_score = last_finite(history.validation) if self.scores else None
            self.score_steps = history.validation_step.tolist()
            self.validated = self.score_steps[-1:]  # none if all members failed before the first

    def add_steps(self, outputs: PyTree, num_steps: int | None = None) -> None:
        """Adds outputs of the windows of consecutive steps, `(windows, members, ...)`; by default of every step."""
        outputs = jax.tree.map(np.asarray, outputs)
        count = outputs[0].shape[0] if num_steps is None else num_steps
        self.columns.add(outputs, self.steps, count)
        self.steps += count
        self.latest_loss = _update(self.latest_loss, last_finite(outputs[0].T))

    def add_scores(self, scores: Any, *, of_all: bool = True) -> None:
        """Adds validation scores `(members,)` after the steps so far, of all members or only of stopped ones."""
        if of_all and self.is_validated:  # the previous run ended here, at the end of an epoch
            self.scores.pop()
            self.score_steps.pop()
        self.scores.append(np.asarray(scores))
        self.latest_score = _update(self.latest_score, self.scores[-1])
        self.score_steps.append(self.steps)
        if of_all:
            self.validated.append(self.steps)

    @property
    def has_steps(self) -> bool:
        """Whether any step is recorded."""
        return self.latest_loss is not None

    def latest(self, mode: Literal["min", "max"]) -> tuple[np.ndarray, np.ndarray | None]:
        """Each member's latest loss `(members,)` and best validation score `(members,)`, stopped ones too."""
        assert self.latest_loss is not None
        better = np.fmin if mode == "min" else np.fmax
        return self.latest_loss, better.reduce(self.scores) if self.scores else None

    @property
    def is_validated(self) -> bool:
        """Whether the current weights are validated."""
        return self.steps in self.validated[-1:]

    def curves(self, *, since: Taken = NOTHING_TAKEN, with_open: bool = True) -> History:
        """The curves since `since`, `members` first; `with_open` includes a last window that has not ended."""
        outputs, ends = self.columns.parts(since.parts, with_open=with_open)
        loss, aux = jax.tree.map(lambda *parts: np.moveaxis(np.concatenate(parts), 0, 1), *outputs)
        scores = self.scores[since.validations :]
        validation = np.stack(scores, axis=1) if scores else None
        steps = np.array(self.score_steps[since.validations :], np.int64)
        return History(loss, aux, validation, steps, np.concatenate(ends).astype(np.int64))

    def history(self, last_step: int | None = None) -> History:
        """The curves up to the last step of any member; the last chunk may have been longer.

        If no member trains, `last_step` is the step after which they stopped, because a window may also be longer. A
        validation after it is of the weights at which members stopped.
        """
        history = self.curves()
        trained = _trained_columns(history)
        loss, aux = jax.tree.map(lambda curves: curves[:, :trained], (history.loss, history.aux))
        step = history.step[:trained]
        step = step if last_step is None else np.minimum(step, max(last_step, self.first_step + 1))
        if history.validation is None:
            return History(loss, aux, None, history.validation_step, step)
        end = max([self.first_step + 1, *step[-1:].tolist()])
        kept = (history.validation_step <= end) | np.isfinite(history.validation).any(axis=0)
        return History(loss, aux, history.validation[:, kept], np.minimum(history.validation_step[kept], end), step)


def _trained_columns(history: History) -> int:
    """The number of columns up to the last one in which some member has an output, at least one."""
    trained = int(np.flatnonzero((~np.isnan(history.loss)).any(axis=0)).max(initial=-1)) + 1
    while trained < len(history.step) and not all(_is_blank(x[:, trained]) for x in jax.tree.leaves(history.aux)):
        trained += 1  # the loss is NaN where a member diverged, its auxiliary outputs may not be
    return max(trained, 1)


def _is_blank(outputs: np.ndarray) -> bool:
    """Whether outputs are those of members that do not train: NaN, and zero for integers."""
    blank = np.isnan(outputs) if jnp.issubdtype(outputs.dtype, jnp.inexact) else outputs == 0
    return bool(np.all(blank))


def _update(latest: np.ndarray | None, new: np.ndarray) -> np.ndarray:
    """New numbers `(members,)` where they are finite, else the latest."""
    return new if latest is None else np.where(np.isfinite(new), new, latest)


def mean_of_last_epoch(history: History, epoch: int | None) -> np.ndarray:
    """The mean of each member's recorded losses in the last `epoch` steps that it trained; its last one for `None`."""
    finite = np.isfinite(history.loss)
    if epoch is None or not finite.any():
        return last_finite(history.loss)
    last = np.where(finite, history.step, -1).max(axis=1, keepdims=True)
    chosen = finite & (history.step > last - epoch)
    total, count = np.where(chosen, history.loss, 0).sum(axis=1, dtype=np.float64), chosen.sum(axis=1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan).astype(history.loss.dtype)


def last_finite(curves: np.ndarray) -> np.ndarray:
    """The last finite number of each row of `(members, steps)`; NaN where there is none."""
    if not curves.shape[1]:
        return np.full(len(curves), np.nan, curves.dtype)
    finite = np.isfinite(curves)
    last = curves.shape[1] - 1 - np.argmax(finite[:, ::-1], axis=1)
    return np.where(finite.any(axis=1), np.take_along_axis(curves, last[:, None], axis=1)[:, 0], np.nan)
