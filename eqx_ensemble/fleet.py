"""Training on many workers: each shard of members is one `fit` with a checkpoint, which any worker begins or continues.

The checkpoints are the only state. The caller makes the same calls as its workers, but only to read: so it finds which
shards are finished, and so it gets their runs. A worker that dies, a caller that is interrupted and a call that is
repeated are one case.
"""

import contextlib
import dataclasses
import functools as ft
import io
import os
import pickle
import re
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from ._axes import Each, map_each
from ._by_name import import_object, is_importable
from ._caller import caller
from ._check import check_installed, check_positive_int, check_sequence, is_key, kind_text
from ._ensemble import Ensemble, M, concatenate, take
from ._foreign import as_numpy
from ._progress import members_in_words, progress_line
from ._pytree import PyTree
from ._save import replacing
from ._warnings import ignore_warnings
from .plan import Cores
from .train._engine import (
    Optimiser,
    Revive,
    Run,
    UnfinishedError,
    align_histories,
    allow_idle,
    check_no_transformation,
    check_optimiser_kind,
    hyper_arrays,
    is_data_function,
    only_read,
    warn_of_diverged,
)
from .train._engine import fit as fit_here

__all__ = ["fit"]

_REFUSED = {
    "callbacks": "workers would call them, with the members of one shard",
    "checkpoint": "each shard has its own in `folder`",
    "mesh": "its devices are those of this process; a function can build the ensemble on the mesh of its worker",
    "on_diverge": "a donor would come from the same shard; `ee.train.Revive(make)` revives by new members",
}
# The settings of JAX by which results differ; workers take those of the caller.
_SETTINGS = {
    "jax_enable_x64": jax.enable_x64,
    "jax_threefry_partitionable": jax.threefry_partitionable,
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
}


class _Shards(NamedTuple):
    """The arguments of a call, the positions of the members of each shard, and the folder of their checkpoints."""

    call: tuple[Any, ...]
    positions: list[np.ndarray]
    folder: Path

    def select(self, i: int) -> tuple[Any, ...]:
        """The arguments of a shard."""
        return take(self.call, self.positions[i])

    def path(self, i: int) -> Path:
        """The checkpoint of a shard."""
        return self.folder / f"shard-{i:05d}-of-{len(self.positions):05d}"

    def text(self, i: int) -> str:
        """A shard in words."""
        return f"shard {i} (members {self.positions[i][0]} to {self.positions[i][-1]})"


