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
    return [_stop_training(run) if int(run.train_state.step) < last else run for run in runs]


def _stop_training(run: Run[Any]) -> Run[Any]:
    members = np.flatnonzero(run.status == Status.OK)
    if len(members) == 0:
        return run
    state = population.stop(run.train_state, members)
    status, stopped_at = to_host(state.moving.status), to_host(state.moving.stopped_at)
    return dataclasses.replace(run, train_state=state, status=status, stopped_at=stopped_at)
