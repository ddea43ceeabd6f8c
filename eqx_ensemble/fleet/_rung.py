"""Rungs on workers: trains the members that have not stopped, and joins them with those that have."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from .._ensemble import Ensemble
from .._warnings import ignore_warnings, warn
from ..distributed import to_host
from ..methods._halving import Rungs
from ..methods._rounds import Rounds
from ..train._run import Run
from ..train._status import Status
from ._call_record import CallRecord
from ._divide import member_options, take_data, take_members, take_options
from ._engines import Engine
from ._fit import fit
from ._functions import is_data_function
from ._join import join_runs
from ._lost_record import LostRecord
from ._shard import members_text
from ._stop_members import stop_behind, stop_members_of, with_status


def no_rounds(name: str) -> Rounds:
    """The rounds of a method whose runs are saved by workers, not by the caller."""
    return Rounds(None, own={}, every=None, resume="auto", name=name)


def call_of(ladder: Rungs) -> dict[str, Any]:
    """The arguments that identify a ladder; a call with more `rungs` continues an existing folder."""
    return {"factor": ladder.factor, ladder.unit: ladder.totals[0]}


def train_rungs(
    engine: Engine, folder: Any, *, call: dict[str, Any], name: str, word: str = "rung", **options: Any
) -> Callable[..., Run[Any]]:
    """A function that is called as `fit` for one rung after another, each with its own subfolder.

    `call` holds the arguments that affect the later rungs, but not the first.
    """
    numbers, record = itertools.count(), CallRecord(folder, call, name=name)
    first: dict[int, int] = {}  # the positions of all members, by id: some may be lost at the first rung

    def train(begun: Ensemble[Any] | Run[Any], loss: Any, optimiser: Any, data: Any, **more: Any) -> Run[Any]:
        number = next(numbers)
        here, after = (None if folder is None else folder / f"{word}-{i:02d}" for i in (number, number + 1))
        more, lost = more | options | {"checkpoint": here}, LostRecord(here, after, name=name)
        if folder is not None and number:
            more["resume"] = "auto"  # `resume` applies to the first rung, with which a call starts
        if isinstance(begun, Ensemble):
            first.update({member: position for position, member in enumerate(np.asarray(begun.ids).tolist())})
            done = fit(engine, begun, loss, optimiser, data, **more)
            run = lost.leave_out(done)
            record.write()
            left_out = np.setdiff1d(done.ensemble.ids, run.ensemble.ids)
            if len(left_out):
                warn(f"`{name}` returns without {members_text(left_out)}, as before: their workers died.")
            if not run.interrupted:
                lost.write(np.setdiff1d(begun.ids, run.ensemble.ids))
            return run
        own = member_options(more, len(first), name=name)

        def continue_members(positions: np.ndarray) -> Run[Any]:
            at = np.array([first[member] for member in np.asarray(begun.ensemble.ids)[positions].tolist()])
            given = {"data": data, "validation": more["validation"]}
            sources: dict[str, Any] = {
                word: x if is_data_function(x) else take_data(x, at) for word, x in given.items()
            }
            options: dict[str, Any] = more | take_options(own, at) | sources
            return lost.leave_out(
                fit(engine, take_members(begun, positions), loss, optimiser, options.pop("data"), **options)
            )

        return _continue_members(continue_members, begun, lost, word=word, name=name)

    return train


def _continue_members(
    call: Callable[[np.ndarray], Run[Any]], begun: Run[Any], record: LostRecord, *, word: str, name: str
) -> Run[Any]:
    """Continues the members of a run that have not stopped."""
    training = to_host(begun.train_state.status) == Status.OK
    sent = pair_single(training)
    try:
        with ignore_warnings("`fleet.fit` returns without"):
            run = call(np.flatnonzero(sent))
    except KeyboardInterrupt:  # before a shard was completed
        return dataclasses.replace(with_status(begun), interrupted=True)
    ids = np.asarray(begun.ensemble.ids)
    kept = ~np.isin(ids, np.asarray(run.ensemble.ids))
    lost = training & kept
    if not run.interrupted:
        record.write(ids[lost])
    if lost.any() and not run.interrupted:
        warn(f"`{name}` stops {members_text(ids[lost])} where the {word} before ended: their workers died.")
        begun = stop_members_of(begun, np.flatnonzero(lost))
    return in_order([run, *([with_status(take_members(begun, np.flatnonzero(kept)))] if kept.any() else [])], ids)


def pair_single(training: np.ndarray) -> np.ndarray:
    """The members to send: a single one with a stopped one, because one alone is compiled to another program."""
    sent = training.copy()
    if sent.sum() == 1 and len(sent) > 1:
        sent[np.flatnonzero(~sent)[0]] = True
    return sent


def in_order(runs: list[Run[Any]], ids: np.ndarray) -> Run[Any]:
    """Joins runs, with their members in the order of `ids`."""
    interrupted, seconds = any(run.interrupted for run in runs), max(run.seconds for run in runs)
    joined = runs[0] if len(runs) == 1 else join_runs(stop_behind(runs), interrupted=interrupted, seconds=seconds)
    found = np.asarray(joined.ensemble.ids).tolist()
    index = {member: position for position, member in enumerate(found)}
    order = [index[member] for member in ids.tolist() if member in index]
    return joined if order == list(range(len(found))) else take_members(joined, np.array(order))
