from collections.abc import Callable
from typing import Any

import numpy as np

from .._axes._check_rows import not_finite_text
from .._check import check_counter, check_flag, check_optional_flag, check_optional_function, check_word
from .._warnings import warn
from ..distributed import to_host
from ._check_run import diverged_message, undefined_scores_message
from ._errors import DivergedError, NotSavedError
from ._revive import Revive
from ._status import Status
from .compiled._windows import Windows
from .data._check import integers_text
from .data._data import in_memory
from .data._rows import ORDERS


def check_choices(
    *, has_aux: Any, progress: Any, scan: Any, score: Any, order: Any, how: Any, name: str = "fit"
) -> None:
    """Raises for invalid flags, functions and strings among the options of `fit`."""
    check_flag(has_aux, "has_aux", name=name)
    check_optional_flag(progress, "progress", name=name)
    check_optional_flag(scan, "scan", name=name)
    check_optional_function(score, "score", name=name, example="lambda model, batch, key: ...")
    check_word(order, "order", ORDERS, name=name)
    if not isinstance(how, Revive):
        check_word(how, "on_diverge", ("freeze", "revive", "raise"), name=name)


def check_outcome(
    run: Any, lost_before: np.ndarray, how: Any, *, saver: Any, first_step: int, data: Any, fault: Callable[[], str]
) -> None:
    """Raises if a checkpoint was not written, or for newly diverged members with `"raise"`; else warns of them."""
    if saver is not None and saver.failed is not None:
        raise NotSavedError(saver.failed, run) from saver.failed
    lost = run.status == Status.DIVERGED
    if lost.any():
        message = _diverged_text(run, to_host(run.train_state.ids), first_step, data, fault())
        if how == "raise" and (lost & ~lost_before).any():
            raise DivergedError(message, run)
        warn(message)


def warn_of_diverged(run: Any, ids: np.ndarray, *, first_step: int, data: Any) -> None:
    """Warns of the diverged members of a run on several workers, as `fit` does; only data in memory are looked at."""
    if (run.status == Status.DIVERGED).any():
        fault = not_finite_text(data, argument="data") if in_memory(data) and not callable(data) else ""
        warn(_diverged_text(run, ids, first_step, data, fault))


def _diverged_text(run: Any, ids: np.ndarray, first_step: int, data: Any, fault: str) -> str:
    lost = run.status == Status.DIVERGED
    integers = integers_text(data) if in_memory(data) and not callable(data) else ""
    where = (ids[lost], run.stopped_at[lost], run.fault[lost])
    return diverged_message(*where, first_step=first_step, integers=integers, fault=fault)


def warn_of_undefined_scores(run: Any, validated: list[int]) -> None:
    """Warns of members that got NaN as a score while they trained, at the steps `validated` of all members."""
    scores, steps = run.history.validation, run.history.validation_step
    if scores is None:
        return
    ids = to_host(run.train_state.ids)
    trained = (run.status == Status.OK)[:, None] | (run.stopped_at[:, None] >= steps)
    trained &= (run.status != Status.DIVERGED)[:, None]  # a warning of their own names these
    trained &= ~np.isin(ids, [revival.member for revival in run.revived])[:, None]  # not before they were revived
    scored = ~np.isnan(scores) @ (steps[:, None] == steps)  # members that leave are scored apart, at the same step
    undefined = ~scored & trained & np.isin(steps, validated)
    if undefined.any():
        warn(undefined_scores_message(ids, undefined, steps))


def check_history(history: Any, *, name: str = "fit") -> Windows:
    """Raises for an invalid `history`. Returns the windows of steps whose last outputs are recorded."""
    if isinstance(history, str) and history in ("all", "last"):
        return Windows(1 if history == "all" else None)
    if isinstance(history, str) or history is None:
        raise ValueError(
            f"`{name}` needs `history` to be 'all', 'last' or a number of steps, got {history!r}.\n"
            "A number `n` records the losses of every `n`-th step."
        )
    return Windows(check_counter(history, "history", name=name))
