"""Training on many workers: each shard of members is one `fit` with a checkpoint, which any worker begins or continues.

The checkpoints are the only state. The caller makes the calls of its workers again, for finished shards, which only
reads them. A worker that dies, a caller that is interrupted and a call that is repeated are one case.
"""

import contextlib
import functools as ft
import importlib
import io
import os
import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

from ._check import check_package, check_positive_int
from ._ensemble import Ensemble, M, check_ensemble, take
from ._foreign import as_numpy, from_foreign_tree
from ._keys import member_keys
from ._load import contents
from ._map import open_marks
from ._marks import Each
from ._progress import members_in_words, progress_line
from ._pytree import PyTree
from ._stack import concatenate
from ._warnings import ignore_warnings
from .plan import Blocks
from .train._fit import check_outside
from .train._fit import fit as fit_here
from .train._meeting import Optimiser, members_meet
from .train._options import Stopping, limits_of
from .train._program import hyper_arrays
from .train._run import Run, warn_of_diverged

__all__ = ["fit"]

# The settings of JAX by which results differ; workers take those of the caller.
_SETTINGS = {
    "jax_enable_x64": jax.enable_x64,
    "jax_threefry_partitionable": jax.threefry_partitionable,
    "jax_default_matmul_precision": jax.default_matmul_precision,
}


