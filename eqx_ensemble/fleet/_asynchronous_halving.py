import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from .._check import check_positive_int
from .._ensemble import Ensemble, M
from .._pytree import PyTree
from .._warnings import warn
from ..methods._check import check_options
from ..methods._halving import Rungs, check_rungs, share
from ..train._check import check_no_transformation
from ..train._check_fit import warn_of_diverged
from ..train._run import Run
from ..train.compiled._optimiser import Optimiser
from ._check import IN_FILES, MEMBERS_HERE, check_folder, check_retries
from ._dispatch import Dispatcher
from ._divide import default_size, large_shared
from ._engines import open_engine
from ._fit_shard import fit_shard, hooks_of_runs
from ._fitting import prepare, whole_epochs
from ._folder import lock_folder
from ._halving_search import HalvingSearch
from ._job_log import JobLog, check_resume
from ._ladder import Ladder
from ._run_shards import run_shards
from ._shard import Finished, check_some_done, members_text, warn_missing
from ._worker import Task

_NAME = "fleet.asynchronous_halving"


def asynchronous_halving(
    executor: Any,
    ensemble: Ensemble[M],
    loss: Callable[..., Any],
    optimiser: Optimiser,
    data: PyTree,
    *,
    validation: PyTree,
    epochs: int | None = None,
    steps: int | None = None,
    factor: float | int = 3,
    rungs: int | None = None,
    shard: int | None = None,
    workers: int | None = None,
    retries: int = 2,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    key: Any,
    **options: Any,
) -> Run[M]:
    """Asynchronous successive halving (ASHA): promotes members without waiting for a rung to end.

    There is no barrier between rungs. A member is promoted as soon as it ranks among the best `1 / factor`, rounded
    down, of the members that have finished its rung so far. If none can be promoted, new members start. Some members
    are therefore promoted that a synchronous search would have stopped, and the result depends on the order in which
    workers finish. It is reproducible with an executor of one worker and equal `workers` and `shard`.

    **Arguments:**

    - `executor`, `retries`, `progress`: as for [`eqx_ensemble.fleet.fit`][].
    - `ensemble`, `loss`, `optimiser`, `data`, `validation`, `options`: as for [`eqx_ensemble.fleet.fit`][], without
        `save` and `ids`. `ensemble` must be an [`eqx_ensemble.Ensemble`][].
    - `epochs` or `steps`: the length of the first rung; rung `i`, counted from 0, ends when members have trained
        `factor ** i` times as long, rounded up.
    - `factor`: the ratio of members, and of training lengths, between two rungs.
    - `rungs`: the number of rungs. By default, as many as have a member if each rung promotes `1 / factor` of its
        members, rounded down.
    - `shard`: the number of members that a worker trains together, by default as for [`eqx_ensemble.fleet.fit`][].
        Members are promoted individually, and trained together with others that are promoted at the same time from the
        same rung. `shard=1` is the algorithm of the paper; one member alone is compiled to another program, with other
        rounding. With larger shards a promotion waits until `shard` members of a rung can be promoted, or until no new
        member is left to start; each member is then trained as by one [`eqx_ensemble.fit`][], bit for bit under
        [`eqx_ensemble.plan.Sequential`][].
    - `workers`: the number of shards that run at once, by default as for [`eqx_ensemble.fleet.fit`][].
    - `checkpoint`: a folder that all workers can write, in which each shard saves its run. Its file `order.jsonl` logs
        the order in which shards were completed or abandoned. Rerunning the same call replays these decisions, resumes
        unfinished shards, retries abandoned ones, and returns what the uninterrupted call would have. It takes the
        space of one run per rung.
    - `key`: the root key.

    **Returns:** the run; the caller holds the runs of all members in memory. Members that finished the last rung have
    the status `OK`; all others have `STOPPED` or `DIVERGED`, and their best weights. Members of an abandoned shard are
    stopped at the rung before, or missing if it was their first; a warning lists them.

    **Raises:** as [`eqx_ensemble.methods.successive_halving`][] and [`eqx_ensemble.fleet.fit`][]; also
    `BlockingIOError` while another call uses the folder, and `ValueError` if shards of a resumed call no longer give
    the logged results.

    ```python
    from concurrent.futures import ThreadPoolExecutor  # threads, for this example

    def mse(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    hyper = ee.sweep.grid({"lr": jnp.logspace(-4, -1, 9)})
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 9, key=key)
    data = jnp.ones((64, 3)), jnp.zeros((64, 1))
    held_out = jnp.ones((16, 3)), jnp.zeros((16, 1))
    with ThreadPoolExecutor(1) as executor:
        run = ee.fleet.asynchronous_halving(
            executor,
            ensemble,
            mse,
            lambda hyper: optax.adam(hyper["lr"]),
            data,
            hyper=hyper,
            validation=held_out,
            epochs=1,
            shard=3,
            workers=1,
            key=key,
        )
    run.best().ids
    ```

    ??? cite

        Li et al., *A System for Massively Parallel Hyperparameter Tuning*, MLSys 2020.
    """
    begun = time.perf_counter()
    check_no_transformation(name=_NAME)
    check_options(options, IN_FILES, MEMBERS_HERE, name=_NAME)
    hooks = hooks_of_runs(progress=progress, on_shard=options.pop("on_shard", None), name=_NAME)
    plan = check_rungs(
        ensemble, data, validation=validation, epochs=epochs, steps=steps, factor=factor, rungs=rungs, name=_NAME
    )
    if rungs is None:
        plan = plan._replace(totals=plan.totals[: _rungs(len(ensemble), plan.factor)])
    if shard is not None:
        check_positive_int(shard, "shard", name=_NAME)
    retries = check_retries(retries, name=_NAME)
    folder = check_folder(checkpoint, name=_NAME)
    check_resume(options, folder, name=_NAME)
    first = {word: options.pop(word) for word in ("trainable",) if word in options}
    options["validation"] = validation
    data = whole_epochs(data, steps, name=_NAME)
    fitting = prepare(loss, optimiser, data, options, len(ensemble), begun=ensemble, name=_NAME, key=key)
    with open_engine(executor, workers, name=_NAME) as engine, lock_folder(folder):
        lengths, num_workers = plan.lengths(), engine.num_workers()
        size = default_size(len(ensemble), num_workers) if shard is None else shard
        order = JobLog(folder, _call_record(ensemble, plan, size, num_workers), name=_NAME)
        ladder = Ladder(len(ensemble), len(lengths), factor=plan.factor, size=size)
        search = HalvingSearch(ensemble, fitting, ladder, lengths, first=first, folder=folder)
        dispatcher = Dispatcher(search, order, np.asarray(ensemble.ids), workers=num_workers)
        finished = run_shards(
            engine, Task(fit_shard, fitting.common), dispatcher.shards(), [*fitting.arrays, *large_shared(ensemble)],
            retries=retries, hooks=hooks, follow=dispatcher.end, name=_NAME,
        )  # fmt: skip
    check_some_done(finished, np.flatnonzero(search.rung >= 0), name=_NAME)
    order.check_replay(finished)
    _warn_lost(finished, search, np.asarray(ensemble.ids))
    run = search.run(interrupted=finished.interrupted, seconds=time.perf_counter() - begun)
    warn_of_diverged(run, np.asarray(run.ensemble.ids), first_step=0, data=fitting.sources["data"])
    return run


def _rungs(count: int, factor: float | int) -> int:
    """The number of rungs with at least one member, in a synchronous search."""
    rungs = 1
    while (count := share(count, factor)) > 0:
        rungs += 1
    return rungs


def _call_record(ensemble: Ensemble[Any], plan: Rungs, size: int, workers: int) -> dict[str, Any]:
    """The arguments that a resumed call must share with the one that started the folder."""
    members = np.asarray(ensemble.ids).tolist()
    return {"members": members, "shard": size, "workers": workers, "factor": plan.factor, plan.unit: plan.totals}


def _warn_lost(finished: Finished, search: HalvingSearch, ids: np.ndarray) -> None:
    """Warns of members that are missing, or stopped at an earlier rung."""
    warn_missing(finished, ids[search.rung < 0], name=_NAME)
    is_new = lambda report: (search.rung[np.isin(ids, report.ids)] < 0).any()
    stopped = [report.ids for report in finished.lost if not is_new(report)]
    if stopped:
        warn(f"`{_NAME}` stops {members_text(np.concatenate(stopped))} at an earlier rung: their workers died.")
