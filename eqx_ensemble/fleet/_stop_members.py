"""Stops members of runs at the step where they are."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..distributed import to_host
from ..methods import population
from ..train._run import Run
from ..train._status import Status


def stop_behind(runs: Sequence[Run[Any]]) -> list[Run[Any]]:
    """Stops the training members of runs that ended before the others, as after Ctrl-C.

    The joined run is at one step, and continuing it would otherwise skip steps of these members.
    """
    last = max(int(run.train_state.step) for run in runs)
    is_behind = lambda run: int(run.train_state.step) < last
    return [stop_members_of(run, np.flatnonzero(run.status == Status.OK)) if is_behind(run) else run for run in runs]


def stop_members_of(run: Run[Any], members: np.ndarray) -> Run[Any]:
    """Stops some members of a run."""
    if len(members) == 0:
        return run
    return with_status(dataclasses.replace(run, train_state=population.stop(run.train_state, members)))


def with_status(run: Run[Any]) -> Run[Any]:
    """The run with the status of its training state."""
    moving = run.train_state.moving
    return dataclasses.replace(run, status=to_host(moving.status), stopped_at=to_host(moving.stopped_at))
