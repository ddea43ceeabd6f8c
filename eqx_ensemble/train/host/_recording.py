from typing import TYPE_CHECKING, Any

import numpy as np

from .._status import Status
from ..data._slots import Slots
from ..data._source import Outcome
from ._active import ActiveMembers
from ._record import Record

if TYPE_CHECKING:
    from tqdm.std import tqdm


class Recording:
    """Records the outputs of steps and validations, and shows them in a progress line."""

    def __init__(self, record: Record, line: "tqdm") -> None:
        self.record, self._line = record, line

    def start(self, total: int | None, done: int) -> None:
        """Sets the length and the position of the progress line."""
        self._line.total, self._line.n = total, done

    def add(self, outcome: Outcome, slots: Slots) -> None:
        """Records the outputs of the members in `slots`."""
        for num_steps, windows, scores in outcome.outputs:
            self.record.add_steps(slots.expand(windows), num_steps)
            if scores is not None:
                self.add_scores(scores, slots)

    def add_scores(self, scores: Any, slots: Slots, *, of_all: bool = True) -> None:
        """Records validation scores `(slots,)`, of all members or only of stopped ones."""
        self.record.add_scores(slots.expand(np.asarray(scores)[None])[0], of_all=of_all)

    def report(self, steps: int, members: ActiveMembers) -> None:
        """Advances the progress line by `steps`, if it is shown."""
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
