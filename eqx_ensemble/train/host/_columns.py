import jax
import numpy as np

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
