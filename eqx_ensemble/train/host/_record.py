from typing import TYPE_CHECKING, Any, Literal

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float, Int

from ..._pytree import PyTree
from .._status import Status
from ..compiled._check import check_same_outputs
from ..data._slots import Slots
from ..data._source import Outcome
from ._active import ActiveMembers

if TYPE_CHECKING:
    from tqdm.std import tqdm


class History(eqx.Module):
    """The curves of a run, on the host.

    **Attributes:**

    - `loss`: `(members, steps)`, the training loss before each step's update; NaN after a member stopped or diverged.
        A run continued from a training state has its own steps only.
    - `aux`: the loss's auxiliary outputs, each `(members, steps, ...)`, NaN (zero for integers) after a member
        stopped or diverged; `None` without `has_aux`.
    - `validation`: `(members, validations)`; `None` without validation data. A member that stopped within an epoch is
        validated once more, at its last weights; then it has NaN.
    - `validation_step`: `(validations,)`, the number of steps done at each validation.

    ```python
    def mse(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)


    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, key=key)
    data = (jnp.ones((64, 3)), jnp.zeros((64, 1)))
    history = ee.fit(
        ensemble, mse, optax.sgd(0.1), data, epochs=3, validation=data, key=key
    ).history
    history.loss.shape, history.validation.shape  # (4, 6), (4, 3)
    ```
    """

    loss: Float[np.ndarray, "members steps"]
    aux: PyTree
    validation: Float[np.ndarray, "members validations"] | None
    validation_step: Int[np.ndarray, " validations"]


class Record:
    """Collects a run's outputs on the host, piece by piece.

    **Attributes:**

    - `first_step`, `steps`: the step at which the outputs begin, and the present one.
    - `outputs`: those of consecutive steps, `(steps, members, ...)`, in parts.
    - `scores`, `score_steps`: validation scores `(members,)`, and the steps after which they were taken.
    - `latest_loss`, `latest_score`: `(members,)`, each member's latest finite loss and validation score, NaN where
        there is none; `None` before the first.
    """

    def __init__(self, *, first_step: int = 0, history: History | None = None) -> None:
        self.outputs: list[Any] = []
        self.scores: list[np.ndarray] = []
        self.score_steps: list[int] = []
        self.latest_loss: np.ndarray | None = None
        self.latest_score: np.ndarray | None = None
        self._validated_at = -1
        self.first_step = self.steps = first_step
        if history is not None:
            self.add_steps(jax.tree.map(lambda curves: np.moveaxis(curves, 1, 0), (history.loss, history.aux)))
            if history.validation is not None:
                self.scores = list(history.validation.T)
                self.latest_score = last_finite(history.validation) if self.scores else None
                self.score_steps = history.validation_step.tolist()
                self._validated_at = max(self.score_steps, default=-1)  # there is none where all failed before it

    def add_steps(self, outputs: PyTree) -> None:
        """Outputs of consecutive steps, each `(steps, members, ...)`."""
        outputs = jax.tree.map(np.asarray, outputs)
        if self.outputs:
            check_same_outputs(*(jax.tree.map(lambda x: x[0], part) for part in (self.outputs[0], outputs)))
        self.outputs.append(outputs)
        self.steps += outputs[0].shape[0]
        self.latest_loss = _update(self.latest_loss, last_finite(outputs[0].T))

    def add_scores(self, scores: Any, *, of_all: bool = True) -> None:
        """The members' validation scores `(members,)` after the steps so far; or of those only that stopped before."""
        if of_all and self.is_validated:  # where the run before this one ended, and so did an epoch
            self.scores.pop()
            self.score_steps.pop()
        self.scores.append(np.asarray(scores))
        self.latest_score = _update(self.latest_score, self.scores[-1])
        self.score_steps.append(self.steps)
        self._validated_at = self.steps if of_all else self._validated_at

    @property
    def has_steps(self) -> bool:
        """Whether any step is recorded."""
        return bool(self.outputs)

    def latest(self, mode: Literal["min", "max"]) -> tuple[np.ndarray, np.ndarray | None]:
        """Each member's latest loss `(members,)` and best validation score `(members,)`, stopped ones too."""
        assert self.latest_loss is not None
        better = np.fmin if mode == "min" else np.fmax
        return self.latest_loss, better.reduce(self.scores) if self.scores else None

    @property
    def is_validated(self) -> bool:
        """Whether the present weights have their score."""
        return self._validated_at == self.steps

    def curves(self) -> History:
        """All that was added, `members` first."""
        return _curves(self.outputs, self.scores, self.score_steps)

    def history(self) -> History:
        """The curves up to the last step of any member: its chunk may have been longer.

        A validation after that is of the weights at which members stopped.
        """
        history = self.curves()
        trained = max(int(np.flatnonzero((~np.isnan(history.loss)).any(axis=0)).max(initial=-1)) + 1, 1)
        loss, aux = jax.tree.map(lambda curves: curves[:, :trained], (history.loss, history.aux))
        if history.validation is None:
            return History(loss, aux, None, history.validation_step)
        end = self.first_step + trained
        kept = (history.validation_step <= end) | np.isfinite(history.validation).any(axis=0)
        return History(loss, aux, history.validation[:, kept], np.minimum(history.validation_step[kept], end))


