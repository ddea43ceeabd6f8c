"""Ensembles that a function builds from member ids, on the worker."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import numpy as np

from .. import _keys
from .._check import check_sequence, kind_text
from .._ensemble import Ensemble, Group
from ..train._group_run import GroupRun
from ..train._run import Run
from ..train._state import TrainState
from ..train.data._source import is_wrapper
from ._divide import resize

_WITH_IDS = Ensemble | TrainState | Run | Group | GroupRun


def check_ids_of_function(start: Any, ids: Any, *, name: str) -> np.ndarray | None:
    """Raises unless `ids` are given with a function, and only then. Returns them; `None` without a function."""
    if ids is not None and isinstance(start, _WITH_IDS):
        raise TypeError(
            f"`{name}` takes `ids` with a function that makes an ensemble of them; {kind_text(start)} has its own."
        )
    is_model = ids is None and isinstance(start, eqx.Module) and not is_wrapper(start)
    if is_model or not is_maker(start):
        return None
    if ids is None:
        raise TypeError(
            f"`{name}` needs `ids` with a function that makes an ensemble, such as `ids=range(1000)`: a function does "
            "not tell the number of members."
        )
    if isinstance(ids, int | np.integer):
        raise TypeError(f"`{name}` needs the ids of members as `ids`, got {ids}.\nWrite `ids=range({ids})`.")
    values = np.asarray(ids if isinstance(ids, np.ndarray) else check_sequence(ids, "ids", name=name, of="integers"))
    return np.asarray(_keys.member_ids(values if len(values) else values.astype(int), name=name))


def is_maker(start: Any) -> bool:
    """Whether an argument is a function that builds an ensemble, or a Module that is called as one."""
    return callable(start) and not isinstance(start, _WITH_IDS)


def begin(make: Callable[[np.ndarray], Any], ids: np.ndarray, *, name: str) -> tuple[Ensemble[Any], Any]:
    """Calls the function for these ids. Returns the ensemble, and its state or `None`."""
    made = make(ids)
    ensemble, state = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(ensemble, Ensemble):
        raise TypeError(
            f"`{name}` needs a function that returns an `Ensemble`, or one and its state; got {kind_text(made)}.\n"
            "For example `lambda ids: ee.build(make, ids=ids, key=key)`."
        )
    if not np.array_equal(np.asarray(ensemble.ids), ids):
        raise ValueError(
            f"`{name}` needs a function that returns the members with the requested ids.\n"
            f"  requested {ids[:8].tolist()}, got {np.asarray(ensemble.ids)[:8].tolist()}\n"
            "Pass them on: `lambda ids: ee.build(make, ids=ids, key=key)`."
        )
    return ensemble, state


def shapes_of_start(start: Any, ids: np.ndarray, state: Any, *, name: str) -> Any:
    """The shapes of one member to train, or of it and its state; a function is called for the first two ids."""
    if is_maker(start):
        start, made = begin(start, ids[:2], name=name)
        state = state if made is None else made
    if isinstance(start, TrainState | Run):
        found = start.train_state if isinstance(start, Run) else start
        start, state = found.ensemble, found.model_state
    return resize(start if state is None else (start, state), 1)
