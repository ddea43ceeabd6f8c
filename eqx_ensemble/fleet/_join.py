"""Joins the runs of shards."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import tree
from .._ensemble._concatenate import concatenate
from ..train._run import Run
from ..train._state import TrainState
from ..train.host._record import History


def join_runs(runs: Sequence[Run[Any]], *, interrupted: bool, seconds: float) -> Run[Any]:
    """Joins runs of different members into one, in their order."""
    first, states = runs[0], [run.train_state for run in runs]
    moving, fixed = tree.concatenate([(state.moving, state.fixed) for state in states])
    step = jnp.max(jnp.stack([state.step for state in states]))
    ids = jnp.concatenate([state.ids for state in states])
    every = lambda name: [getattr(run, name) for run in runs]
    of_all = lambda name: np.concatenate(every(name))
    trees = lambda name: None if getattr(first, name) is None else tree.concatenate(every(name))
    known = all(run.rows is not None for run in runs)
    return Run(
        ensemble=concatenate([run.ensemble for run in runs]),
        state=trees("state"),
        history=_join_histories([run.history for run in runs]),
        status=of_all("status"),
        stopped_at=of_all("stopped_at"),
        fault=of_all("fault"),
        revived=sorted((revival for run in runs for revival in run.revived), key=lambda revival: revival.step),
        best_step=None if first.best_step is None else of_all("best_step"),
        best_score=None if first.best_score is None else of_all("best_score"),
        train_state=TrainState(moving, fixed, states[0].shared, ids, step),
        selection=trees("selection"),
        rows=of_all("rows") if known else None,
        data_state=max(runs, key=lambda run: int(run.train_state.step)).data_state,  # others diverged entirely
        plan=first.plan,
        interrupted=interrupted or any(run.interrupted for run in runs),
        seconds=seconds,
        epoch=first.epoch,
    )


def _join_histories(histories: Sequence[History]) -> History:
    """Joins histories; NaN, or zero for integers, fills the columns that shorter runs lack."""
    steps = max(history.loss.shape[1] for history in histories)
    loss, aux = jax.tree.map(
        lambda *curves: np.concatenate([_pad_columns(curve, steps) for curve in curves]),
        *((history.loss, history.aux) for history in histories),
    )
    # Columns end at the same steps in all shards, except in a shard whose members all stopped within a window.
    step = np.max([np.pad(history.step, (0, steps - len(history.step))) for history in histories], axis=0)
    validations = [history.validation for history in histories if history.validation is not None]
    if not validations:
        return History(loss, aux, None, histories[0].validation_step, step)
    longest = max((history.validation_step for history in histories), key=lambda steps: (len(steps), *steps[-1:]))
    scores = [_at_steps(history, longest, validations[0].dtype) for history in histories]
    return History(loss, aux, np.concatenate(scores), longest, step)


def _pad_columns(curves: np.ndarray, steps: int) -> np.ndarray:
    """Pads curves `(members, steps, ...)` to a number of columns, with NaN, or zero for integers."""
    width = [(0, 0), (0, steps - curves.shape[1]), *((0, 0) for _ in curves.shape[2:])]
    return np.pad(curves, width, constant_values=np.nan if jnp.issubdtype(curves.dtype, jnp.inexact) else 0)


def _at_steps(history: History, steps: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Aligns validation scores with the columns of `steps`; NaN for a run that was never validated.

    A run that ended within an epoch may have been validated there; its last score belongs in the column of that epoch.
    """
    scores = np.full((len(history.loss), len(steps)), np.nan, dtype)
    if history.validation is None:  # its members diverged before
        return scores
    column = -1
    for step, own in zip(history.validation_step, history.validation.T, strict=True):
        column = min(max(int(np.searchsorted(steps, step)), column + 1), len(steps) - 1)
        scores[:, column] = own
    return scores
