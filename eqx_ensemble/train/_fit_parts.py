import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .. import _axes
from .._ensemble import Group
from .._ensemble._by_part import (
    by_part,
    data_by_part,
    explain_part,
    members_by_part,
    numbers_by_part,
    states_by_part,
    tree_by_part,
)
from .._ensemble._group_order import member_positions
from .._foreign import as_numpy, from_foreign_tree
from .._warnings import warn
from ..checkpoint._path import as_path
from ._check_group import check_data_of_parts, check_folder_of_parts, interrupted_message
from ._group_run import GroupRun
from ._hyper import hyper_arrays
from ._run import Run
from .data._data import is_batches

_NAME = "fit"
_NUMBERS = ("target", "max_steps", "max_seconds")
_DATA = ("data", "validation")
_BY_PART = {
    "loss",
    "optimiser",
    "epochs",
    "steps",
    "batch_size",
    "score",
    "patience",
    "on_diverge",
    "plan",
    "checkpoint",
}
_BY_PART |= {"callbacks"}


def fit_parts(fit: Callable[..., Run[Any]], begun: Group | GroupRun, options: dict[str, Any]) -> GroupRun:
    """Trains the parts of a group one after another, each by `fit`.

    **Arguments:**

    - `options`: all other arguments of `fit`, by name.
    """
    group = begun if isinstance(begun, Group) else begun.group
    starts = group.parts if isinstance(begun, Group) else begun.runs
    own = {name: _of_parts(group, name, value) for name, value in options.items()}
    done: dict[str, Run[Any]] = {}
    for part, start in starts.items():
        try:
            with explain_part(part):
                done[part] = fit(start, **{name: values[part] for name, values in own.items()})
        except Exception as error:
            run = getattr(error, "run", None)
            if isinstance(run, Run):
                error.run = _run_of(group, done | {part: run})  # pyright: ignore[reportAttributeAccessIssue]
            raise
        if done[part].interrupted:
            break
    untrained = [part for part in starts if part not in done]
    if untrained:
        warn(interrupted_message(untrained))
    return _run_of(group, done)


def _run_of(group: Group, runs: dict[str, Run[Any]]) -> GroupRun:
    """The runs of some parts, in the order of the group."""
    positions = member_positions(group)
    return GroupRun(runs, order=np.argsort(np.concatenate([positions[part] for part in sorted(runs)])).tolist())


def _of_parts(group: Group, name: str, value: Any) -> dict[str, Any]:
    """An argument of `fit` for each part."""
    if name in _DATA:
        return _data_of_parts(group, name, value)
    if name == "hyper":
        own = tree_by_part(value, group.parts)
        if own is None and value is not None:
            value = hyper_arrays(value, group.num_members, name=_NAME)
        return members_by_part(group, value, name, name=_NAME) if own is None else own
    if name == "rows":
        if value is not None and tree_by_part(value, group.parts) is None:
            value = as_numpy(_axes.map_each(lambda rows: rows, value), name, name=_NAME)
        return members_by_part(group, value, name, name=_NAME)
    if name == "state":
        return states_by_part(value, group.parts, name=_NAME)
    if name == "trainable":
        return tree_by_part(value, group.parts) or dict.fromkeys(group.parts, value)
    if name == "checkpoint" and value is not None and not isinstance(value, Mapping):
        check_folder_of_parts(value, name=_NAME)
        if isinstance(value, str | os.PathLike):
            return {part: as_path(value) / part for part in group.parts}
    if name in _NUMBERS:
        return numbers_by_part(group, value, name, name=_NAME)
    return by_part(value, group.parts, name, name=_NAME) if name in _BY_PART else dict.fromkeys(group.parts, value)


def _data_of_parts(group: Group, name: str, value: Any) -> dict[str, Any]:
    own = tree_by_part(value, group.parts)
    if own is not None or value is None:
        return dict.fromkeys(group.parts) if own is None else own
    if is_batches(value):
        check_data_of_parts(value, group.parts, name=_NAME)
        return dict.fromkeys(group.parts, value)
    return data_by_part(group, from_foreign_tree(value, name, name=_NAME), name=_NAME)
