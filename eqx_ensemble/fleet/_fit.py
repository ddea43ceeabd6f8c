import os
from collections.abc import Callable
from typing import Any, Unpack, overload

import equinox as eqx
import numpy as np

from .._check import check_optional_function
from .._ensemble import Ensemble, M
from .._pytree import PyTree
from ..distributed import to_host
from ..train._check import check_length, check_no_transformation, check_some_training
from ..train._run import Run
from ..train._state import TrainState
from ..train._status import Status
from ..train.compiled._limits import make_limits, stop_at_limits
from ..train.compiled._optimiser import Optimiser
from ..train.resume._check import check_checkpoint_options
from ._call import Call
from ._check import check_folder, check_start
from ._check_saved import check_save_folder
from ._divide import ids_of, large_shared, take_members
from ._fit_shard import count_of_columns, count_of_run, fit_shard, join_shards
from ._fitting import prepare
from ._identity import call_identity
from ._make_members import check_ids_of_function, shapes_of_start
from ._options import FleetCallOptions, FleetFitOptions
from ._run_shards import Hooks
from ._save_shards import save_shards
from ._shard import ShardReport, members_text
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
    """Trains members on many workers: each shard of members is one [`eqx_ensemble.fit`][], on any worker.

    Members are independent, and their random streams are derived from their ids. The result therefore equals that of
    one [`eqx_ensemble.fit`][]: bit for bit under [`eqx_ensemble.plan.Sequential`][], within rounding under other plans,
    for any shard size and any order in which workers finish.

    **Arguments:**

    - `executor`: an executor with the interface of `concurrent.futures.Executor`; preferably a function that makes one,
        which is called again when a dead worker breaks the pool; a Dask client; or `None` for a local Dask cluster with
        one worker per core (extra `dask`). Process pools of the standard library must not fork:
        `ProcessPoolExecutor(2, multiprocessing.get_context("spawn"))`, in a script below `if __name__ == "__main__":`.
    - `ensemble`, `loss`, `optimiser`, `key`: as for [`eqx_ensemble.fit`][]. Functions are sent with cloudpickle (extra
        `fleet`): by reference where workers can import them, otherwise by value. `ensemble` may also be a function that
        builds the members on the worker: called with the ids of a shard, it returns an ensemble with these ids, or a
        pair of it and its `equinox.nn.State`: `lambda ids: ee.build(make, ids=ids, key=key)`. With `save`, it is also
        called once in the caller's process, for two ids, to determine shapes.
    - `ids`: the ids of all members, with such a function: `range(100_000)`.
    - `data`: arrays, as for [`eqx_ensemble.fit`][]; or a function, called on the worker with the ids of a shard `(n,)`,
        that returns their data: arrays, parts of them marked [`eqx_ensemble.Each`][], or batches. A Module with arrays
        is data, and its methods are functions. The same holds for `validation`. Arrays above 64 KiB that all members
        share, here or in the ensemble, are scattered by Dask; other executors pass them as memory-mapped files, which
        workers on other machines cannot read: use functions there.
    - `shard`: the number of members per shard, at least 2, because one member alone is compiled to another program. By
        default each worker gets about sixteen shards. A shard should take minutes: a worker needs seconds to import
        JAX, and compiles for at most two shard sizes.
    - `workers`: the number of workers. By default one per core of this machine, or one per thread of Dask's workers,
        which are counted again at each submission. Twice as many shards are in flight.
    - `retries`: how often a shard is retried after its worker died; then it is abandoned.
    - `checkpoint`: a folder that all workers can write, in which each shard saves its run in a subfolder. A shard whose
        worker died resumes from there, and rerunning the same call resumes all shards. The division into shards is
        kept, whatever the number of workers; another `shard` raises an error. With `resume="never"` the folder must
        hold no checkpoints when the call starts, with `"must"` some.
    - `save`: a folder that all workers can write, in which each shard saves its trained members atomically instead of
        returning them; optimiser states and curves are not kept. Rerunning the same call trains only the missing
        shards, also after the caller was killed. A different call raises an error that lists the differences, once a
        shard is completed; `plan`, `scan`, `mesh`, `checkpoint`, `checkpoint_every`, `resume`, `retries`, `workers` and
        the executor may differ. Functions and classes are compared by their code and by the globals that they read,
        down to those of installed libraries, which are compared by version. Settings of JAX that change random numbers
        or dtypes must be the same.
    - `on_shard`: called in the caller's process with an [`eqx_ensemble.fleet.ShardReport`][] of each shard that is
        completed or abandoned. Its exceptions end the call.
    - `progress`: whether to show a progress line, with the numbers of members completed, stopped and diverged and the
        time left; by default on a terminal or in a notebook.
    - `options`: of [`eqx_ensemble.fit`][]. `hyper`, `rows`, `state`, `target` and `max_steps` are divided among shards.
        Options that depend on other members or on the clock raise a `TypeError`: `max_seconds`, `plan="auto"`,
        `on_diverge="raise"`, revivals by copies, and `callbacks`. `mesh` is a function called on the worker, such as
        `ee.make_mesh`: a shard then runs on all devices of its worker.

    **Returns:** the run of all members. Members of abandoned shards, and of shards that were incomplete when Ctrl-C
    ended the call, are missing: a warning says so, and `run.ensemble.ids` lists those present. Members whose shard
    Ctrl-C ended on its worker have the status `STOPPED` at their last step. With `save`, an
    [`eqx_ensemble.fleet.ShardedRun`][], whose members are in files.

    **Raises:** as [`eqx_ensemble.fit`][]; an error on a worker is raised in the caller's process with a note that names
    its members. `concurrent.futures.BrokenExecutor`, or the engine's own error, if no shard was completed;
    `KeyboardInterrupt` if Ctrl-C came before that. `ValueError` if `checkpoint` or `save` holds a different call;
    `BlockingIOError` while another call uses the folder of `save`.

    ```python
    from concurrent.futures import ThreadPoolExecutor  # threads, for this example

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
    given = dict(options)
    training = _training(ensemble, given.get("max_steps"))
    if training is not None:
        check_some_training(training, ids=ids_of_all)
    resume: Any = given.pop("resume", "auto")
    check_checkpoint_options(checkpoint, given.get("checkpoint_every"), resume, name=_NAME)
    begun = ensemble if wanted is None else None
    fitting = prepare(loss, optimiser, data, given, len(ids_of_all), begun=begun, name=_NAME, key=key)
    check_length(given.get("epochs"), given.get("steps"), name=_NAME)
    common = fitting.common if wanted is None else fitting.common | {"make": ensemble}
    checkpoints = ShardCheckpoints(folder, len(ids_of_all), shard=shard, resume=resume, name=_NAME)

    def part(positions: np.ndarray) -> dict[str, Any]:
        start = take_members(ensemble, positions) if wanted is None else None
        if isinstance(start, TrainState) and training is not None:
            _check_shard_trains(training[positions], ids_of_all[positions])
        return fitting.part(start, positions, ids_of_all[positions], checkpoints.path(positions))

    shared = large_shared(ensemble) if wanted is None else []
    call = Call(_NAME, fit_shard, common, part, [*fitting.arrays, *shared], ids_of_all)
    how = {"shard": shard, "workers": workers, "retries": retries, "data": fitting.sources["data"]}
    how["first_step"] = int(_state(ensemble).step) if isinstance(ensemble, Run | TrainState) else 0
    if save_folder is None:
        hooks = Hooks(progress, count=count_of_run, on_shard=on_shard)
        continued = ensemble.seconds if isinstance(ensemble, Run) else 0.0
        return join_shards(call, executor, checkpoints, **how, hooks=hooks, continued=continued)
    functions = {"loss": loss, "optimiser": optimiser}
    texts = call_identity(ensemble, ids_of_all, functions, given | fitting.own | fitting.sources, key=key)
    like = shapes_of_start(ensemble, ids_of_all, given.get("state"), name=_NAME)
    hooks = Hooks(progress, count=count_of_columns, on_shard=on_shard)
    return save_shards(call, executor, save_folder, checkpoints, texts, like, **how, hooks=hooks)


def _state(begun: Run[Any] | TrainState[Any]) -> TrainState[Any]:
    return begun.train_state if isinstance(begun, Run) else begun


def _training(begun: Any, max_steps: Any) -> np.ndarray | None:
    """Whether each member of a run or a training state is left to train; `None` for members that begin."""
    if not isinstance(begun, Run | TrainState):
        return None
    state = _state(begun)
    limits = make_limits(max_steps, None, state.num_members, min_delta=0.0)
    return to_host(stop_at_limits(state.moving, limits, state.step).status) == Status.OK


def _check_shard_trains(training: np.ndarray, ids: np.ndarray) -> None:
    """Raises if no member of a shard trains: a training state has no history to return for them."""
    if not training.any():
        raise ValueError(
            f"`{_NAME}` needs in each shard of a training state at least one member that trains; {members_text(ids)}, "
            "a shard, have all stopped or diverged.\nPass the run instead, which has their history."
        )
