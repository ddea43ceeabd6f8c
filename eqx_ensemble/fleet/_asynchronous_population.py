"""Asynchronous population-based training over workers."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .._ensemble import Ensemble, M
from .._pytree import PyTree
from .._warnings import warn
from ..methods._evolve import Evolution
from ..methods._population import Population
from ..train._status import Status
from ..train.compiled._optimiser import Optimiser
from ._check import check_retries, check_shard
from ._dispatch import Dispatcher
from ._divide import default_size, large_shared
from ._engines import Engine
from ._fit_shard import fit_shard, hooks_of_runs
from ._fitting import prepare
from ._folder import lock_folder
from ._job_log import JobLog, check_resume
from ._population_search import PopulationSearch
from ._run_shards import run_shards
from ._shard import Finished, check_some_done, members_text, warn_missing
from ._shard_rounds import ShardRounds, population_of
from ._worker import Task


def evolve_asynchronously(
    engine: Engine,
    ensemble: Ensemble[M],
    loss: Callable[..., Any],
    optimiser: Optimiser,
    data: PyTree,
    evolution: Evolution,
    folder: Path | None,
    *,
    shard: int | None,
    retries: int,
    key: Any,
    name: str,
    **options: Any,
) -> Population[M]:
    """Population-based training in which each shard starts its next round as soon as a worker is idle."""
    begun = time.perf_counter()
    check_resume(options, folder, name=name)
    retries = check_retries(retries, name=name)
    if shard is not None:
        check_shard(shard, len(ensemble), name=name)
    hooks = hooks_of_runs(progress=options.pop("progress", None), on_shard=options.pop("on_shard", None), name=name)
    first = {word: options.pop(word) for word in ("trainable",) if word in options}
    options["hyper"] = evolution.hyper
    fitting = prepare(loss, optimiser, data, options, len(ensemble), begun=ensemble, name=name, key=key)
    num_workers, ids = engine.num_workers(), np.asarray(ensemble.ids)
    size = default_size(len(ensemble), num_workers) if shard is None else shard
    call = {"members": ids.tolist(), "shard": size, "workers": num_workers, "rounds": len(evolution.keys)}
    call |= {"fraction": evolution.fraction} | evolution.length
    with lock_folder(folder):
        order = JobLog(folder, call, name=name)
        search = PopulationSearch(ensemble, fitting, evolution, first=first, folder=folder, size=size, key=key)
        dispatcher = Dispatcher(search, order, ids, workers=num_workers)
        finished = run_shards(
            engine, Task(fit_shard, fitting.common), dispatcher.shards(), [*fitting.arrays, *large_shared(ensemble)],
            retries=retries, hooks=hooks, follow=dispatcher.end, name=name,
        )  # fmt: skip
    check_some_done(finished, search.past.shards, name=name)
    order.check_replay(finished)
    if not finished.interrupted:
        search.stop_incomplete_shards()
    _warn_lost(finished, search.past, name=name)
    return population_of(search.past, interrupted=finished.interrupted, seconds=time.perf_counter() - begun)


def _warn_lost(finished: Finished, past: ShardRounds, *, name: str) -> None:
    """Warns of members that are missing, or stopped at an earlier round."""
    begun = np.isin(np.arange(len(past.ids)), np.concatenate([past.members[index] for index in past.shards]))
    warn_missing(finished, past.ids[~begun], name=name)
    status = {index: past.rounds[index][-1].run.status for index in past.shards}
    stopped = [past.ids[past.members[index][status[index] == Status.STOPPED]] for index in past.shards]
    if len(np.concatenate(stopped)):
        warn(f"`{name}` stops {members_text(np.concatenate(stopped))} at an earlier round: their workers died.")
