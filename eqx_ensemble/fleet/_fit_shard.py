"""One shard of `fleet.fit` on a worker, and the joined run of all shards in the caller's process."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._caller import caller
from .._ensemble import concatenate
from .._warnings import warn
from ..checkpoint._engine import CallRecord, has_call, lock_folder
from ..distributed import to_host
from ..methods import population
from ..train._engine import History, Run, Status, allow_idle, is_data_function, warn_of_diverged
from ..train._engine import fit as fit_here
from ._columns import Columns, count_status
from ._divide import begin, divide
from ._folder import SavedCall, ShardCheckpoints, check_call_of_folder, load_call, save_call
from ._run_shards import Call, Hooks, run_call
from ._shard import Finished, check_some_done, lost_message
from ._sharded_run import ShardedRun, run_of_columns

# A call of `fleet.fit` with `save`: finds the completed shards in the folder, and runs the others.


def save_shards(
    call: Call,
    executor: Any,
    folder: Path,
    checkpoints: ShardCheckpoints,
    record: CallRecord,
    like: Any,
    *,
    shard: int | None,
    workers: int | None,
    retries: int,
    hooks: Hooks,
    first_step: int,
    data: Any,
) -> ShardedRun[Any]:
    """Runs the shards that are not in the folder yet. The argument `store` of each is where it saves."""
    begun = time.perf_counter()
    with lock_folder(folder):
        saved, done = _read_done(folder, record, shard)
        finished = Finished([], [], interrupted=False)
        if saved is None or len(done) < len(saved.sizes):
            found: list[SavedCall] = [] if saved is None else [saved]

            def start(size: int) -> list[tuple[int, np.ndarray]]:
                if found:
                    checkpoints.use(found[0].positions())
                else:
                    found.append(save_call(folder, record, call.ids, checkpoints.divide(size)))
                return [pair for pair in enumerate(found[0].positions()) if pair[0] not in done]

            def part(positions: np.ndarray) -> Any:
                number = int(np.searchsorted(np.cumsum(found[0].sizes), positions[0], side="right"))
                return call.part(positions) | {"store": found[0].store(number)}

            finished = run_call(
                call._replace(part=part),
                executor,
                shard=shard,
                workers=workers,
                retries=retries,
                hooks=hooks,
                start=start,
            )
            saved = found[0]
    done |= {part.number: columns for part, columns in finished.results if columns is not None}
    interrupted = finished.interrupted or any(columns is None for _, columns in finished.results)
    check_some_done(finished, done)
    message = lost_message(finished._replace(interrupted=interrupted))
    if message:
        warn(f"{message}\nRerun the same call to resume in `{folder}`.")
    seconds = time.perf_counter() - begun
    run = run_of_columns(saved, done, like, lost=tuple(finished.lost), interrupted=interrupted, seconds=seconds)
    warn_of_diverged(run, run.ids, first_step=first_step, data=data)
    return run


def _read_done(folder: Path, record: CallRecord, shard: int | None) -> tuple[SavedCall | None, dict[int, Columns]]:
    """The call and the completed shards in a folder; raises if it belongs to a different call.

    A different call that completed no shard, because it failed, is replaced.
    """
    if not has_call(folder):
        return None, {}
    saved = load_call(folder)
    complete = saved.complete()
    if not complete and saved.record.digest != record.digest:
        return None, {}
    check_call_of_folder(saved.record, record, folder)
    if shard is not None:
        expected = np.array([len(part) for part in divide(len(saved.ids), shard)])
        if not np.array_equal(saved.sizes, expected):
            raise ValueError(
                f"`{caller()}` resumes in `{folder}`, whose shards have up to {saved.sizes.max()} members; got "
                f"`shard={shard}`.\nLeave out `shard`, or save in another folder."
            )
    return saved, {number: store.read() for number, store in complete.items()}


# Joins the runs of shards.


def join_runs(runs: Sequence[Run[Any]], *, interrupted: bool, seconds: float) -> Run[Any]:
    """Joins runs of different members into one, in their order."""
    last, first = max(runs, key=lambda run: int(run.train_state.step)), runs[0]  # others diverged entirely
    known = all(run.rows is not None for run in runs)
    joined = concatenate(
        dataclasses.replace(
            run,
            history=history,
            train_state=dataclasses.replace(run.train_state, step=last.train_state.step),
            rows=run.rows if known else None,
            data_state=last.data_state,
            plan=first.plan,
            epoch=first.epoch,
        )
        for run, history in zip(runs, _align([run.history for run in runs]), strict=True)
    )
    return dataclasses.replace(joined, interrupted=interrupted or joined.interrupted, seconds=seconds)


def _align(histories: Sequence[History]) -> list[History]:
    """Histories with the same columns; NaN, or zero for integers, fills those that shorter runs lack."""
    steps = max(history.loss.shape[1] for history in histories)
    # Columns end at the same steps in all shards, except in a shard whose members all stopped within a window.
    step = np.max([np.pad(history.step, (0, steps - len(history.step))) for history in histories], axis=0)
    longest = max((history.validation_step for history in histories), key=lambda steps: (len(steps), *steps[-1:]))
    dtype = next((history.validation.dtype for history in histories if history.validation is not None), None)

    def align(history: History) -> History:
        loss, aux = jax.tree.map(lambda curve: _pad_columns(curve, steps), (history.loss, history.aux))
        return History(loss, aux, None if dtype is None else _at_steps(history, longest, dtype), longest, step)

    return list(map(align, histories))


def _pad_columns(curves: np.ndarray, steps: int) -> np.ndarray:
    """Pads curves `(members, steps, ...)` to a number of columns, with NaN, or zero for integers."""
    width = [(0, 0), (0, steps - curves.shape[1]), *((0, 0) for _ in curves.shape[2:])]
    return np.pad(curves, width, constant_values=np.nan if jnp.issubdtype(curves.dtype, jnp.inexact) else 0)


def _at_steps(history: History, steps: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Aligns validation scores with the columns of `steps`; NaN for a run that was never validated.

    A run that ended within an epoch may have been validated there; its last score belongs in the column of that epoch.
    """
    scores = np.full((len(history.loss), len(steps)), np.nan, dtype)
    if history.validation is None:  # its members diverged before
        return scores
    column = -1
    for step, own in zip(history.validation_step, history.validation.T, strict=True):
        column = min(max(int(np.searchsorted(steps, step)), column + 1), len(steps) - 1)
        scores[:, column] = own
    return scores


