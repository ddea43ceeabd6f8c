"""The function `fit` with which a method trains its rounds: that of this library, or another with its signature."""

import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import numpy as np

from .._check import MemberMismatchError, check_function, kind_text
from ..distributed import to_host
from ..train._fit import fit as fit_here
from ..train._run import Run
from ..train.data._data import is_batches
from ..train.data._functions import is_data_function
from ._check import check_options, check_whole_epochs

_IN_FILES = ("save", "ids")  # options of `fleet.fit`


def check_rounds_of(fit: Callable[..., Any], *, name: str) -> Callable[..., Any]:
    """Raises unless `fit` is a function. Returns it, with checks of what it returns if it is not that of this library.

    Rounds that another function ends early, before all members were trained, have not taken place.
    """
    if fit is fit_here:
        return fit
    check_function(fit, "fit", name=name, example="functools.partial(ee.fleet.fit, executor)")
    return ft.partial(_fit_round, fit, name)


def _fit_round(
    fit: Callable[..., Any], name: str, begun: Any, loss: Any, optimiser: Any, data: Any, **options: Any
) -> Run[Any]:
    check_options(getattr(fit, "keywords", {}) | options, _IN_FILES, "it compares members in this process", name=name)
    if options.get("steps") is not None and is_data_function(data):
        data = ft.partial(_make_data, data, name)
    before = _not_trained(begun) if isinstance(begun, Run) else None
    try:
        run = fit(begun, loss, optimiser, data, **options)
    except KeyboardInterrupt:
        if before is None:
            raise
        return before
    if not isinstance(run, Run):
        raise TypeError(f"`{name}` needs `fit` to return a run, as that of this library does; got {kind_text(run)}.")
    missing = np.setdiff1d(_ids(begun), _ids(run)).tolist()
    if missing and not run.interrupted:
        raise MemberMismatchError(
            f"`{name}` needs the runs of all members to compare them; `fit` returned without {len(missing)} of them, "
            f"ids {missing[:8]}.\n"
            "Rerun the call: with `checkpoint=`, it resumes."
        )
    return before if missing and before is not None else run


def _not_trained(begun: Run[Any]) -> Run[Any]:
    """The run that a round was to continue, with the members that were stopped before it, as after Ctrl-C."""
    state = begun.train_state.moving
    status, stopped_at = to_host(state.status), to_host(state.stopped_at)
    return dataclasses.replace(begun, status=status, stopped_at=stopped_at, interrupted=True)


def _ids(begun: Any) -> np.ndarray:
    return np.asarray(begun.train_state.ids if isinstance(begun, Run) else begun.ids)


def _make_data(make: Callable[..., Any], name: str, ids: np.ndarray) -> Any:
    data = make(ids)
    check_whole_epochs(1, is_batches=is_batches(data), name=name)
    return data
