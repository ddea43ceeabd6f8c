"""The text summary and the table of a run."""

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from .._check import is_traced, missing_extra_message
from .._progress import members_in_words
from ..distributed import to_host
from ._check_member import hyper_column_text
from ._rank import rank_members
from ._status import Status, status_names
from .host._record import mean_of_last_epoch

if TYPE_CHECKING:
    from ._run import Run

_MOST_IDS = 8  # in one line


def summary(run: "Run[Any]") -> str:
    """The members, statuses, best score, time and plan; `Run(...)` inside a compiled program."""
    if any(map(is_traced, jax.tree.leaves(run))):
        return "Run(...)"
    steps = int(run.train_state.step)
    lines = [f"Run of {members_in_words(len(run.status))}, {steps} {'step' if steps == 1 else 'steps'}"]
    lines[0] += ", interrupted" if run.interrupted else ""
    ids = np.asarray(run.ensemble.ids)
    lines.append(f"  status   {_statuses(run.status, ids)}")
    if run.revived:
        lines.append(f"  revived  {len(run.revived)} times")
    lines += _scores(run, ids)
    lines.append(f"  time     {run.seconds:.3g} s")
    plan = run.plan.choice or run.plan
    lines.append(f"  plan     {plan!r}")
    return "\n".join(lines)


def _statuses(status: np.ndarray, ids: np.ndarray) -> str:
    parts = []
    for one in Status:
        here = ids[status == one]
        if len(here):
            parts.append(f"{len(here)} {one!s}" + ("" if one is Status.OK else f" ({_list_ids(here)})"))
    return ", ".join(parts)


def _list_ids(ids: np.ndarray) -> str:
    shown = ", ".join(map(str, ids[:_MOST_IDS].tolist()))
    return f"id {shown}" + (", ..." if len(ids) > _MOST_IDS else "")


def _scores(run: "Run[Any]", ids: np.ndarray) -> list[str]:
    healthy, lines = run.status != Status.DIVERGED, []
    loss = mean_of_last_epoch(run.history, run.epoch)[healthy] if run.history.loss.size else np.zeros(0)
    loss = loss[np.isfinite(loss)]
    if loss.size:
        low, high = loss.min(), loss.max()
        lines.append(f"  loss     {low:.4g}" + ("" if low == high else f" to {high:.4g}"))
    if run.best_score is not None and run.best_step is not None and np.isfinite(run.best_score[healthy]).any():
        best = int(rank_members(run, 1, name="Run.best")[0])
        lines.append(f"  best     {run.best_score[best]:.4g} by id {ids[best]} after {run.best_step[best]} steps")
    return lines


def table_columns(run: "Run[Any]") -> dict[str, np.ndarray]:
    """The columns of a run's table, one row per member."""
    columns = {"member": np.asarray(run.ensemble.ids)}
    for path, values in jax.tree_util.tree_flatten_with_path(run.train_state.hyper)[0]:
        columns[hyper_column_text(path)] = to_host(values)
    columns["loss"] = mean_of_last_epoch(run.history, run.epoch)
    if run.best_score is not None and run.best_step is not None:
        columns["validation"] = run.best_score
        columns["best_step"] = run.best_step
    columns |= {"status": status_names(run.status), "stopped_at": run.stopped_at}
    return columns


def data_frame(columns: dict[str, np.ndarray]) -> Any:
    """Columns as a `pandas.DataFrame`; a column of several numbers becomes several columns."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError(missing_extra_message("Run.table(as_frame=True)", "pandas", "pandas")) from error
    flat = {}
    for name, values in columns.items():
        for index in np.ndindex(values.shape[1:]):
            flat[name + "".join(f"[{i}]" for i in index)] = values[:, *index]
    return pandas.DataFrame(flat)
