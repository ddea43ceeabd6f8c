"""Engines that run shards: an executor, a factory of executors that is called again when one breaks, or Dask."""

import contextlib
import errno
import hashlib
import inspect
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np

from .._caller import caller
from .._check import check_installed, check_positive_int, kind_text
from .._warnings import ignore_warnings, warn
from ..checkpoint import _disk
from ..checkpoint._engine import raw
from ._worker import ArrayFile

# Checks of executors, which need the interface of `concurrent.futures`.

_FIX = (
    "Write a subclass of `concurrent.futures.Executor` whose `submit` returns a `concurrent.futures.Future`: "
    "the recipe of other engines has some of ten lines."
)


def check_factory(executor: Any) -> None:
    """Raises unless `executor` is a function, being neither an executor nor a Dask client."""
    if not callable(executor):
        raise TypeError(
            f"`{caller()}` needs a `concurrent.futures.Executor`, a function that makes one, a Dask client, or `None` "
            f"for a local Dask cluster; got {kind_text(executor)}.\n"
            "For example `lambda: ProcessPoolExecutor(2, multiprocessing.get_context('spawn'))`. " + _FIX
        )


def check_executor(executor: Any) -> None:
    """Raises unless a factory returned an executor."""
    if not isinstance(executor, Executor):
        raise TypeError(
            "A function that makes executors must return a `concurrent.futures.Executor`, "
            f"got {kind_text(executor)}.\n{_FIX}"
        )


def check_not_forked(executor: Executor) -> None:
    """Raises for a process pool that forks: JAX is multithreaded, and a forked child has none of its threads."""
    context = getattr(executor, "_mp_context", None) if isinstance(executor, ProcessPoolExecutor) else None
    if context is not None and context.get_start_method() == "fork":
        raise ValueError(
            "`fleet` needs processes that are spawned, and this `ProcessPoolExecutor` forks: JAX is multithreaded, and "
            "forked processes can deadlock.\n"
            "Write `ProcessPoolExecutor(2, multiprocessing.get_context('spawn'))`, in a script below "
            "`if __name__ == '__main__':`."
        )


def check_future(future: Any, executor: Executor) -> "Future[Any]":
    """Raises unless `submit` returned a `concurrent.futures.Future`. Returns it."""
    if not isinstance(future, Future):
        raise TypeError(
            f"`{type(executor).__name__}.submit` must return a `concurrent.futures.Future`, got {kind_text(future)}."
            f"\n{_FIX}"
        )
    return future


def check_open(client: Any) -> None:
    """Raises if a Dask client is closed."""
    if client.status == "closed":
        raise RuntimeError(f"`{caller()}` needs a Dask client that is open: call it inside the `with` block.")


@contextlib.contextmanager
def explain_start() -> Iterator[None]:
    """Adds the likely fix to the errors of workers that do not start."""
    try:
        yield
    except RuntimeError as error:
        error.add_note(
            f"`{caller()}` starts worker processes, which import the script: in a script, call it below "
            "`if __name__ == '__main__':`."
        )
        raise


# Ends the worker processes of an executor.


def end_processes(executor: Executor) -> None:
    """Ends the worker processes of an executor whose results are not needed, if it has a way to do so.

    The interpreter otherwise waits at its exit until their calls are done.
    """
    pool: Any = executor
    if callable(terminate := getattr(pool, "terminate_workers", None)):  # of the standard library, from Python 3.14
        terminate()
        return
    if "kill_workers" in inspect.signature(pool.shutdown).parameters:  # of loky
        pool.shutdown(wait=False, kill_workers=True)
        return
    processes = list((getattr(pool, "_processes", None) or {}).values())  # of the standard library, before
    for process in processes:
        process.terminate()


# Large arrays in temporary files, which the processes of a machine map into shared memory.


@contextlib.contextmanager
def write_arrays(arrays: Sequence[np.ndarray]) -> Iterator[list[ArrayFile]]:
    """Yields the files of arrays, in a folder that is removed at the end.

    The folder is locked while its process lives: later calls remove folders whose lock is free, of killed processes.
    """
    with _explain_temporary(sum(array.nbytes for array in arrays)):
        parent = Path(tempfile.gettempdir()).absolute()
        _remove_stale(parent)
    with contextlib.ExitStack() as stack:
        with _explain_temporary(sum(array.nbytes for array in arrays)):
            folder = stack.enter_context(_locked_folder(parent))
            files = [_write(folder / str(number), array) for number, array in enumerate(arrays)]
        yield files


