"""One shard of `fleet.fit` on a worker, and the joined run of all shards in the caller's process."""

import time
from typing import Any

import equinox as eqx
import numpy as np

from .._warnings import warn
from ..train._check_fit import warn_of_diverged
from ..train._fit import fit as fit_here
from ..train._idle import allow_idle
from ..train._run import Run
from ..train.data._functions import is_data_function
from ._call import Call, run_call
from ._columns import Columns, count_status
from ._join import join_runs
from ._make_members import begin
from ._run_shards import Hooks
from ._shard import check_some_done, lost_message
from ._shard_checkpoints import ShardCheckpoints
from ._stop_members import stop_behind

_ARGUMENTS = ("loss", "optimiser", "make")


def fit_shard(common: dict[str, Any], own: dict[str, Any]) -> Run[Any] | Columns | None:
    """Trains one shard. With a store, saves the members and returns their columns, or `None` after Ctrl-C."""
    store = own.get("store")
    if store is not None and store.is_complete:  # by a worker that died before it returned
        return store.read(name="fleet.fit")
    start = own["start"]
    made = {word: x(own["ids"]) if is_data_function(x) else x for word, x in own["sources"].items()}
    options = {word: x for word, x in common.items() if word not in _ARGUMENTS} | own["options"]
    data = made.pop("data")
    if options.get("mesh") is not None:
        options["mesh"] = options["mesh"]()
    if "make" in common:
        start, state = begin(common["make"], own["ids"], name="fleet.fit")
        options |= {} if state is None else {"state": state}
    with allow_idle():  # members of other shards train
        run: Run[Any] = fit_here(
            start, common["loss"], common["optimiser"], data, checkpoint=own["checkpoint"], progress=False,
            **made, **options,
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
    check_some_done(finished, finished.results, name=call.name)
    message = lost_message(finished, name=call.name)
    if message:
        warn(message)
    seconds = continued + time.perf_counter() - begun
    ended = [run for _, run in finished.results]
    runs = stop_behind(ended)
    was_stopped = [x is not run and not run.interrupted for x, run in zip(runs, ended, strict=True)]
    if any(was_stopped) and not finished.interrupted:
        warn(
            f"`{call.name}` trained shards to different steps, as with data of different lengths: members that are "
            "behind the last step have the status `STOPPED`.\nPass `steps` for equal lengths."
        )
    run = join_runs(runs, interrupted=finished.interrupted, seconds=seconds)
    warn_of_diverged(run, np.asarray(run.ensemble.ids), first_step=first_step, data=data)
    return run