def fit(
    executor: Any,
    ensemble: Ensemble[M] | Callable[[np.ndarray], Any],
    loss: Callable[..., Any],
    optimiser: Optimiser,
    data: PyTree,
    *,
    folder: str | os.PathLike[str],
    shards: int,
    ids: Any = None,
    cores: int | None = 1,
    progress: bool | None = None,
    **options: Any,
) -> Run[M]:
    """Trains members on workers: each shard of members is one [`eqx_ensemble.fit`][], on any worker.

    A worker saves its shard in `folder`; this process reads the files, and joins the runs. The result is that of one
    [`eqx_ensemble.fit`][]: bit for bit if the plan gives blocks of equal size, as [`eqx_ensemble.plan.Sequential`][]
    does, else within rounding.

    After any failure, make the same call again: finished shards are only read, and others continue from where they were
    saved. With more `epochs`, all continue.

    **Arguments:**

    - `executor`: has `submit(fn, *args)`, whose future has `result()`: a pool of processes, which must not fork, or of
        threads; of loky, Parsl or submitit; a Dask client.
    - `ensemble`: an ensemble; or a function, called on the worker with the ids `(n,)` of a shard, that returns theirs,
        or a pair with their `equinox.nn.State`: `lambda ids: ee.build(make, ids=ids, key=key)`.
    - `loss`, `optimiser`, `data`, `options`: as for [`eqx_ensemble.fit`][], with `key`. `data` may be a function of the
        ids of a shard. Functions are sent by value (extra `fleet`), classes of Modules by name: they must be in a file
        that workers can import.
    - `folder`: a folder of this call alone. Workers that do not see it send the content of their files to this process.
    - `shards`: the number of shards. With at least two members in each, all round alike.
    - `ids`: the ids of all members, if `ensemble` is a function.
    - `cores`: the cores that a worker uses, the `count` of [`eqx_ensemble.plan.Cores`][]; `None` for all that it finds.
    - `progress`: whether to show how many shards are finished; by default on a terminal or in a notebook.

    **Returns:** the run of all members. Its `seconds` are those of the longest shard.

    **Raises:** the error of the first shard that failed, when the others have finished, with a note that names it;
    `concurrent.futures.BrokenExecutor` if workers died, and died again where the executor has new ones; `ImportError`
    for what a worker cannot import; `ValueError` if `folder` holds another call; `TypeError` for options whose result
    would depend on the shards. Ctrl-C cancels shards that have not begun.

    ```python
    import tempfile
    from concurrent.futures import ThreadPoolExecutor  # threads, for this example

    def mse(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 8, key=key)
    data = jnp.ones((64, 3)), jnp.zeros((64, 1))
    saving = {"folder": tempfile.mkdtemp(), "shards": 2}
    with ThreadPoolExecutor(2) as executor:
        run = ee.fleet.fit(executor, ensemble, mse, optax.adam(1e-2), data, epochs=2, key=key, **saving)
    run.predict(data[0]).shape  # (8, 64, 1)
    ```
    """
    check_no_transformation()
    _check(executor, optimiser, options)
    ids = _ids_of(ensemble, ids)
    if check_positive_int(shards, "shards") > len(ids):
        raise ValueError(f"`{caller()}` needs at most one shard per member: {len(ids)} members, `shards={shards}`.")
    own: dict[str, Any] = {}
    if options.get("hyper") is not None:
        own["hyper"] = Each(hyper_arrays(options["hyper"], len(ids)))
    if options.get("rows") is not None:
        own["rows"] = Each(as_numpy(map_each(lambda rows: rows, options["rows"]), "rows"))
    plan = options.get("plan") or Cores()
    if isinstance(plan, Cores) and plan.count is None:
        own["plan"] = dataclasses.replace(plan, count=cores)
    call = (ensemble, Each(ids), loss, optimiser, data, options | own)
    parts = _Shards(call, np.array_split(np.arange(len(ids)), shards), Path(folder).absolute())
    with progress_line(show=progress, description=members_in_words(len(ids)), unit="shard", total=shards) as line:
        run = _join(_train(executor, parts, line.update))
    warn_of_diverged(run, ids, first_step=0, data=data)
    return run


def _check(executor: Any, optimiser: Any, options: dict[str, Any]) -> None:
    context = getattr(executor, "_mp_context", None)  # of a `ProcessPoolExecutor`
    if context is not None and context.get_start_method() == "fork":
        raise ValueError(
            f"`{caller()}` needs processes that are spawned, and this executor forks: JAX is multithreaded, and forked "
            "processes can deadlock.\n"
            "Write `ProcessPoolExecutor(2, multiprocessing.get_context('spawn'))`, in a script below "
            "`if __name__ == '__main__':`."
        )
    check_optimiser_kind(optimiser)
    for word, reason in _REFUSED.items():
        how = options.get(word)
        copies = how == "revive" or (isinstance(how, Revive) and how.make is None)
        if how is not None and (word != "on_diverge" or copies):
            raise TypeError(f"`{caller()}` does not take `{word}={how!r}`: {reason}.")


def _ids_of(ensemble: Any, ids: Any) -> np.ndarray:
    """The ids of all members."""
    if isinstance(ensemble, Ensemble) and ids is None:
        return np.asarray(ensemble.ids)
    if isinstance(ensemble, Ensemble) or not callable(ensemble) or ids is None:
        raise TypeError(
            f"`{caller()}` needs an `Ensemble`, or a function that builds one and the `ids` of all members, such as "
            f"`ids=range(1000)`; got {kind_text(ensemble)} {'without' if ids is None else 'with'} `ids`."
        )
    return np.asarray(check_sequence(ids, "ids", of="integers"))


# In this process.


