import contextlib
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import PyTree

from .._progress import members_in_words, progress_line
from ..plan._pilot import Pilot, explained_memory
from ._arrays import Arrays
from ._batches import Batches
from ._finish import finished
from ._interrupt import Interruption
from ._limits import Limits, retired
from ._loop import Loop
from ._place import Length
from ._program import Carry, Inputs, Program
from ._resume import Saver
from ._revive import Revive, Reviver
from ._run import Run
from ._start import Start


class Job(NamedTuple):
    """All that a run is, checked: what to do, from where, on what, how long."""

    program: Program
    start: Start
    source: Arrays | Batches
    length: Length
    limits: Limits
    validation: PyTree
    on_diverge: Literal["freeze", "raise"] | Revive
    lost_before: np.ndarray
    max_seconds: np.ndarray | None
    saver: Saver | None
    key: Any


def carried_out(job: Job, *, progress: bool | None) -> Run:
    """The run."""
    first, plan = job.start.state, job.program.plan
    carry = Carry(retired(first.moving, job.limits, first.step), job.start.selection, first.step)
    inputs = Inputs(first.fixed, first.shared, None, job.validation, job.limits)
    reviver, how = None, job.on_diverge
    if isinstance(how, Revive):
        reviver = Reviver(how, job.program.optimiser, first.shared, first.ids, job.start.revived, key=job.key)
    pilot = Pilot(plan, name="fit")
    words = members_in_words(first.num_members)
    with (
        job.saver or contextlib.nullcontext(),
        Interruption() as interruption,
        progress_line(show=progress, description=words, unit="step") as line,
        explained_memory(pilot, first.num_members, name="fit"),
    ):
        loop = Loop(
            job.program, pilot, interruption, job.start.record, line,
            reviver=reviver, raises=how == "raise", lost_before=int(job.lost_before.sum()),
            max_seconds=job.max_seconds, saver=job.saver, place=job.start.place,
        )  # fmt: skip
        carry = job.source.run(loop, inputs, carry, job.length)
        if job.saver is not None:
            job.saver.wait()
    return finished(job.start, loop, carry, plan, job.source.rows, interrupted=interruption.requested)
