import dataclasses
import inspect
import os
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, Required, Unpack, overload

import equinox as eqx
import numpy as np
from jax.sharding import Mesh

from .._axes import check_rows_of_data
from .._caller import caller
from .._check import check_integers_fit, check_key, check_optional_function, check_positive_int
from .._ensemble import Ensemble, M, check_model_state_given, ids_of, take
from .._pytree import PyTree
from ..checkpoint import Checkpoints
from ..distributed import to_host
from ..plan import AbstractPlan
from ..plan._engine import as_plan
from ..train._engine import (
    CommonFitOptions,
    Optimiser,
    Options,
    Revive,
    RowReader,
    Run,
    Status,
    Stopping,
    TrainState,
    as_row_indices,
    check_batch_size,
    check_hyper_used,
    check_loss_signature,
    check_no_scan,
    check_no_transformation,
    check_not_given_again,
    check_optimiser,
    check_optimiser_kind,
    check_options,
    check_same_mode,
    check_same_structure,
    check_some_training,
    check_state,
    is_data_function,
    limits_of,
    make_limits,
    missing_validation_message,
    partition_trainable,
    stop_at_limits,
    without_marks,
)
from ._check import check_divisible, check_folder, check_start
from ._divide import (
    check_ids_of_function,
    large_arrays,
    large_shared,
    member_options,
    on_host,
    shapes_of_start,
    take_options,
)
from ._fit_shard import count_of_columns, count_of_run, fit_shard, join_shards, save_shards
from ._folder import ShardCheckpoints, call_identity, check_save_folder
from ._run_shards import Call, Hooks
from ._shard import ShardReport, members_text
from ._sharded_run import ShardedRun


class FleetFitOptions(CommonFitOptions, total=False):
    """The options of `fit` that `fleet.fit` takes."""

    on_diverge: Literal["freeze"] | Revive
    plan: AbstractPlan | None
    mesh: Callable[[], Mesh] | None


class FleetCallOptions(FleetFitOptions, total=False):
    """All options of `fleet.fit` except `save`, which determines the type of its result."""

    shard: int | None
    workers: int | None
    retries: int
    checkpoint: str | os.PathLike[str] | Checkpoints | None
    ids: Any
    on_shard: Callable[[ShardReport], Any] | None
    progress: bool | None
    key: Required[Any]


# The checks of `fit`, in the caller's process: on workers, its errors would come after shards were submitted.

_KNOWN = sorted(FleetFitOptions.__optional_keys__)
_REFUSED = ("callbacks",)  # unless they are `None`
_CHECKED = set(inspect.signature(check_options).parameters)


def check_known(options: Iterable[str]) -> None:
    """Raises for options that `fit` does not have."""
    for word in options:
        if word not in _KNOWN and word not in _REFUSED:
            known = ", ".join(f"`{known}`" for known in _KNOWN)
            raise TypeError(f"`{caller()}` has no option `{word}`.\nIts options are {known}.")


def check_start_options(begun: Any, optimiser: Any, options: dict[str, Any], given: Options) -> None:
    """Raises for options that the start of a run does not take, or lacks; `None` is built on the worker."""
    check_optimiser_kind(optimiser)
    if begun is None or isinstance(begun, Ensemble):
        check_optimiser(optimiser, hyper=options.get("hyper"))
    if isinstance(begun, Ensemble):
        check_integers_fit((begun.stacked, begun.shared), argument="ensemble")
        check_model_state_given(begun.stacked, options.get("state"))
        partition_trainable(begun, options.get("trainable", eqx.is_inexact_array))
    elif begun is not None:
        again = [word for word in ("state", "hyper") if options.get(word) is not None]
        again += ["trainable"] * (options.get("trainable", eqx.is_inexact_array) is not eqx.is_inexact_array)
        check_not_given_again(again)
        check_state(_train_state(begun), optimiser)
        selection = begun.selection if isinstance(begun, Run) else None
        if selection is not None and given.validation is None:
            raise TypeError(missing_validation_message())
        if selection is not None:
            check_same_mode(given.scoring[1], selection.mode)