def fit(
    executor: Any,
    ensemble: Ensemble[M],
    loss: Callable[..., Any],
    optimiser: Optimiser,
    data: PyTree,
    *,
    folder: str | os.PathLike[str],
    shards: int,
    hyper: PyTree = None,
    rows: Any = None,
    stop: Stopping | None = None,
    progress: bool | None = None,
    key: Any,
    **options: Any,
) -> Run[M]:
    """Trains members on workers: each shard of members is one [`eqx_ensemble.fit`][], on any worker.

    A worker saves its shard in `folder`; this process reads the files, and joins the runs. The result is that of one
    [`eqx_ensemble.fit`][]: bit for bit if the plan gives blocks of equal size, as `plan.Blocks(1)` does, else within
    rounding.

    After any failure, make the same call again: finished shards are only read, and others continue from where they were
    saved. With more `epochs`, all continue.

    **Arguments:**

    - `executor`: has `submit(fn, *args)`, whose future has `result()`: a pool of processes, which must not fork, or of
        threads; of loky, Parsl or submitit; a Dask client.
    - `ensemble`, `loss`, `optimiser`, `data`, `options`: as for [`eqx_ensemble.fit`][]. Functions are sent by value
        (extra `fleet`), classes of Modules by name: they must be in a file that workers can import. A callback gets the
        state of a shard. On a CPU, a worker uses one core unless `plan` says otherwise.
    - `folder`: a folder of this call alone, which all workers and this process see.
    - `shards`: the number of shards. With at least two members in each, all round alike.
    - `progress`: whether to show how many shards are finished; by default on a terminal or in a notebook.
    - `key`: one key, or one per member, as for [`eqx_ensemble.fit`][].

    **Returns:** the run of all members. Its `seconds` are the time of the longest shard.

    **Raises:** the error of the first shard that failed, or that the executor raises for a worker that died, when the
    others have finished. Ctrl-C cancels shards that have not begun.

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
    check_outside()
    check_ensemble(ensemble)
    count = ensemble.num_members
    if check_positive_int(shards, "shards") > count:
        raise ValueError(f"`fleet.fit` needs at most one shard per member: {count} members, `shards={shards}`.")
    check_processes(executor)
    if members_meet(loss, optimiser, getattr(options.get("validation"), "score", None)):
        raise TypeError("`fleet.fit` trains shards apart, and members meet in this loss, optimiser or score.")
    options |= {
        "hyper": None if hyper is None else Each(hyper_arrays(hyper, count)),
        "rows": None if rows is None else Each(as_numpy(rows.value if isinstance(rows, Each) else rows, "rows")),
        "stop": None if stop is None else Stopping(**limits_of(stop, count)),
        "key": Each(member_keys(key, count, purpose="fit")),
    }
    call = from_foreign_tree({"data": data, **options}, "fleet.fit")
    own, rest = open_marks((ensemble, loss, optimiser, call))
    parts = [take(own, index) for index in np.array_split(np.arange(count), shards)]
    files = [Path(folder).absolute() / f"shard-{i:05d}-of-{shards:05d}" for i in range(shards)]
    length = {name: options.get(name) for name in ("epochs", "steps")}
    runs: dict[int, Run[M]] = {}

    def read(i: int) -> None:
        if is_finished(files[i], **length):
            runs[i] = fit_shard(eqx.combine(parts[i], rest), files[i])
            line.update()

    with progress_line(show=progress, description=members_in_words(count), unit="shard", total=shards) as line:
        for i in range(shards):
            read(i)
        left = [i for i in range(shards) if i not in runs]
        failed = train(executor, own, rest, {i: (parts[i], files[i]) for i in left}, read)
    if failed:
        first = min(failed)
        failed[first].add_note(
            f"From shard {first} of `fleet.fit`. Finished shards are kept: the next call reads them."
        )
        raise failed[first]
    if missing := [str(files[i]) for i in left if i not in runs]:
        raise FileNotFoundError(
            f"`fleet.fit` needs a `folder` that workers and this process see; none saved {missing[0]}."
        )
    run = concatenate(runs[i] for i in range(shards))
    warn_of_diverged(run, np.zeros(count, bool))
    return run


def check_processes(executor: Any) -> None:
    """Raises for a pool of processes that forks."""
    context = getattr(executor, "_mp_context", None)  # of a `ProcessPoolExecutor`
    if context is not None and context.get_start_method() == "fork":
        raise ValueError(
            "`fleet.fit` needs processes that are spawned: JAX is multithreaded, and forked ones can deadlock.\n"
            "Write `ProcessPoolExecutor(2, multiprocessing.get_context('spawn'))`, in a script below "
            "`if __name__ == '__main__':`."
        )


def is_finished(file: Path, epochs: int | None, steps: int | None) -> bool:
    """Whether a file holds a run of this length, or one of which no member trains."""
    # By a listing: file systems of several machines may remember for a while that there was no file of a name.
    if not file.parent.exists() or file.name not in os.listdir(file.parent):
        return False
    saved = contents(file).meta["fit"]
    return not saved["trains"] or (saved["epoch"] >= epochs if steps is None else saved["done"] >= steps)


def train(
    executor: Any, own: PyTree, rest: PyTree, shards: dict[int, tuple[PyTree, Path]], read: Callable[[int], None]
) -> dict[int, Exception]:
    """Trains shards on workers, and reads each when it is finished. Returns the errors of those that failed."""
    if not shards:
        return {}
    is_none = lambda x: x is None
    common = dumps(jax.tree.map(lambda x, y: y if x is None else Hole(), own, rest, is_leaf=is_none))
    settings = {name: getattr(jax.config, name) for name in _SETTINGS}
    futures, failed = {}, {}
    try:
        for i, (part, file) in shards.items():
            futures[i] = executor.submit(work, common, dumps(jax.tree.leaves(part)), file, settings)
        for i, future in futures.items():
            try:
                future.result()
                read(i)
            except Exception as error:
                failed[i] = error
    except BaseException:
        for future in futures.values():
            future.cancel()
        raise
    return failed


# On a worker, and in this process to read.


def work(common: bytes, own: bytes, file: Path, settings: dict[str, Any]) -> None:
    """Trains a shard."""
    with contextlib.ExitStack() as stack:
        for name, value in settings.items():
            stack.enter_context(_SETTINGS[name](value))
        leaves = iter(pickle.loads(own))
        fill = lambda x: next(leaves) if isinstance(x, Hole) else x
        try:
            fit_shard(jax.tree.map(fill, _common(common)), file)
        except Exception as error:
            vars(error).pop("run", None)  # which is saved
            raise


# Shards of a call have the same functions, by which JAX finds compiled programs.
_common = ft.lru_cache(maxsize=1)(pickle.loads)


def fit_shard(call: tuple[Any, ...], file: Path) -> Run[Any]:
    """The run of a shard, which begins, continues or is finished."""
    ensemble, loss, optimiser, options = call
    if options.get("plan") is None and jax.default_backend() == "cpu":
        options = options | {"plan": Blocks(cores=1)}
    options = options | {"key": options["key"].value}
    with ignore_warnings(".*diverged"):  # the caller warns once, of all members
        return fit_here(ensemble, loss, optimiser, checkpoint=file, progress=False, **options)


# Between processes.


class Hole:
    """In place of an array that has a value per member."""


def dumps(value: Any) -> bytes:
    """Pickles a value: functions by value, but what can be imported, and the classes of Modules, by reference."""
    check_package("cloudpickle", what="fleet.fit", extra="fleet")
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, type(eqx.Module)):  # by value, cloudpickle makes a class without fields
                return NotImplemented
            if callable(obj) and not isinstance(obj, _PLAIN) and is_importable(obj):  # such as `jax.nn.relu`
                return import_object, (obj.__module__, obj.__qualname__)
            return super().reducer_override(obj)

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


_PLAIN = type | types.FunctionType | types.BuiltinFunctionType


def is_importable(obj: Any) -> bool:
    """Whether other processes can import the object by name: not if it is defined in `__main__` or in a function."""
    module, name = getattr(obj, "__module__", None), getattr(obj, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__":
        return False
    return ft.reduce(lambda found, part: getattr(found, part, None), name.split("."), sys.modules.get(module)) is obj


def import_object(module: str, name: str) -> Any:
    """The object of that name."""
    return ft.reduce(getattr, name.split("."), importlib.import_module(module))