class NewRecords:
    """What is recorded since it was last taken, after `steps` steps."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self.steps, self._parts, self._validations = self._position

    @property
    def _position(self) -> tuple[int, int, int]:
        return self._record.steps, len(self._record.outputs), len(self._record.scores)

    @property
    def any(self) -> bool:
        """Whether there are new steps or validations."""
        return self._position != (self.steps, self._parts, self._validations)

    def take(self, *, ended: bool) -> tuple[History, int]:
        """The new curves, and the last step; trimmed as those of the run if it has `ended`."""
        record, steps, parts, validations = self._record, self.steps, self._parts, self._validations
        self.steps, self._parts, self._validations = self._position
        if ended:
            history = record.history()
            begun = steps - record.first_step
            loss, aux = jax.tree.map(lambda curves: curves[:, begun:], (history.loss, history.aux))
            scores = None if history.validation is None else history.validation[:, validations:]
            new = History(loss, aux, scores, history.validation_step[validations:])
            return new, record.first_step + history.loss.shape[1]
        outputs = record.outputs[parts:] or [jax.tree.map(lambda x: x[:0], record.outputs[0])]
        return _curves(outputs, record.scores[validations:], record.score_steps[validations:]), record.steps


def _curves(outputs: list[PyTree], scores: list[np.ndarray], score_steps: list[int]) -> History:
    loss, aux = jax.tree.map(lambda *parts: np.moveaxis(np.concatenate(parts), 0, 1), *outputs)
    validation = np.stack(scores, axis=1) if scores else None
    return History(loss, aux, validation, np.array(score_steps, np.int64))


def _update(latest: np.ndarray | None, new: np.ndarray) -> np.ndarray:
    """The finite ones of new numbers `(members,)`, and else the latest."""
    return new if latest is None else np.where(np.isfinite(new), new, latest)


def last_finite(curves: np.ndarray) -> np.ndarray:
    """The last finite number of each row of `(members, steps)`; NaN where there is none."""
    if not curves.shape[1]:
        return np.full(len(curves), np.nan, curves.dtype)
    finite = np.isfinite(curves)
    last = curves.shape[1] - 1 - np.argmax(finite[:, ::-1], axis=1)
    return np.where(finite.any(axis=1), np.take_along_axis(curves, last[:, None], axis=1)[:, 0], np.nan)


class Recording:
    """Records what steps and validations report, and shows it in a progress line."""

    def __init__(self, record: Record, line: "tqdm") -> None:
        self.record, self._line = record, line

    def start(self, total: int | None, done: int) -> None:
        """Sets the length of the progress line, and what is done of it."""
        self._line.total, self._line.n = total, done

    def add(self, outcome: Outcome, slots: Slots) -> None:
        """Records the outputs of the members in `slots`."""
        for steps, scores in outcome.outputs:
            if steps is not None:
                self.record.add_steps(slots.expand(steps))
            if scores is not None:
                self.add_scores(scores, slots)

    def add_scores(self, scores: Any, slots: Slots, *, of_all: bool = True) -> None:
        """Records validation scores `(slots,)`; or those only of members that stopped before."""
        self.record.add_scores(slots.expand(np.asarray(scores)[None])[0], of_all=of_all)

    def report(self, steps: int, members: ActiveMembers) -> None:
        """Moves the progress line on by `steps`, if it is shown."""
        if self._line.disable:
            return
        selection, status = members.carry.selection, members.status
        losses, scores = self.record.latest("min" if selection is None else selection.mode)
        shown = {"loss": f"{_mean(losses):.4g}"}
        if scores is not None:
            shown["best validation"] = f"{_mean(scores):.4g}"
        for name, code in (("stopped", Status.STOPPED), ("diverged", Status.DIVERGED)):
            if (status == code).any():
                shown[name] = str(int((status == code).sum()))
        self._line.set_postfix(shown, refresh=False)
        self._line.update(steps)


def _mean(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else float("nan")