def _train_state(begun: Any) -> Any:
    return begun.train_state if isinstance(begun, Run) else begun


def check_losses(begun: Any, loss: Any, score: Any, optimiser: Any, options: dict[str, Any]) -> None:
    """Raises unless the loss and the score can be called as documented, and use the hyper-parameters if any."""
    if begun is None and callable(loss):  # whether its members have a state is seen on the worker
        return
    first = begun is None or isinstance(begun, Ensemble)
    hyper = options.get("hyper") if first else _train_state(begun).hyper
    stateful = (options.get("state") if first else _train_state(begun).model_state) is not None
    fns = [loss] if score is None else [loss, score]
    wants_hyper = [check_loss_signature(fn, stateful=stateful, hyper=hyper) for fn in fns]
    if hyper is not None:
        check_hyper_used(optimiser, wants_hyper=any(wants_hyper))


def check_data(sources: dict[str, Any], num_members: int, options: dict[str, Any], given: Options) -> None:
    """Raises unless data and validation data are arrays of rows, and fit to `batch_size` and `rows`."""
    data, validation = sources["data"], sources["validation"]
    of_arrays = lambda x, word: check_rows_of_data(x, num_members, argument=word, finite=False)
    if not is_data_function(data):
        if isinstance(data, RowReader):
            check_no_scan(as_plan(options.get("plan")).scan)
        num_rows = data.num_rows if isinstance(data, RowReader) else of_arrays(data, "data")
        rows = as_row_indices(options.get("rows"), num_members, num_rows)
        check_batch_size(options.get("batch_size"), num_rows if rows is None else rows.shape[1])
    if validation is None or is_data_function(validation):
        return
    of_arrays(validation, "validation")
    if given.scoring[0] is None and not is_data_function(data) and not isinstance(data, RowReader):
        check_same_structure(without_marks(validation), without_marks(data))


# The arguments of `fit`, divided into those common to all shards and those of each shard.


class Fitting(NamedTuple):
    """A call of `fit`, divided into shards.

    **Attributes:**

    - `common`: the arguments common to all shards.
    - `own`: the options with one value per member.
    - `sources`: data and validation data, or functions that make them on the worker.
    - `stop`: when members stop.
    - `identity`: what identifies the call, by name.
    """

    common: dict[str, Any]
    own: dict[str, Any]
    sources: dict[str, Any]
    stop: Stopping
    identity: dict[str, Any]

    @property
    def arrays(self) -> list[Any]:
        """The arrays that are sent to each worker once."""
        return [array for x in self.sources.values() if not is_data_function(x) for array in large_arrays(x)]

    def part(self, start: Any, positions: np.ndarray, ids: np.ndarray, checkpoint: Any) -> dict[str, Any]:
        """The arguments of the shard at `positions`, which starts from `start`."""
        sources = {word: x if is_data_function(x) else take(x, positions) for word, x in self.sources.items()}
        options = take_options(self.own, positions) | {"stop": take(self.stop, positions)}
        return {"start": start, "ids": ids, "sources": sources, "checkpoint": checkpoint, "options": options}