# Stops members of runs at the step where they are.


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


_ARGUMENTS = ("loss", "optimiser", "make")


def fit_shard(common: dict[str, Any], own: dict[str, Any]) -> Run[Any] | Columns | None:
    """Trains one shard. With a store, saves the members and returns their columns, or `None` after Ctrl-C."""
    store = own.get("store")
    if store is not None and store.is_complete:  # by a worker that died before it returned
        return store.read()
    start = own["start"]
    made = {word: x(own["ids"]) if is_data_function(x) else x for word, x in own["sources"].items()}
    options = {word: x for word, x in common.items() if word not in _ARGUMENTS} | own["options"]
    data, held_out = made["data"], common["validation"]
    if held_out is not None:
        options["validation"] = dataclasses.replace(held_out, data=made["validation"])
    if options.get("mesh") is not None:
        options["mesh"] = options["mesh"]()
    if "make" in common:
        start, state = begin(common["make"], own["ids"])
        options |= {} if state is None else {"state": state}
    with allow_idle():  # members of other shards train
        run: Run[Any] = fit_here(
            start, common["loss"], common["optimiser"], data, checkpoint=own["checkpoint"], progress=False,
            **options,
        )  # fmt: skip
    if store is None:
        return run if own["start"] is None else _with_shared(run, start)
    return None if run.interrupted else store.write(run)


def _with_shared(run: Run[Any], start: Any) -> Run[Any]:
    """Restores the shared arrays that the shard was sent, by identity, so that they are not sent back."""
    began = start.train_state if isinstance(start, Run) else start
    return eqx.tree_at(lambda run: (run.ensemble.shared, run.train_state.shared), run, (began.shared, began.shared))


def count_of_run(run: Run[Any]) -> dict[str, int]:
    """The number of members of a run with each status."""
    return count_status(run.status)


def count_of_columns(columns: Columns | None) -> dict[str, int]:
    """As `count_of_run`, from the columns of a saved shard."""
    return {} if columns is None else count_status(columns.status)


def join_shards(
    call: Call,
    executor: Any,
    checkpoints: ShardCheckpoints,
    *,
    shard: int | None,
    workers: int | None,
    retries: int,
    hooks: Hooks,
    continued: float,
    first_step: int,
    data: Any,
) -> Run[Any]:
    """The run of the completed shards; warns of members that are missing or diverged.

    `continued` is the duration of the run that this one continues, and `first_step` its last step.
    """
    begun = time.perf_counter()
    start = lambda size: list(enumerate(checkpoints.divide(size)))
    finished = run_call(call, executor, shard=shard, workers=workers, retries=retries, hooks=hooks, start=start)
    check_some_done(finished, finished.results)
    message = lost_message(finished)
    if message:
        warn(message)
    seconds = continued + time.perf_counter() - begun
    ended = [run for _, run in finished.results]
    runs = stop_behind(ended)
    was_stopped = [x is not run and not run.interrupted for x, run in zip(runs, ended, strict=True)]
    if any(was_stopped) and not finished.interrupted:
        warn(
            f"`{caller()}` trained shards to different steps, as with data of different lengths: members that are "
            "behind the last step have the status `STOPPED`.\nPass `steps` for equal lengths."
        )
    run = join_runs(runs, interrupted=finished.interrupted, seconds=seconds)
    warn_of_diverged(run, np.asarray(run.ensemble.ids), first_step=first_step, data=data)
    return run
