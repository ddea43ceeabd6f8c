import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ...distributed import broadcast_from_first, to_host
from ...plan import Vmap
from ...plan._pilot import Pilot
from .._status import Status
from ..compiled._chunk import compiled_validation
from ..compiled._limits import stopped
from ..compiled._program import Carry, Inputs, Program, on_one_device, step_under
from ..compiled._select import END, LEFT
from ..data._place import Place
from ..data._rows import Piece
from ..resume._resume import Saver
from ..resume._texts import digest_of
from ._interrupt import Interruption
from ._record import Record
from ._revive import Reviver
from ._roster import Roster

if TYPE_CHECKING:
    from tqdm.std import tqdm

_SECONDS_PER_CHUNK = 1.0
_SECONDS_PER_TRIAL = 0.1
_FIRST_STEPS = 32


class Loop:
    """The host's side of a run: what to do with a chunk's results, when to stop, how long the next chunk may be.

    **Attributes:**

    - `carry`: what the record tells of; `None` before the run has begun.
    - `may_raise`: whether a step calls Python, and so may raise while it runs.
    """

    def __init__(
        self,
        program: Program,
        pilot: Pilot,
        interruption: Interruption,
        record: Record,
        line: "tqdm",
        *,
        reviver: Reviver | None,
        raises: bool,
        lost_before: int,
        max_seconds: np.ndarray | None,
        saver: Saver | None,
        place: Place,
    ):
        self._program = program
        self.pilot = pilot
        self.record = record
        self.line = line
        self._interruption = interruption
        self.reviver = reviver
        self._raises = raises
        self._lost_before = lost_before
        self._max_seconds = max_seconds
        self.place = place
        self.batch: PyTree = None
        self._saver = saver
        self._start = time.perf_counter() - (0.0 if saver is None else saver.seconds_before)
        self._compiled_in: float | None = None
        self._fresh = True
        self._seconds_per_step = 0.0
        self.steps_per_chunk = _FIRST_STEPS
        self.carry: Carry | None = None
        self.may_raise = False

    def begin(self, inputs: Inputs, carry: Carry) -> tuple[Inputs, Carry]:
        """Notes who is there at the beginning, and puts them where they are computed."""
        self.roster = Roster(carry, inputs, layout=self._program.layout)
        inputs, self.carry = self.roster.first(inputs, carry)
        return inputs, self.carry

    @property
    def program(self) -> Program:
        """The program under its present plan."""
        if self._program.plan is not self.pilot.plan:
            self._program = dataclasses.replace(self._program, plan=self.pilot.plan)
        return self._program

    def call(self, compiled: Callable[..., tuple[Carry, PyTree]], *read: PyTree, carry: Carry) -> tuple[Carry, PyTree]:
        """`compiled((program, *read), carry)`."""
        if self._saver is not None:
            self._saver.claim()
        return self.pilot.call(lambda plan, carry: compiled((self.program, *read), carry), carry)

    def look(self, inputs: Inputs, carry: Carry, rows: Any, *, steps_inside: bool, scan: bool | None = None) -> None:
        """Looks at a step on `rows`, if the plan is still to be chosen."""
        program = on_one_device(dataclasses.replace(self._program, plan=Vmap()))
        layout, count = self._program.layout, carry.moving.status.shape[0]
        count = count if layout is None else layout.per_device(count)
        options = {"num_members": count, "unit": "step", "steps_inside": steps_inside, "scan": scan}
        self.pilot.look(step_under, program, inputs, carry, rows, **options)

    def steps_in_a_row(self) -> int:
        """How many steps to run before the next look around: about a second's, or less if a checkpoint is due."""
        if self.save_every is None:
            return self.steps_per_chunk
        return min(self.steps_per_chunk, self.save_every - self.record.steps % self.save_every)

    @property
    def save_every(self) -> int | None:
        """The number of steps between two checkpoints, if that is given."""
        return None if self._saver is None else self._saver.every

    def save(self, carry: Carry, *, if_due: bool) -> None:
        """Saves the run as it stands, if that is asked for and not done yet."""
        if self._saver is None or self._saver.step == self.record.steps:
            return
        if not if_due or self._saver.due(self.record.steps):
            place = self.place
            if place.batches > 0 and place.state is None:
                place = place._replace(digest=digest_of(self.batch))
            self._saver.save(
                self.roster.whole(carry),
                self.roster.fixed,
                self.record,
                revived=None if self.reviver is None else self.reviver.revivals,
                place=place,
                seconds=self.seconds,
            )

    @property
    def seconds(self) -> float:
        """Since the run began, what it took before it was resumed included."""
        return time.perf_counter() - self._start

    def over(self, carry: Carry) -> bool:
        """Whether the run ends here: interrupted, no member trains any more, or one has failed that must not."""
        status = to_host(carry.moving.status)
        if self._saver is not None and self._saver.failed is not None:
            return True
        failed = self._raises and (self.roster.status(carry) == Status.DIVERGED).sum() > self._lost_before
        # There is no run before its first step.
        interrupted = broadcast_from_first(self._interruption.requested) and self.record.begun
        return bool(interrupted or failed or not (status == Status.OK).any())

    def last_validation(self, inputs: Inputs, carry: Carry) -> Carry:
        """Validates where a run ends within an epoch, so that no member's last weights go unjudged."""
        if self.program.score is None or self.record.validated:
            return carry
        if not self.over(carry):
            return self.validate(inputs, carry, END)
        return self._validate_those_who_left(inputs, carry)

    def validate(self, inputs: Inputs, carry: Carry, occasion: int) -> Carry:
        """Scores members outside of a chunk."""
        carry, scores = compiled_validation((self.program, inputs, jnp.int32(occasion)), carry)
        self.record.add_scores(self.roster.spread(to_host(scores)[None])[0], of_all=occasion != LEFT)
        self.carry = carry
        return carry

    def _validate_those_who_left(self, inputs: Inputs, carry: Carry) -> Carry:
        """Scores members that stopped within an epoch, if there are any whose last weights no validation has seen."""
        if self.program.score is None or carry.selection is None:
            return carry
        status, left, scored = to_host((carry.moving.status, carry.moving.stopped_at, carry.selection.scored))
        unseen = (status == Status.STOPPED) & (left != scored)
        return self.validate(inputs, carry, LEFT) if unseen.any() else carry

    def can_halve(self, batch: list[Piece]) -> bool:
        """Whether a chunk that raised can be run again in halves, so that the run ends just before what raises.

        The next chunks are shorter then.
        """
        steps = sum(piece.num_steps for piece in batch)
        if not self.may_raise or steps == 1 or jax.process_count() > 1:
            return False
        self.steps_per_chunk = steps // 2
        return True

    def add_steps(self, outputs: PyTree) -> None:
        """Records outputs of consecutive steps, each `(steps, members, ...)` of the members present."""
        self.record.add_steps(self.roster.spread(to_host(outputs)))

    def add_scores(self, scores: Any) -> None:
        """Records validation scores `(members,)` of the members present."""
        self.record.add_scores(self.roster.spread(to_host(scores)[None])[0])

    def report(self, steps: int, carry: Carry) -> None:
        """Moves the progress line on by `steps`."""
        losses, scores = self.record.latest("min" if carry.selection is None else carry.selection.mode)
        status = self.roster.status(carry)
        shown = {"loss": f"{_mean(losses):.4g}"}
        if scores is not None:
            shown["best validation"] = f"{_mean(scores):.4g}"
        for name, code in (("stopped", Status.STOPPED), ("diverged", Status.DIVERGED)):
            if (status == code).any():
                shown[name] = str(int((status == code).sum()))
        self.line.set_postfix(shown, refresh=False)
        self.line.update(steps)

    def pace(self, steps: int, seconds: float, steps_left: int | None) -> None:
        """Sets the next chunk's length from the last one's time; a new program's first time is the compiler's."""
        first, self._fresh, seconds = self._fresh, False, broadcast_from_first(seconds)
        if first:
            self._compiled_in = seconds if self._compiled_in is None else self._compiled_in
        else:
            self._seconds_per_step = seconds / steps
            self.roster.measured(self._seconds_per_step)
        left = None if steps_left is None else steps_left * self._seconds_per_step
        self._fresh = self.pilot.note(steps, seconds, seconds_left=left)
        if not first:
            wanted = _SECONDS_PER_TRIAL if self.pilot.watching else _SECONDS_PER_CHUNK
            wanted /= max(self._seconds_per_step, 1e-6)
            self.steps_per_chunk = int(np.clip(wanted, 1, 4 * self.steps_per_chunk))

    def care_for(self, inputs: Inputs, carry: Carry) -> tuple[Inputs, Carry]:
        """Stops members whose time is over, and brings back those that failed, as far as that was asked for."""
        if self._max_seconds is not None:
            late = broadcast_from_first(time.perf_counter() - self._start) >= self._max_seconds[self.roster.places]
            if late.any():
                carry = dataclasses.replace(carry, moving=stopped(carry.moving, late, carry.step))
        if self.reviver is not None and (to_host(carry.moving.status) == Status.DIVERGED).any():
            inputs, carry = self.reviver.bring_back(self.roster, inputs, carry)
        self.carry = carry
        return inputs, carry

    def without_those_who_left(self, inputs: Inputs, carry: Carry, steps_left: int | None) -> tuple[Inputs, Carry]:
        """The arrays without members that no longer train, when that pays.

        A run that stops members is taken to last as long again as it has lasted, for want of better knowledge.
        """
        if self.pilot.watching:
            return inputs, carry
        width = self.roster.width_for(carry)
        steps = self.record.steps if steps_left is None else min(steps_left, self.record.steps)
        seconds_left = steps * self._seconds_per_step
        if not self.roster.pays(width, seconds_left=seconds_left, seconds_to_compile=self._compiled_in or 0.0):
            return inputs, carry
        self._fresh = True
        self.pilot.settle()
        carry = self._validate_those_who_left(inputs, carry)
        self.carry, inputs = self.roster.shrink(carry, width)
        return inputs, self.carry


def _mean(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else float("nan")
