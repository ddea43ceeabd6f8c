import itertools
import warnings
from collections.abc import Iterable

import jax
import numpy as np
from jaxtyping import PyTree
from tqdm.std import tqdm

from .. import _check
from ._chunk import compiled_batch, compiled_validation
from ._data import on_device
from ._interrupt import Interruption
from ._program import Carry, Inputs, Program
from ._run import Record
from ._state import DIVERGED, OK, STOPPED

_SECONDS_PER_CHUNK = 0.5
_FIRST_STEPS = 32


class Loop:
    """The host's side of a run: what to do with a chunk's results, when to stop, how long the next chunk may be."""

    def __init__(self, program: Program, interruption: Interruption, record: Record, line: tqdm):
        self.program = program
        self.record = record
        self.line = line
        self._interruption = interruption
        self._measured = 0
        self.steps_per_chunk = _FIRST_STEPS

    def over(self, carry: Carry) -> bool:
        """Whether the run ends here: interrupted, or no member trains any more."""
        return self._interruption.requested or not (np.asarray(carry.moving.status) == OK).any()

    def last_validation(self, inputs: Inputs, carry: Carry) -> Carry:
        """Validates where a run ends within an epoch, so that no member's last weights go unjudged."""
        if self.program.score is None or self.record.validated or self.over(carry):
            return carry
        carry, scores = compiled_validation((self.program, inputs), carry)
        self.record.add_scores(scores)
        return carry

    def report(self, steps: int, carry: Carry) -> None:
        """Moves the progress line on by `steps`."""
        losses, scores = self.record.latest
        status = np.asarray(carry.moving.status)
        shown = {"loss": f"{_mean(losses):.4g}"}
        if scores is not None:
            shown["best validation"] = f"{_mean(scores):.4g}"
        for name, code in (("stopped", STOPPED), ("diverged", DIVERGED)):
            if (status == code).any():
                shown[name] = str(int((status == code).sum()))
        self.line.set_postfix(shown, refresh=False)
        self.line.update(steps)

    def pace(self, steps: int, seconds: float) -> None:
        """Sets the next chunk's length from the last one's time; the first one's time is the compiler's."""
        self._measured += 1
        if self._measured > 1:
            wanted = steps * _SECONDS_PER_CHUNK / max(seconds, 1e-6)
            self.steps_per_chunk = int(np.clip(wanted, 1, 4 * self.steps_per_chunk))


def run_batches(
    loop: Loop, inputs: Inputs, carry: Carry, batches: Iterable[PyTree], *, epochs: int | None, steps: int | None
) -> Carry:
    """Runs over an iterable of batches, one compiled step per batch."""
    num_members = inputs.fixed.key.shape[0]
    loop.line.total = steps
    for epoch in itertools.count() if epochs is None else range(epochs):
        before = loop.record.steps
        for batch in batches:
            batch, _ = on_device(batch, num_members, argument="batch", name="fit")
            carry, outputs = compiled_batch((loop.program, inputs, batch), carry)
            loop.record.add_steps(jax.tree.map(lambda x: x[None], outputs))
            loop.report(1, carry)
            if loop.over(carry) or loop.record.steps == steps:
                if epoch == 0 and loop.program.patience is not None:
                    warnings.warn(_check.IDLE_PATIENCE, stacklevel=3)
                return loop.last_validation(inputs, carry)
        _check.some_batches(loop.record.steps - before, epoch, name="fit")
        if loop.program.score is not None:
            carry, scores = compiled_validation((loop.program, inputs), carry)
            loop.record.add_scores(scores)
        if loop.over(carry):
            break
    return carry


def _mean(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else float("nan")
