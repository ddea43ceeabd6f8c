import os
import time
from collections.abc import Callable
from typing import Any, Unpack

import numpy as np

from .._ensemble import Ensemble, M
from .._pytree import PyTree
from .._warnings import warn
from ..train._check import check_no_transformation, check_some_training
from ..train._check_run import diverged_message
from ..train._run import Run
from ..train._state import TrainState
from ..train._status import Status
from ..train.compiled._optimiser import Optimiser
from ._call import Call, over_shards
from ._check import check_folder, check_start
from ._cut import cut_start
from ._fitting import fit_shard, prepare
from ._join import join_runs
from ._options import FleetFitOptions
from ._run_shards import Finished, lost_message

_NAME = "fleet.fit"


def fit(
    executor: Any,
    ensemble: Ensemble[M] | TrainState[M] | Run[M],
    loss: Callable[..., Any],
    optimiser: Optimiser,
    data: PyTree | Callable[[np.ndarray], Any],
    *,
    shard: int | None = None,
    workers: int | None = None,
    retries: int = 2,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    key: Any,
    **options: Unpack[FleetFitOptions],
) -> Run[M]:
    """Trains members on many workers: each shard of members is a [`eqx_ensemble.fit`][] of its own, on any worker.

    Members are independent, and their random streams follow from their ids. So the result is that of one
    [`eqx_ensemble.fit`][]: bit for bit under [`eqx_ensemble.plan.Sequential`][], within rounding under other plans,
    whatever the size of the shards and the order in which workers finish them.

    **Arguments:**

    - `executor`: what runs the shards. An executor with the interface of `concurrent.futures.Executor`; or better a
        function that makes one, which is called again when a worker's death breaks it; or a client of Dask; or `None`
        for Dask with a worker on each core of this machine (extra `dask`). Executors of the standard library need
        processes that are spawned: `ProcessPoolExecutor(2, multiprocessing.get_context("spawn"))`, in a script below
        `if __name__ == "__main__":`.
    - `ensemble`, `loss`, `optimiser`, `key`: as for [`eqx_ensemble.fit`][]. Functions are sent to workers by
        cloudpickle (extra `fleet`): by name where workers can import them, else as they are.
    - `data`: arrays, as for [`eqx_ensemble.fit`][]; those that all members share are read by workers of this machine
        from files that they map into memory, and are scattered by Dask. Or a function, called on the worker with the
        ids of a shard's members `(n,)`, that returns their data: arrays, parts of them marked
        [`eqx_ensemble.Each`][], or batches. The same holds for `validation`. Executors other than Dask's whose workers
        are on other machines need a function.
    - `shard`: the number of members of a shard, at least 2, because one alone is compiled to another program. By
        default sixteen shards for each worker. A shard should take minutes: a worker imports JAX, which takes seconds,
        and compiles, for at most two sizes of shards.
    - `workers`: how many workers the executor has. By default one for each core of this machine, or for each thread of
        Dask's workers, which are counted again whenever shards are sent. Twice as many shards are sent at once.
    - `retries`: how often a shard is tried again after its worker died.
    - `checkpoint`: a folder that all workers can write, in which each shard saves its run in a folder of its own. A
        shard whose worker died goes on from there, and so does a call with the same arguments and size of shards.
    - `progress`: whether to show a progress line over members; by default on a terminal or in a notebook.
    - `options`: of [`eqx_ensemble.fit`][]. `hyper`, `rows`, `state`, `target` and `max_steps` are cut to the members of
        each shard. Refused is what depends on the other members or on the clock: `max_seconds`, `plan="auto"`,
        `on_diverge="raise"`, revivals by copies, and `callbacks`. `mesh` is a function that is called on the worker,
        such as `ee.make_mesh`: a shard then runs on all devices of its worker.

    **Returns:** the run of all members. Members of shards whose workers died too often are missing, and so are those
    that were not done when Ctrl-C ended the call: a warning says so, and `run.ensemble.ids` tells who is there.

    **Raises:** as [`eqx_ensemble.fit`][]; an error on a worker is raised here with a note that names its members.
    `concurrent.futures.BrokenExecutor` if no shard was done.

    ```python
    from concurrent.futures import ThreadPoolExecutor  # of one process, for this example

    def mse(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 8, key=key)
    data = jnp.ones((64, 3)), jnp.zeros((64, 1))
    with ThreadPoolExecutor(2) as executor:
        run = ee.fleet.fit(executor, ensemble, mse, optax.adam(1e-2), data, epochs=2, shard=4, key=key)
    run.predict(data[0]).shape  # (8, 64, 1)
    ```
    """
    begun = time.perf_counter()
    check_no_transformation(name=_NAME)
    check_start(ensemble, name=_NAME)
    folder = check_folder(checkpoint, name=_NAME)
    ids = np.asarray(ensemble.train_state.ids if isinstance(ensemble, Run) else ensemble.ids)
    if isinstance(ensemble, Run):
        check_some_training(ensemble.status == Status.OK, ids=ids)
    fitting = prepare(loss, optimiser, data, dict(options), len(ids), name=_NAME, key=key)

    def part(positions: np.ndarray) -> dict[str, Any]:
        first, last = ids[positions[[0, -1]]]
        own_folder = None if folder is None else folder / f"{first}-{last}-of-{len(ids)}"
        return fitting.part(cut_start(ensemble, positions), positions, ids[positions], own_folder)

    call = Call(_NAME, fit_shard, fitting.common, part, fitting.arrays, ids)
    finished = over_shards(
        call, executor, shard=shard, workers=workers, retries=retries, progress=progress, report=report
    )
    return _run_of(finished, seconds=time.perf_counter() - begun)


def report(run: Run[Any]) -> dict[str, str]:
    """What the progress line shows of a shard."""
    counts = {"stopped": Status.STOPPED, "diverged": Status.DIVERGED}
    return {word: str(int((run.status == status).sum())) for word, status in counts.items()}


def _run_of(finished: Finished, *, seconds: float) -> Run[Any]:
    """The run of what was done; warns of members that are missing, or diverged."""
    message = lost_message(finished, name=_NAME)
    if not finished.results:
        if finished.interrupted and not finished.lost:
            raise KeyboardInterrupt
        error = finished.lost[-1][1]
        error.add_note(message)
        raise error
    if message:
        warn(message)
    run = join_runs([run for _, run in finished.results], interrupted=finished.interrupted, seconds=seconds)
    lost = run.status == Status.DIVERGED
    if lost.any():
        warn(diverged_message(np.asarray(run.ensemble.ids)[lost], run.stopped_at[lost], run.fault[lost]))
    return run