def _train(executor: Any, shards: _Shards, report: Callable[[int], Any]) -> list[Run[Any]]:
    """The runs of all shards. Unfinished ones are sent to workers, and once more if their workers died."""
    numbers, runs, failed = range(len(shards.positions)), {}, {}
    lost: Exception = InterruptedError("they were interrupted")

    def read(i: int) -> None:
        with contextlib.suppress(UnfinishedError), only_read():
            runs[i] = _fit(shards.select(i), shards.path(i))
            report(1)

    shards.folder.mkdir(parents=True, exist_ok=True)
    # By a listing: file systems of several machines may remember for a while that there was no file of a name.
    listed = {name for name in os.listdir(shards.folder) if re.fullmatch(r"shard-\d+-of-\d+", name)}
    if others := listed - {shards.path(i).name for i in numbers}:
        raise ValueError(
            f"`{caller()}` needs a folder of this call alone, with `shards={len(numbers)}`; `{shards.folder}` holds "
            f"`{min(others)}`."
        )
    for i in numbers:
        if i == 0 or shards.path(i).name in listed:  # the first one, whose errors are those of the call, in any case
            read(i)
    for attempt in range(2):
        left = [i for i in numbers if i not in runs and i not in failed]
        if not left:
            break
        with _submit(executor, shards, left, attempt) as futures:
            for i, future in futures.items():
                try:
                    error, content = future.result()
                except Exception as died:  # a user's error is returned
                    lost = died
                    continue
                if content is not None:
                    with replacing(shards.path(i)) as file:
                        file.write_bytes(content)
                if error is None:
                    read(i)
                else:
                    failed[i] = pickle.loads(error)
                    failed[i].add_note(
                        f"Raised by {shards.text(i)}. Finished shards are kept: the next call reads them."
                    )
    if failed:
        raise failed[min(failed)]
    if len(runs) < len(numbers):
        names = ", ".join(shards.text(i) for i in numbers if i not in runs)
        raise BrokenExecutor(
            f"`{caller()}` lost its workers ({type(lost).__name__}: {lost}) before the end of {names}.\n"
            "Open a new executor if this one is broken, and call again: finished shards are not trained again. In a "
            "script that spawns processes, call below `if __name__ == '__main__':`."
        ) from lost
    return [runs[i] for i in numbers]


@contextlib.contextmanager
def _submit(executor: Any, shards: _Shards, left: list[int], attempt: int) -> Iterator[dict[int, Any]]:
    """The futures of the shards that are left. If an error ends the block, those that have not begun are cancelled."""
    pairs = zip(jax.tree.leaves(shards.call), jax.tree.leaves(shards.select(0)), strict=True)
    held = [x for x, y in pairs if x is y]  # what all shards have in common: functions, and data without `Each`
    common, settings = _dumps(held), {name: getattr(jax.config, name) for name in _SETTINGS}
    futures: dict[int, Any] = {}
    with tempfile.NamedTemporaryFile(prefix=".seen-", dir=shards.folder) as mark:
        try:
            for i in left:
                path = shards.path(i)
                begun = path.read_bytes() if path.is_file() else None
                own = _dumps((shards.select(i), path, mark.name, begun), held)
                try:
                    futures[i] = executor.submit(_work, common, own, settings, attempt)
                except BrokenExecutor as error:
                    futures[i] = Future()
                    futures[i].set_exception(error)
            yield futures
        except BaseException:
            for future in futures.values():
                future.cancel()
            raise


# On a worker, and in this process to read.


def _work(common: bytes, own: bytes, settings: dict[str, Any], attempt: int) -> tuple[bytes | None, bytes | None]:
    """Trains a shard. Returns its error, and the content of its file if that is not in the caller's folder.

    For executors that keep the results of calls, another `attempt` is another call.
    """
    error = content = None
    with contextlib.ExitStack() as stack:
        for name, value in settings.items():
            stack.enter_context(_SETTINGS[name](value))
        own_folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path = own_folder / "shard"
        try:
            call, shared, mark, begun = _loads(own, _held(common))
            if os.path.exists(mark):
                path = shared
            elif begun is not None:
                path.write_bytes(begun)
            _fit(call, path)
        except Exception as raised:
            error = _error_as_bytes(raised)
        if path.parent == own_folder and path.is_file():
            content = path.read_bytes()
    return error, content


