"""A population over workers whose shards do not wait for each other."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .._ensemble import Ensemble, M
from .._pytree import PyTree
from .._warnings import warn
from ..checkpoint._path import absolute
from ..methods._evolve import Evolution
from ..methods._population import Population
from ..train.compiled._optimiser import Optimiser
from ._check import check_retries, check_shard
from ._cut import large_shared
from ._engines import Engine
from ._exchange import Exchange
from ._fit_shard import fit_shard, watch_runs
from ._fitting import prepare
from ._folder import hold
from ._order import Order, check_resume
from ._run_shards import run_shards
from ._shard import Finished, check_some_done, lost_message, members_text
from ._shard_rounds import population_of
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
    """All rounds of all shards; each begins its next one as soon as a worker is free."""
    begun = time.perf_counter()
    folder = None if folder is None else absolute(folder)
    check_resume(options, folder, name=name)
    tries = check_retries(retries, name=name)
    if shard is not None:
        check_shard(shard, len(ensemble), name=name)
    watch = watch_runs(progress=options.pop("progress", None), on_shard=options.pop("on_shard", None), name=name)
    first = {word: options.pop(word) for word in ("trainable",) if word in options}
    options["hyper"] = evolution.hyper
    fitting = prepare(loss, optimiser, data, options, len(ensemble), name=name, key=key)
    size = engine.shard_of(len(ensemble)) if shard is None else shard
    workers, ids = engine.num_workers(), np.asarray(ensemble.ids)
    call = {"members": ids.tolist(), "shard": size, "workers": workers, "rounds": len(evolution.keys)}
    call |= {"fraction": evolution.fraction} | evolution.length
    with hold(folder):
        order = Order(folder, call, name=name)
        exchange = Exchange(
            ensemble, fitting, evolution, order, first=first, folder=folder, size=size, workers=workers, key=key
        )
        finished = run_shards(
            engine, Task(fit_shard, fitting.common), exchange.shards(), [*fitting.arrays, *large_shared(ensemble)],
            retries=tries, watch=watch, follow=exchange.follow, name=name,
        )  # fmt: skip
    _explain(finished, exchange, name=name)
    return population_of(exchange.past, interrupted=finished.interrupted, seconds=time.perf_counter() - begun)


def _explain(finished: Finished, exchange: Exchange, *, name: str) -> None:
    """Warns of members that were lost; raises what ended the search if nobody is left."""
    past = exchange.past
    check_some_done(finished, past.shards, name=name)
    begun = [int(past.ids[past.members[index][0]]) for index in past.shards]
    is_new = lambda report: int(report.ids[0]) not in begun
    message = lost_message(finished._replace(lost=[report for report in finished.lost if is_new(report)]), name=name)
    if message:
        warn(message)
    stopped = [report.ids for report in finished.lost if not is_new(report)]
    if stopped:
        warn(f"`{name}` stops {members_text(np.concatenate(stopped))} at an earlier round: their workers died.")
