from collections.abc import Callable, Sequence
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

    Those of windows that have ended are in arrays with room for more, so that adding a column does not cost more after
    many.

    **Attributes:**

    - `windows`: which steps' outputs are recorded.
    - `num_ended`: the number of windows that have ended.
    - `has_open`: whether the last window has not ended.
    """

    def __init__(self, windows: Windows) -> None:
        self.windows, self.num_ended = windows, 0
        self._kind: tuple[Any, list[tuple[int, ...]]] | None = None  # the structure and the shapes of a column
        self._ended: list[np.ndarray] = []  # `(windows, members, ...)`, and the windows' ends
        self._open: tuple[PyTree, np.ndarray] | None = None

    @property
    def has_open(self) -> bool:
        return self._open is not None

    def add(self, outputs: PyTree, step: int, num_steps: int) -> None:
        """Adds outputs `(windows, members, ...)` of `num_steps` steps after `step`."""
        if self._open is not None:
            self._check(outputs)
            outputs = _continue_window(outputs, self._open[0])
        still_open = bool(self.windows.continues(step + num_steps))
        self.restore(outputs, self.windows.ends(step, num_steps), last_is_open=still_open)

    def restore(self, outputs: PyTree, ends: np.ndarray, *, last_is_open: bool) -> None:
        """Adds outputs of windows with these ends, unchanged."""
        leaves = self._check(outputs)
        self._open = None
        if last_is_open:
            self._open = (jax.tree.map(lambda x: x[-1:], outputs), ends[-1:])
            leaves, ends = [x[:-1] for x in leaves], ends[:-1]
        new, count = [*leaves, ends.astype(np.int64)], self.num_ended
        held = self._ended or [x[:0].copy() for x in new]
        self._ended = [_append(old, x, count) for old, x in zip(held, new, strict=True)]
        self.num_ended = count + len(ends)

    def _check(self, outputs: PyTree) -> list[np.ndarray]:
        """Raises unless outputs have the structure and the shapes of those before. Returns their arrays."""
        leaves, structure = jax.tree.flatten(outputs)
        kind = structure, [x.shape[1:] for x in leaves]
        if self._kind is not None and kind != self._kind:
            columns = ([jax.ShapeDtypeStruct(shape, float) for shape in shapes] for _, shapes in (self._kind, kind))
            check_same_outputs(*map(jax.tree.unflatten, (self._kind[0], structure), columns))
        self._kind = kind
        return leaves

    def since(self, first: int = 0, *, with_open: bool = True) -> Callable[[], tuple[PyTree, np.ndarray]]:
        """A function that returns the windows recorded by now, from `first` on: their outputs and their ends."""
        assert self._kind is not None
        structure, last, ended, window = self._kind[0], self.num_ended, self._ended, self._open

        def read() -> tuple[PyTree, np.ndarray]:
            *leaves, ends = [x[first:last].copy() for x in ended]
            outputs = jax.tree.unflatten(structure, leaves)
            if window is None or not with_open:
                return outputs, ends
            return jax.tree.map(lambda *parts: np.concatenate(parts), (outputs, ends), window)

        return read


def _append(held: np.ndarray, new: np.ndarray, count: int) -> np.ndarray:
    """The array whose first `count` rows are held, and the next are new; it has room for as many more."""
    end = count + len(new)
    if end > len(held) or held.dtype != new.dtype:
        old, held = held[:count], np.empty((2 * end, *new.shape[1:]), np.result_type(held, new))
        held[:count] = old
    held[count:end] = new
    return held


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
        With `fit(history=...)`, each member's latest finite loss since the previous column.
    - `aux`: the loss's auxiliary outputs, each `(members, steps, ...)`, NaN (zero for integers) after a member stopped
        or diverged; `None` without `has_aux`.
    - `validation`: `(members, validations)`; `None` without validation data.
    - `validation_step`: `(validations,)`, the number of steps done at each validation.
    - `step`: `(steps,)`, the number of steps done after each recorded one, including earlier runs.
    """

    loss: Float[np.ndarray, "members steps"]
    aux: PyTree
    validation: Float[np.ndarray, "members validations"] | None
    validation_step: Int[np.ndarray, " validations"] = eqx.field(metadata=SHARED)
    step: Int[np.ndarray, " steps"] = eqx.field(metadata=SHARED)

    __pdoc__ = brief_doc


class Taken(NamedTuple):
    """How much of a record was taken: steps, windows that have ended, and validations."""

    steps: int = 0
    windows: int = 0
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
        count = outputs[0].shape[0] if num_steps is None else num_steps
        self.columns.add(outputs, self.steps, count)
        self.steps += count
        last = outputs[0][0] if len(outputs[0]) == 1 else last_finite(outputs[0].T)
        self.latest_loss = _update(self.latest_loss, last)

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

    def curves(self) -> History:
        """All curves, `members` first."""
        return curves_since(self)()

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


def curves_since(record: Record, taken: Taken = NOTHING_TAKEN, *, with_open: bool = True) -> Callable[[], History]:
    """A function that returns the curves recorded by now, without those taken.

    `with_open` includes a last window that has not ended.
    """
    read = record.columns.since(taken.windows, with_open=with_open)
    scores, score_steps = record.scores[taken.validations :], record.score_steps[taken.validations :]

    def curves() -> History:
        outputs, ends = read()
        loss, aux = jax.tree.map(lambda x: x.swapaxes(0, 1), outputs)
        validation = np.stack(scores, axis=1) if scores else None
        return History(loss, aux, validation, np.array(score_steps, np.int64), ends)

    return curves


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
    return np.where(np.isfinite(new), new, np.nan if latest is None else latest)


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


def align_histories(histories: Sequence[History]) -> list[History]:
    """The histories of several ensembles with the same columns.

    NaN, or zero for integers, fills those that shorter ones lack.
    """
    steps = max(history.loss.shape[1] for history in histories)
    # Columns end at the same steps in all shards, except in one whose members all stopped within a window of `history`.
    step = np.max([np.pad(history.step, (0, steps - len(history.step))) for history in histories], axis=0)
    longest = max((history.validation_step for history in histories), key=lambda steps: (len(steps), *steps[-1:]))
    dtype = next((history.validation.dtype for history in histories if history.validation is not None), None)

    def align(history: History) -> History:
        loss, aux = jax.tree.map(lambda curve: _pad(curve, steps), (history.loss, history.aux))
        return History(loss, aux, None if dtype is None else _at_steps(history, longest, dtype), longest, step)

    return list(map(align, histories))


def _pad(curves: np.ndarray, steps: int) -> np.ndarray:
    """Curves `(members, steps, ...)` with more columns."""
    width = [(0, 0), (0, steps - curves.shape[1]), *((0, 0) for _ in curves.shape[2:])]
    return np.pad(curves, width, constant_values=np.nan if jnp.issubdtype(curves.dtype, jnp.inexact) else 0)


def _at_steps(history: History, steps: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Validation scores in the columns of `steps`; NaN for a run that was never validated.

    A run that ended within an epoch may have been validated there: its last score belongs in the column of that epoch.
    """
    scores = np.full((len(history.loss), len(steps)), np.nan, dtype)
    if history.validation is None:  # its members diverged before
        return scores
    column = -1
    for step, own in zip(history.validation_step, history.validation.T, strict=True):
        column = min(max(int(np.searchsorted(steps, step)), column + 1), len(steps) - 1)
        scores[:, column] = own
    return scores