def _fit(call: tuple[Any, ...], path: Path) -> Run[Any]:
    ensemble, ids, loss, optimiser, data, options = call
    own = np.asarray(ids.per_member())
    data = data(own) if is_data_function(data) else data
    if not isinstance(ensemble, Ensemble):
        built = ensemble(own)
        ensemble, state = built if isinstance(built, tuple) else (built, None)
        options = options | {"state": state}
        if not isinstance(ensemble, Ensemble) or not np.array_equal(ensemble.ids, own):
            raise ValueError(
                f"`{caller()}` needs a function that returns an `Ensemble` with the ids that it gets; got "
                f"{kind_text(built)}.\nFor example `lambda ids: ee.build(make, ids=ids, key=key)`."
            )
    # Members of other shards may train, and one warning names those that diverge in any.
    with allow_idle(), ignore_warnings(r"\d+ member\(s\) diverged"):
        return fit_here(ensemble, loss, optimiser, data, checkpoint=path, progress=False, **options)


def _error_as_bytes(error: Exception) -> bytes:
    """An error with its trace on the worker; if it cannot be pickled, another one with that as its text."""
    trace = "On the worker:\n" + "".join(traceback.format_exception(error)).rstrip()
    error.add_note(trace)
    if hasattr(error, "run"):  # the run so far, which is saved
        vars(error)["run"] = None
    try:
        data = _dumps(error)
        pickle.loads(data)
    except Exception:
        return _dumps(RuntimeError(trace))
    return data


# Between processes.

_BY_NAME = (
    "Classes of Modules are sent by name: define them in a file that workers can import, such as a module on their "
    "PYTHONPATH. Locks, open files and connections belong inside of functions."
)
_PLAIN = type | types.FunctionType | types.BuiltinFunctionType


def _dumps(value: Any, held: Sequence[Any] = ()) -> bytes:
    """Pickles a value; what is in `held` by its number there."""
    check_installed("cloudpickle", what="fleet.fit", extra="fleet")
    import cloudpickle

    numbers = {id(x): number for number, x in enumerate(held)}

    class Pickler(cloudpickle.Pickler):
        def persistent_id(self, obj: Any) -> int | None:
            return numbers.get(id(obj))

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, type(eqx.Module)):  # by value, cloudpickle makes a class without fields
                return NotImplemented
            if is_key(obj):  # which JAX before 0.9.2 cannot pickle
                restore = ft.partial(jax.random.wrap_key_data, impl=str(jax.random.key_impl(obj)))
                return restore, (np.asarray(jax.random.key_data(obj)),)
            if callable(obj) and not isinstance(obj, _PLAIN) and is_importable(obj):  # such as `jax.nn.relu`
                return import_object, (obj.__module__, obj.__qualname__)
            return super().reducer_override(obj)

    file = io.BytesIO()
    try:
        Pickler(file).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"`{caller()}` cannot send its arguments to workers: {error}.\n{_BY_NAME}") from error
    return file.getvalue()


class _Unpickler(pickle.Unpickler):
    held: Sequence[Any] = ()

    def persistent_load(self, pid: Any) -> Any:
        return self.held[pid]


def _loads(data: bytes, held: Sequence[Any] = ()) -> Any:
    unpickler = _Unpickler(io.BytesIO(data))
    unpickler.held = held
    try:
        return unpickler.load()
    except (ImportError, AttributeError) as error:
        raise ImportError(f"A worker of `fleet.fit` cannot import what it was sent: {error}.\n{_BY_NAME}") from error


# All shards of a call have the same functions, by whose identity JAX finds compiled programs.
_held = ft.lru_cache(maxsize=2)(_loads)


# Joins the runs of shards.


def _join(runs: Sequence[Run[Any]]) -> Run[Any]:
    """The run of all members, in their order."""
    last, first = max(runs, key=lambda run: int(run.train_state.step)), runs[0]  # in others, all members stopped before
    return concatenate(
        dataclasses.replace(
            run,
            history=history,
            train_state=dataclasses.replace(run.train_state, step=last.train_state.step),
            data_state=last.data_state,
            plan=first.plan,
            epoch=first.epoch,
        )
        for run, history in zip(runs, align_histories([run.history for run in runs]), strict=True)
    )
