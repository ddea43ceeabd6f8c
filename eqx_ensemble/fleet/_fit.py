import os
from collections.abc import Callable
from typing import Any, Unpack, overload

import equinox as eqx
import numpy as np

from .._check import check_optional_function
from .._ensemble import Ensemble, M
from .._pytree import PyTree
from ..train._check import check_no_transformation, check_some_training
from ..train._run import Run
from ..train._state import TrainState
from ..train._status import Status
from ..train.compiled._optimiser import Optimiser
from ..train.resume._check import check_checkpoint_options
from ._begin import check_ids_of_function, shapes_of_start
from ._call import Call
from ._check import check_folder, check_start
from ._check_saved import check_save_folder
from ._cut import cut_start, ids_of, large_shared
from ._fit_shard import count_of_columns, count_of_run, fit_shard, join_shards
from ._fitting import prepare
from ._identity import call_identity
from ._options import FleetCallOptions, FleetFitOptions
from ._run_shards import Watch
from ._save_shards import save_shards
from ._shard import ShardReport
from ._shard_checkpoints import ShardCheckpoints
from ._sharded_run import ShardedRun

_NAME = "fleet.fit"


Start = Ensemble[M] | TrainState[M] | Run[M] | Callable[[np.ndarray], Ensemble[M] | tuple[Ensemble[M], eqx.nn.State]]


@overload
def fit(
    executor: Any,
    ensemble: Start[M],
    loss: Callable[..., Any],
    optimiser: Optimiser,
    data: PyTree | Callable[[np.ndarray], Any],
    *,
    save: None = None,
    **options: Unpack[FleetCallOptions],
) -> Run[M]: ...
@overload
def fit(
    executor: Any,
    ensemble: Start[M],
    loss: Callable[..., Any],
    optimiser: Optimiser,
    data: PyTree | Callable[[np.ndarray], Any],
    *,
    save: str | os.PathLike[str],
    **options: Unpack[FleetCallOptions],
) -> ShardedRun[M]: ...
def fit(
    executor: Any,
    ensemble: Ensemble[M] | TrainState[M] | Run[M] | Callable[[np.ndarray], Any],
    loss: Callable[..., Any],
    optimiser: Optimiser,
    data: PyTree | Callable[[np.ndarray], Any],
    *,
    save: str | os.PathLike[str] | None = None,
    shard: int | None = None,
    workers: int | None = None,
    retries: int = 2,
    checkpoint: str | os.PathLike[str] | None = None,
    ids: Any = None,
    on_shard: Callable[[ShardReport], Any] | None = None,
    progress: bool | None = None,
    key: Any,
    **options: Unpack[FleetFitOptions],
) -> Run[M] | ShardedRun[M]:
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
        cloudpickle (extra `fleet`): by name where workers can import them, else as they are. Or in place of the
        ensemble a function, called on the worker with the ids of a shard's members, that returns an ensemble of them,
        or that and its `equinox.nn.State`: `lambda ids: ee.build(make, ids=ids, key=key)`. Their members then exist
        nowhere else.
    - `ids`: the ids of all members, with such a function: `range(100_000)`.
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
        shard whose worker died goes on from there, and so does a call with the same arguments. It has the shards of the
        call before, also with another number of workers; another `shard` raises an error. With `resume="never"` the
        folder must have no checkpoints when the call begins, with `"must"` some.
    - `save`: a folder that all workers can write, in which each shard saves its trained members, atomically, instead
        of sending them back; neither optimiser states nor curves are kept. A call with the same arguments does only the
        shards that are not there: nothing is lost when the caller is killed. Another call raises an error that lists
        the differences; `plan`, `scan`, `checkpoint`, `retries` and the executor may differ. Functions are compared by
        their code.
    - `on_shard`: called here with an [`eqx_ensemble.fleet.ShardReport`][] of each shard as it ends, also of one that is
        given up. Its exceptions end the call.
    - `progress`: whether to show a progress line, with members done, stopped and diverged and the time left; by default
        on a terminal or in a notebook.
    - `options`: of [`eqx_ensemble.fit`][]. `hyper`, `rows`, `state`, `target` and `max_steps` are cut to the members of
        each shard. Refused is what depends on the other members or on the clock: `max_seconds`, `plan="auto"`,
        `on_diverge="raise"`, revivals by copies, and `callbacks`. `mesh` is a function that is called on the worker,
        such as `ee.make_mesh`: a shard then runs on all devices of its worker.

    **Returns:** the run of all members. Members of shards whose workers died too often are missing, and so are those
    that were not done when Ctrl-C ended the call: a warning says so, and `run.ensemble.ids` tells who is there. With
    `save`, an [`eqx_ensemble.fleet.ShardedRun`][], whose members are in files.

    **Raises:** as [`eqx_ensemble.fit`][]; an error on a worker is raised here with a note that names its members.
    `concurrent.futures.BrokenExecutor` if no shard was done; `BlockingIOError` while another call uses the folder of
    `save`.

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
    check_no_transformation(name=_NAME)
    wanted = check_ids_of_function(ensemble, ids, name=_NAME)
    if wanted is None:
        check_start(ensemble, name=_NAME)
    check_optional_function(on_shard, "on_shard", name=_NAME, example="lambda report: print(report)")
    folder = check_folder(checkpoint, name=_NAME)
    save_folder = None if save is None else check_save_folder(save, name=_NAME)
    ids_of_all = ids_of(ensemble) if wanted is None else wanted
    if isinstance(ensemble, Run):
        check_some_training(ensemble.status == Status.OK, ids=ids_of_all)
    given = dict(options)
    resume: Any = given.pop("resume", "auto")
    check_checkpoint_options(checkpoint, given.get("checkpoint_every"), resume, name=_NAME)
    fitting = prepare(loss, optimiser, data, given, len(ids_of_all), name=_NAME, key=key)
    common = fitting.common if wanted is None else fitting.common | {"make": ensemble}
    checkpoints = ShardCheckpoints(folder, len(ids_of_all), shard=shard, resume=resume, name=_NAME)

    def part(positions: np.ndarray) -> dict[str, Any]:
        start = cut_start(ensemble, positions) if wanted is None else None
        return fitting.part(start, positions, ids_of_all[positions], checkpoints.path(positions))

    shared = large_shared(ensemble) if wanted is None else []
    call = Call(_NAME, fit_shard, common, part, [*fitting.arrays, *shared], ids_of_all)
    how = {"shard": shard, "workers": workers, "retries": retries}
    if save_folder is None:
        watch = Watch(progress, count=count_of_run, on_shard=on_shard)
        continued = ensemble.seconds if isinstance(ensemble, Run) else 0.0
        return join_shards(call, executor, checkpoints, **how, watch=watch, continued=continued)
    functions = {"loss": loss, "optimiser": optimiser}
    texts = call_identity(ensemble, ids_of_all, functions, given | fitting.sources, key=key)
    like = shapes_of_start(ensemble, ids_of_all, given.get("state"), name=_NAME)
    watch = Watch(progress, count=count_of_columns, on_shard=on_shard)
    return save_shards(call, executor, save_folder, checkpoints, texts, like, **how, watch=watch)
