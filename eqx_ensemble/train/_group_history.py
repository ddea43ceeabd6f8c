"""The curves and the tables of several runs, joined over all members."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ._run import Run
from ._summary import table_columns
from .host._record import History


def group_history(runs: Mapping[str, Run[Any]], order: Sequence[int]) -> History:
    """The curves of all members, with NaN where the run of a part has no value."""
    histories, members = {part: run.history for part, run in runs.items()}, np.asarray(order)
    step = np.unique(np.concatenate([history.step for history in histories.values()]))
    loss = np.concatenate([_at_steps(history.loss, history.step, step) for history in histories.values()])
    aux = {part: history.aux for part, history in histories.items() if history.aux is not None}
    at = np.unique(np.concatenate([history.validation_step for history in histories.values()]))
    scores = None
    if any(history.validation is not None for history in histories.values()):
        scores = np.concatenate([_at_steps(_scores_of(own), own.validation_step, at) for own in histories.values()])
        scores = scores[members]
    return History(loss[members], aux or None, scores, at, step)


def group_columns(runs: Mapping[str, Run[Any]], order: Sequence[int]) -> dict[str, np.ndarray]:
    """The tables of all runs as one, with a column `part`."""
    tables = {part: table_columns(run) for part, run in runs.items()}
    for part, table in tables.items():
        table["part"] = np.full(len(table["member"]), part)
    names = list(dict.fromkeys(["member", "part", *(name for table in tables.values() for name in table)]))
    last = [name for name in ("loss", "validation", "best_step", "status", "stopped_at") if name in names]
    names = [name for name in names if name not in last] + last
    return {name: _column(name, list(tables.values()))[np.asarray(order)] for name in names}


def _column(name: str, tables: list[dict[str, np.ndarray]]) -> np.ndarray:
    shape = next(table[name].shape[1:] for table in tables if name in table)
    nothing = lambda table: np.full((len(table["member"]), *shape), np.nan)
    return np.concatenate([table[name] if name in table else nothing(table) for table in tables])


def _scores_of(history: History) -> np.ndarray:
    """Validation scores `(members, validations)`; NaN for a part without any."""
    if history.validation is not None:
        return history.validation
    return np.full((len(history.loss), len(history.validation_step)), np.nan, history.loss.dtype)


def _at_steps(curves: np.ndarray, step: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Curves `(members, step)` in the columns `steps`; if a step occurs twice, its last value that is not NaN."""
    found = np.full((len(curves), len(steps)), np.nan, curves.dtype)
    columns = np.searchsorted(steps, step)
    if len(np.unique(columns)) == len(columns):
        found[:, columns] = curves
        return found
    for column, own in zip(columns, curves.T, strict=True):
        found[:, column] = np.where(np.isnan(own), found[:, column], own)
    return found
