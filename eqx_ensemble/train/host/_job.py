import contextlib
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from ... import _check
from ..._progress import members_in_words, progress_line
from ...plan._pilot import Pilot, explained_memory
from .._run import Run
from ..compiled._health import nan_is_data
from ..compiled._limits import Limits, retired
from ..compiled._program import Carry, Inputs, Program
from ..data._arrays import Arrays
from ..data._batches import Batches
from ..data._place import Length
from ..resume._resume import Saver
from ._finish import finished
from ._interrupt import Interruption
from ._loop import Loop
from ._revive import Revive, Reviver
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
        nan_is_data(),
    ):
        loop = Loop(
            job.program, pilot, interruption, job.start.record, line,
            reviver=reviver, raises=how == "raise", lost_before=int(job.lost_before.sum()),
            max_seconds=job.max_seconds, saver=job.saver, place=job.start.place,
        )  # fmt: skip
        with _with_the_run_so_far(job, loop), explained_memory(pilot, first.num_members, name="fit"):
            carry = job.source.run(loop, inputs, carry, job.length)
            if job.saver is not None:
                job.saver.wait()
    return finished(job.start, loop, carry, plan, job.source.rows, interrupted=interruption.requested)


@contextlib.contextmanager
def _with_the_run_so_far(job: Job, loop: Loop) -> Iterator[None]:
    """Lets an error that ends a run on the way carry the run as far as it came, and saves it where that is asked for.

    Of several processes one may be alone with its error, and would wait for the others in vain.
    """
    first_step = loop.record.steps
    try:
        yield
    except Exception as error:
        carry, begun = loop.carry, loop.record.steps > first_step
        if carry is not None and begun and jax.process_count() == 1 and not _is_gone(carry):
            try:
                loop.save(carry, if_due=False)
                if job.saver is not None:
                    job.saver.wait()
                run = finished(job.start, loop, carry, job.program.plan, job.source.rows, interrupted=False)
                error.run = run  # pyright: ignore[reportAttributeAccessIssue] (any exception may have more attributes)
                failed = None if job.saver is None else job.saver.failed
                error.add_note(_check.ended_by_an_error(loop.record.steps, saved=job.saver is not None, failed=failed))
            except Exception as second:
                error.add_note(_check.run_is_lost(second))
        raise


def _is_gone(carry: Carry) -> bool:
    """Whether a program that failed had been given the only copy."""
    return any(x.is_deleted() for x in jax.tree.leaves(carry) if isinstance(x, jax.Array))