def _write(path: Path, array: np.ndarray) -> ArrayFile:
    with open(path, "xb") as file:
        file.write(raw(np.ascontiguousarray(array)))
    return ArrayFile(str(path), array.shape, array.dtype.name)


@contextlib.contextmanager
def _locked_folder(parent: Path) -> Iterator[Path]:
    with contextlib.ExitStack() as stack:
        while True:
            folder = parent / f"{_prefix()}{_disk.token()}"
            os.mkdir(folder, 0o700)
            # Before the lock is held, another process may take the folder for a stale one and remove it.
            with contextlib.suppress(FileNotFoundError):
                stack.enter_context(_disk.hold_lock(folder))
                if folder.exists():
                    break
        try:
            yield folder
        finally:
            _remove(folder)


def _prefix() -> str:
    """The beginning of the folders of this machine: locks may not reach others that share the disk."""
    return f"eqx_ensemble-{hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]}-"


def _remove_stale(parent: Path) -> None:
    name = re.compile(rf"{_prefix()}[0-9a-f]{{8}}")
    for left in [Path(entry.path) for entry in os.scandir(parent) if name.fullmatch(entry.name)]:
        with _disk.hold_lock(left, wait=False) as is_stale:
            if is_stale and not left.is_symlink():
                _remove(left)


def _remove(folder: Path) -> None:
    """Removes our files, and the folder if nothing else is in it."""
    with contextlib.suppress(OSError):
        for file in folder.iterdir():
            if file.name.isdecimal():
                file.unlink()
        folder.rmdir()


@contextlib.contextmanager
def _explain_temporary(size: int) -> Iterator[None]:
    """Adds the folder, its free bytes and TMPDIR to errors of the operating system."""
    try:
        yield
    except OSError as error:
        folder = tempfile.tempdir or os.environ.get("TMPDIR", "/tmp")
        try:
            free = f"{shutil.disk_usage(folder).free} bytes are free"
        except OSError:
            free = "free space is unknown"
        raise OSError(
            error.errno or errno.EIO,
            f"`fleet` could not write the arrays for the workers ({size} bytes) in the temporary folder `{folder}`: "
            f"{error.strerror or error}; {free}.\nFree some space, or set TMPDIR to a folder with more",
        ) from error


_MOST_WITHOUT_WORKERS = 60.0  # seconds until a warning


class Engine:
    """An executor that the user opens and closes."""

    def __init__(self, executor: Executor, *, workers: int) -> None:
        self.executor, self._workers = executor, workers

    def num_workers(self) -> int:
        """The number of shards that run at once."""
        return self._workers

    def submit(self, fn: Callable[..., Any], *args: Any) -> "Future[Any]":
        """Submits a call."""
        return check_future(self.executor.submit(fn, *args), self.executor)

    def wait(self, submitted: "Collection[Future[Any]]") -> "set[Future[Any]]":
        """Waits until a future is done. Returns all that are done."""
        return wait(submitted, return_when=FIRST_COMPLETED).done

    def restart(self) -> bool:
        """Replaces a broken executor. Returns whether there is a new one."""
        return False

    def abort(self, running: int) -> None:
        """Warns of shards that still run when a call ends by an error or Ctrl-C."""
        if running:
            warn(
                f"{running} {'shard is' if running == 1 else 'shards are'} still running, and the shutdown of the "
                "executor waits for them. Pass a function that makes the executor to have them ended."
            )

    @contextlib.contextmanager
    def share(self, arrays: Sequence[np.ndarray]) -> Iterator[list[Any]]:
        """Yields the arguments that represent arrays: files that workers on this machine map into memory."""
        if not arrays:
            yield []
            return
        with write_arrays(arrays) as files:
            yield list(files)

    def close(self) -> None:
        """Closes what this engine opened."""