def prepare(
    loss: Callable[..., Any],
    optimiser: Optimiser,
    data: Any,
    options: dict[str, Any],
    num_members: int,
    *,
    begun: Any,
    key: Any,
) -> Fitting:
    """Checks the arguments of `fit`, and divides them into common and per-member ones.

    `begun` is an ensemble, a training state or a run; or `None` for ensembles that are built on the worker.
    """
    plan = as_plan(options.get("plan"))
    check_divisible(options, plan, options.get("on_diverge", "freeze"), data)
    check_known(options)
    given = check_options(**{word: value for word, value in options.items() if word in _CHECKED})
    if given.stop.seconds is not None:
        raise TypeError(f"`{caller()}` does not take `seconds`: the steps would depend on the speed of the worker.")
    if options.get("batch_size") is not None:
        check_positive_int(options["batch_size"], "batch_size")
    check_key(key)
    own = member_options(options, num_members)
    held_out, (score, mode) = given.validation, given.scoring
    arrays = (("data", data), ("validation", None if held_out is None else held_out.data))
    sources = {word: x if is_data_function(x) else on_host(x, word) for word, x in arrays}
    check_start_options(begun, optimiser, options | own, given)
    check_losses(begun, loss, score, optimiser, options)
    check_data(sources, num_members, options | own, given)
    stops = limits_of(given.stop, num_members)
    common = {"loss": loss, "optimiser": optimiser, "plan": plan, "key": key}
    common |= {word: value for word, value in options.items() if word not in common | own | sources | {"stop": None}}
    common["validation"] = None if held_out is None else dataclasses.replace(held_out, data=())
    identity = options | own | sources | {"score": score, "mode": mode} | given.improving
    identity |= {f"stop.{word}": stops[word] for word in ("target", "steps")}
    return Fitting(common, own, sources, given.stop, {word: x for word, x in identity.items() if word != "stop"})


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
    checkpoint: str | os.PathLike[str] | Checkpoints | None = None,
    ids: Any = None,
    on_shard: Callable[[ShardReport], Any] | None = None,
    progress: bool | None = None,
    key: Any,
    **options: Unpack[FleetFitOptions],
) -> Run[M] | ShardedRun[M]:
    """Trains members on many workers: each shard of members is one [`eqx_ensemble.fit`][], on any worker.

    The result equals that of one [`eqx_ensemble.fit`][]: bit for bit under [`eqx_ensemble.plan.Sequential`][], within
    rounding under other plans.

    **Arguments:**

    - `executor`: a `concurrent.futures.Executor` or its like, or preferably a function that makes one, which can
        replace a broken pool; a Dask client; or `None` for a local Dask cluster (extra `dask`). Process pools must not
        fork: `ProcessPoolExecutor(2, multiprocessing.get_context("spawn"))`, in a script below
        `if __name__ == "__main__":`.
    - `ensemble`, `loss`, `optimiser`, `key`: as for [`eqx_ensemble.fit`][]. Functions that workers cannot import are
        sent by value (extra `fleet`). `ensemble` may be a function, called on the worker with the ids of a shard, that
        returns their ensemble, or a pair with its `equinox.nn.State`: `lambda ids: ee.build(make, ids=ids, key=key)`.
    - `ids`: the ids of all members, with such a function: `range(100_000)`.
    - `data`, `validation`: arrays, as for [`eqx_ensemble.fit`][]; or a function, called on the worker with the ids of a
        shard `(n,)`, that returns them, or batches. Without Dask, large shared arrays are memory-mapped files: workers
        on other machines need functions.
    - `shard`: the number of members per shard, at least 2; by default each worker gets about sixteen shards. A shard
        should take minutes: a worker needs seconds to import JAX, and compiles for at most two sizes.
    - `workers`: the number of workers; by default one per core of this machine, or per thread of Dask's workers.
    - `retries`: how often a shard is retried after its worker died; then it is abandoned.
    - `checkpoint`: a folder that all workers can write, or [`eqx_ensemble.checkpoint.Checkpoints`][]. A shard resumes
        from there if its worker died, or if the same call is run again with the same `shard`.
    - `save`: a folder that all workers can write, in which each shard saves its trained members instead of returning
        them. The same call trains only the missing shards; a different call raises an error. `plan`, `mesh`,
        `checkpoint`, `retries`, `workers` and the executor may differ.
    - `on_shard`: called in the caller's process with an [`eqx_ensemble.fleet.ShardReport`][] of each shard.
    - `progress`: whether to show a progress line; by default on a terminal or in a notebook.
    - `options`: of [`eqx_ensemble.fit`][]. `mesh` is a function called on the worker, such as `ee.make_mesh`. Not
        possible are `plan="auto"`, `on_diverge="raise"`, `callbacks`, revivals by copies and the `seconds` of `stop`.

    **Returns:** the run of all members, or with `save` an [`eqx_ensemble.fleet.ShardedRun`][]. Members of shards that
    were abandoned, or incomplete at Ctrl-C, are missing, with a warning.

    **Raises:** as [`eqx_ensemble.fit`][], with a note that names the members; `TypeError` for options that are not
    possible; `concurrent.futures.BrokenExecutor`, or the engine's own error, or `KeyboardInterrupt`, if no shard was
    completed; `ValueError` if `checkpoint` or `save` holds a different call; `BlockingIOError` while another call uses
    the folder of `save`.

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
    check_no_transformation()
    wanted = check_ids_of_function(ensemble, ids)
    if wanted is None:
        check_start(ensemble)
    check_optional_function(on_shard, "on_shard", example="lambda report: print(report)")
    saved = check_folder(checkpoint)
    save_folder = None if save is None else check_save_folder(save)
    ids_of_all = np.asarray(ids_of(ensemble)) if wanted is None else wanted
    given = dict(options)
    begun: Any = ensemble if wanted is None else None
    fitting = prepare(loss, optimiser, data, given, len(ids_of_all), begun=begun, key=key)
    training = _training(ensemble, fitting.stop)
    if training is not None:
        check_some_training(training, ids=ids_of_all)
    common = fitting.common if wanted is None else fitting.common | {"make": ensemble}
    checkpoints = ShardCheckpoints(saved, len(ids_of_all), shard=shard)

    def part(positions: np.ndarray) -> dict[str, Any]:
        start = begun[positions] if wanted is None else None
        if isinstance(start, TrainState) and training is not None:
            _check_shard_trains(training[positions], ids_of_all[positions])
        return fitting.part(start, positions, ids_of_all[positions], checkpoints.of_shard(positions))

    shared = large_shared(ensemble) if wanted is None else []
    call = Call(fit_shard, common, part, [*fitting.arrays, *shared], ids_of_all)
    how = {"shard": shard, "workers": workers, "retries": retries, "data": fitting.sources["data"]}
    how["first_step"] = int(_state(ensemble).step) if isinstance(ensemble, Run | TrainState) else 0
    if save_folder is None:
        hooks = Hooks(progress, count=count_of_run, on_shard=on_shard)
        continued = ensemble.seconds if isinstance(ensemble, Run) else 0.0
        return join_shards(call, executor, checkpoints, **how, hooks=hooks, continued=continued)
    functions = {"loss": loss, "optimiser": optimiser}
    texts = call_identity(ensemble, ids_of_all, functions, fitting.identity, key=key)
    like = shapes_of_start(ensemble, ids_of_all, given.get("state"))
    hooks = Hooks(progress, count=count_of_columns, on_shard=on_shard)
    return save_shards(call, executor, save_folder, checkpoints, texts, like, **how, hooks=hooks)


def _state(begun: Run[Any] | TrainState[Any]) -> TrainState[Any]:
    return begun.train_state if isinstance(begun, Run) else begun


def _training(begun: Any, stop: Stopping) -> np.ndarray | None:
    """Whether each member of a run or a training state is left to train; `None` for members that begin."""
    if not isinstance(begun, Run | TrainState):
        return None
    state = _state(begun)
    limits = make_limits(limits_of(stop, state.num_members)["steps"], None, state.num_members)
    return to_host(stop_at_limits(state.moving, limits, state.step).status) == Status.OK


def _check_shard_trains(training: np.ndarray, ids: np.ndarray) -> None:
    """Raises if no member of a shard trains: a training state has no history to return for them."""
    if not training.any():
        raise ValueError(
            f"`{caller()}` needs in each shard of a training state at least one member that trains; "
            f"{members_text(ids)}, a shard, have all stopped or diverged.\nPass the run instead, which has their "
            "history."
        )
