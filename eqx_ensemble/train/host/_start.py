import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh

from ..._axes import not_finite_text
from ..._ensemble import Ensemble
from ..._pytree import PyTree
from ..._sharding import Layout, layout_for, replicate, shard_members, warn_of_padding
from ...distributed import to_host
from .._hyper import follow_hyper
from .._revive import Revival, restart
from .._run import Run
from .._state import TrainState, check_state, copy_arrays, first_state
from .._trainable import Trainable
from ..compiled._health import nan_is_data
from ..compiled._loss import Loss
from ..compiled._optimiser import Optimiser
from ..compiled._select import first_scores, match_dtype
from ..compiled._selection import Mode, Selection, no_selection
from ..compiled._windows import Windows
from ..data._check import warn_of_training_data
from ..data._source import Cursor, on_device
from ._check import check_not_given_again, check_same_mode, missing_validation_message
from ._record import Record


class Start(NamedTuple):
    """The start of a run, with the results of earlier runs; `rows` is `None` if one of these used all rows.

    `begun` is the step at which the call that resumes there began, and `seconds` the duration of the runs that this
    call continues.
    """

    state: TrainState
    selection: Selection | None
    record: Record
    revived: list[Revival]
    cursor: Cursor
    rows: np.ndarray | None
    begun: int
    seconds: float


def layout_of(mesh: Mesh | None, begun: Any) -> Layout | None:
    """The layout of a run's members: on the given mesh, or as they are sharded already."""
    state = begun.train_state if isinstance(begun, Run) else begun
    if not isinstance(state, TrainState | Ensemble):
        return None  # rejected by a later check
    layout = layout_for(mesh, state.moving.params if isinstance(state, TrainState) else state.stacked)
    if layout is not None:
        warn_of_padding(state.num_members, layout)
    return layout


@nan_is_data()  # the initial scores are infinite
def start_of(
    begun: Ensemble | TrainState | Run,
    optimiser: Optimiser,
    *,
    state: eqx.nn.State | None,
    hyper: PyTree,
    trainable: Trainable,
    layout: Layout | None,
    has_validation: bool,
    mode: Mode,
    windows: Windows,
    key: Any,
) -> Start:
    """A run's start: from the weights of an ensemble, or from a training state or another run.

    The arrays are copies, because a run donates its own.
    """
    if not isinstance(begun, TrainState | Run):
        options = {"state": state, "hyper": hyper, "trainable": trainable, "layout": layout}
        first = first_state(begun, optimiser, **options, key=key)
        selection = no_selection(first.moving, mode) if has_validation else None
        return Start(first, selection, Record(windows=windows), [], Cursor(), _no_rows(first), int(first.step), 0.0)
    given = {"state": state is not None, "hyper": hyper is not None, "trainable": trainable is not eqx.is_inexact_array}
    check_not_given_again([name for name, there in given.items() if there])
    run, first = (begun, begun.train_state) if isinstance(begun, Run) else (None, begun)
    if run is not None and run.selection is not None and not has_validation:
        raise TypeError(missing_validation_message())
    check_state(first, optimiser)
    first = _shard(copy_arrays(follow_hyper(first, optimiser)), layout)
    selection = run.selection if run is not None and has_validation else None
    if has_validation:
        check_same_mode(mode, None if selection is None else selection.mode)
        fresh = no_selection(first.moving, mode)
        selection = fresh if selection is None else jax.tree.map(lambda x: x.copy(), selection)
    moving, selection = restart(first.moving, selection, first.fixed.tied)
    first = dataclasses.replace(first, moving=moving)
    step = int(first.step)
    record = Record(first_step=step, history=None if run is None else run.history, windows=windows)
    if run is None:
        return Start(first, selection, record, [], Cursor(), _no_rows(first), step, 0.0)
    return Start(first, selection, record, run.revived, Cursor(state=run.data_state), run.rows, step, run.seconds)


def with_validation(
    start: Start, score: Loss | None, validation: PyTree, layout: Layout | None, *, data: Any
) -> tuple[Start, PyTree]:
    """The start, with scores of the dtype that `score` returns, and the validation data on the device."""
    warn_of_training_data(validation, data)
    first = start.state
    validation, _ = on_device(validation, first.num_members, argument="validation", layout=layout)
    assert start.selection is not None
    assert score is not None
    fault = not_finite_text(validation, argument="validation")
    if fault and not np.isfinite(to_host(first_scores(score, first, validation))).any():
        raise ValueError(
            f"`fit` needs validation scores that are finite; {fault}, and no member has a finite score.\n"
            "Drop or impute those rows; or mask the values in the loss or in `score`, by `jnp.where` before "
            "they are used."
        )
    return start._replace(selection=match_dtype(score, start.selection, first, validation)), validation


def _shard(state: TrainState, layout: Layout | None) -> TrainState:
    if layout is None:
        return state
    moving, fixed = shard_members((state.moving, state.fixed), layout)
    shared, ids, step = replicate((state.shared, state.ids, state.step), layout)
    return TrainState(moving, fixed, shared, ids, step)


def _no_rows(state: TrainState) -> np.ndarray:
    return np.zeros((state.num_members, 0), np.int32)