class FactoryEngine(Engine):
    """Executors from a factory, one at a time."""

    def __init__(self, make: Callable[[], Executor], *, workers: int) -> None:
        self._make = make
        super().__init__(_start(make), workers=workers)

    def restart(self) -> bool:
        """Starts another executor."""
        self.close()
        self.executor = _start(self._make)
        return True

    def abort(self, running: int) -> None:
        """Ends the processes of the pool: the program could otherwise end only after their shards."""
        end_processes(self.executor)

    def close(self) -> None:
        """Shuts the executor down without waiting for running shards."""
        self.executor.shutdown(wait=False)  # loky does not support `cancel_futures`


class Dask(Engine):
    """The workers of a Dask client; Dask itself reruns the tasks of a worker that dies."""

    def __init__(self, client: Any, *, workers: int | None, cluster: Any = None) -> None:
        self._client, self._cluster, self._given = client, cluster, workers
        super().__init__(client.get_executor(pure=False), workers=workers or 1)

    def num_workers(self) -> int:
        """The current number of worker threads, which changes as workers join and leave, or the number given."""
        return self._given or max(sum(self._threads().values()), 1)

    def _threads(self) -> dict[Any, int]:
        """The threads of each worker. Raises `BrokenExecutor` if the cluster is gone."""
        try:
            return self._client.nthreads()
        except Exception as error:  # of sockets, of `asyncio` or of Dask, by how the cluster ended
            raise BrokenExecutor(f"the Dask cluster does not answer: {type(error).__name__}: {error}") from error

    def submit(self, fn: Callable[..., Any], *args: Any) -> "Future[Any]":
        """Submits a call with its data, which the scheduler keeps; scattered data would be lost with their worker."""
        try:
            with ignore_warnings("Sending large graph"):
                return super().submit(fn, *args)
        except Exception:
            self._threads()  # raises if that is because the cluster is gone
            raise

    def wait(self, submitted: "Collection[Future[Any]]") -> "set[Future[Any]]":
        """As `Engine.wait`; warns if there have been no workers for a minute."""
        begun, is_warned = time.monotonic(), False
        while not (done := wait(submitted, _MOST_WITHOUT_WORKERS / 4, FIRST_COMPLETED).done):
            if self._threads():
                begun = time.monotonic()
            elif time.monotonic() - begun >= _MOST_WITHOUT_WORKERS and not is_warned:
                is_warned = True
                warn(
                    f"Dask has had no workers for {_MOST_WITHOUT_WORKERS:.0f} seconds. Shards wait until workers "
                    f"connect to the scheduler at {self._client.scheduler.address}.\nIf some have connected and left, "
                    "see their logs: workers need the same version of eqx_ensemble as this process."
                )
        return done

    def abort(self, running: int) -> None:
        """Does nothing: Dask ends cancelled tasks with their futures."""

    @contextlib.contextmanager
    def share(self, arrays: Sequence[np.ndarray]) -> Iterator[list[Any]]:
        """Yields futures of arrays, which each worker fetches once."""
        yield self._client.scatter(list(arrays)) if arrays else []

    def close(self) -> None:
        """Closes the cluster if this engine started it."""
        if self._cluster is not None:
            self._client.close()
            self._cluster.close()


@contextlib.contextmanager
def open_engine(executor: Any, workers: int | None) -> Iterator[Engine]:
    """The engine for `executor` and `workers`, closed at the end; an engine that is passed in stays open."""
    if isinstance(executor, Engine):
        yield executor
        return
    engine = as_engine(executor, workers)
    try:
        yield engine
    finally:
        engine.close()


def as_engine(executor: Any, workers: int | None) -> Engine:
    """The engine for `executor` and `workers`."""
    if workers is not None:
        check_positive_int(workers, "workers")
    if executor is None:
        check_installed("distributed", what=f"{caller()}(None, ...)", extra="dask")
        from distributed import Client, LocalCluster

        with explain_start():
            cluster = LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=":0")
        return Dask(Client(cluster), workers=workers, cluster=cluster)
    distributed = sys.modules.get("distributed")
    if distributed is not None and isinstance(executor, distributed.Client):
        check_open(executor)
        return Dask(executor, workers=workers)
    count = workers or os.cpu_count() or 1
    if isinstance(executor, Executor):
        check_not_forked(executor)
        return Engine(executor, workers=count)
    make: Callable[[], Any] = executor
    check_factory(executor)
    return FactoryEngine(make, workers=count)


def _start(make: Callable[[], Any]) -> Executor:
    executor = make()
    check_executor(executor)
    check_not_forked(executor)
    return executor
