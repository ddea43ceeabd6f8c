from typing import Any

import equinox as eqx
import jax
import numpy as np

from ... import _axes
from ..._ensemble import Ensemble
from ...distributed import to_host
from ...plan import AbstractPlan
from .._run import Run
from .._state import TrainState
from ..compiled._health import place_of_fault
from ..compiled._program import Carry
from ._loop import Loop
from ._start import Start


def finished(start: Start, loop: Loop, carry: Carry, plan: AbstractPlan, rows: Any, *, interrupted: bool) -> Run:
    """What a run returns: all members in their places, each at its best weights if there are any."""
    first = start.state
    carry, fixed = loop.roster.whole(carry), loop.roster.fixed
    last = TrainState(carry.moving, fixed, first.shared, first.ids, carry.step)
    moving, selection = carry.moving, carry.selection
    params, state, best_step, best_score = moving.params, moving.model_state, None, None
    if selection is not None:
        best_step, best_score = to_host((selection.step, selection.score))
        found = best_step >= 0
        params, state = jax.tree.map(
            lambda best, last: _axes.where_members(found, best, last),
            (selection.params, selection.model_state),
            (params, state),
        )
    return Run(
        ensemble=Ensemble(eqx.combine(params, fixed.frozen), first.shared, first.ids),
        state=state,
        history=loop.record.history(),
        status=to_host(moving.status),
        stopped_at=to_host(moving.stopped_at),
        fault=np.array([place_of_fault(fault, moving.params) for fault in to_host(moving.fault).tolist()]),
        revived=start.revived if loop.reviver is None else loop.reviver.revivals,
        best_step=best_step,
        best_score=best_score,
        train_state=last,
        selection=selection,
        rows=_rows_of_all(start.rows, rows),
        data_state=loop.place.state if loop.place.batches > 0 else None,
        plan=plan,
        interrupted=interrupted,
        seconds=loop.seconds,
    )


def _rows_of_all(before: np.ndarray | None, now: np.ndarray | None) -> np.ndarray | None:
    """The rows that members have seen in this run and in those before it; `None` where that is all of them."""
    if before is None or now is None:
        return None
    return now if before.size == 0 or np.array_equal(before, now) else np.concatenate([before, now], axis=1)
