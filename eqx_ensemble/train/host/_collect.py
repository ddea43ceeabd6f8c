import equinox as eqx
import jax
import numpy as np

from ... import _axes
from ..._ensemble import Ensemble
from ...distributed import to_host
from ...plan import AbstractPlan
from .._revive import Revival
from .._run import Run
from .._state import TrainState
from ..compiled._health import fault_path
from ..data._source import AbstractSource
from ._loop import Host
from ._start import Start


def collect_run(
    start: Start, host: Host, source: AbstractSource, plan: AbstractPlan, revivals: list[Revival], *, interrupted: bool
) -> Run:
    """The run: all members in their order, each at its best weights if there are any."""
    first, cursor = start.state, source.cursor
    carry, fixed = host.members.all(), host.members.fixed
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
        history=host.recording.record.history(),
        status=to_host(moving.status),
        stopped_at=to_host(moving.stopped_at),
        fault=np.array([fault_path(fault, moving.params) for fault in to_host(moving.fault).tolist()]),
        revived=revivals,
        best_step=best_step,
        best_score=best_score,
        train_state=last,
        selection=selection,
        rows=_rows_of_all(start.rows, source.rows),
        data_state=cursor.state if cursor.batches > 0 else None,
        plan=plan,
        interrupted=interrupted,
        seconds=host.saving.seconds,
    )


def _rows_of_all(before: np.ndarray | None, now: np.ndarray | None) -> np.ndarray | None:
    """The rows that members have seen in this run and in those before it; `None` where that is all of them."""
    if before is None or now is None:
        return None
    return now if before.size == 0 or np.array_equal(before, now) else np.concatenate([before, now], axis=1)
