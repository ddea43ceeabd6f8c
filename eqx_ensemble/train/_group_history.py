"""The curves and the table of several runs, as those of all their members."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ._run import Run
from ._summary import table_columns
from .host._record import History


def group_history(runs: Mapping[str, Run[Any]], order: Sequence[int]) -> History:
    """The curves of all members; NaN fills what the run of a part does not have."""
    histories = {part: run.history for part, run in runs.items()}
    steps = max(history.loss.shape[1] for history in histories.values())
    loss = np.concatenate([_pad(history.loss, steps) for history in histories.values()])
    aux = {part: history.aux for part, history in histories.items() if history.aux is not None}
    at = np.unique(np.concatenate([history.validation_step for history in histories.values()]))
    scores = None
    if any(history.validation is not None for history in histories.values()):
        scores = np.concatenate([_at_steps(history, at) for history in histories.values()])[np.asarray(order)]
    return History(loss[np.asarray(order)], aux or None, scores, at)


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


def _pad(curves: np.ndarray, steps: int) -> np.ndarray:
    return np.pad(curves, ((0, 0), (0, steps - curves.shape[1])), constant_values=np.nan)


def _at_steps(history: History, steps: np.ndarray) -> np.ndarray:
    """Validation scores in the columns of `steps`; the last finite one where a step occurs twice."""
    dtype = history.loss.dtype if history.validation is None else history.validation.dtype
    scores = np.full((len(history.loss), len(steps)), np.nan, dtype)
    if history.validation is not None:
        for step, own in zip(history.validation_step, history.validation.T, strict=True):
            column = np.searchsorted(steps, step)
            scores[:, column] = np.where(np.isfinite(own), own, scores[:, column])
    return scores
