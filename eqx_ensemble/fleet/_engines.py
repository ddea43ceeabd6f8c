"""Engines that run shards: an executor, a factory of executors that is called again when one breaks, or Dask."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from typing import Any

import numpy as np

from .._check import check_installed, check_positive_int
from .._warnings import ignore_warnings, warn
from ._array_files import write_arrays
from ._check_engine import check_executor, check_factory, check_future, check_not_forked, check_open, explain_start
from ._end_processes import end_processes

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
        """The threads of each worker. Raises `BrokenExecutor` if the cluster is gone: Dask has no error for that."""
        try:
            return self._client.nthreads()
        except Exception as error:
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
def open_engine(executor: Any, workers: int | None, *, name: str) -> Iterator[Engine]:
    """The engine for `executor` and `workers`, closed at the end; an engine that is passed in stays open."""
    if isinstance(executor, Engine):
        yield executor
        return
    engine = as_engine(executor, workers, name=name)
    try:
        yield engine
    finally:
        engine.close()


def as_engine(executor: Any, workers: int | None, *, name: str) -> Engine:
    """The engine for `executor` and `workers`."""
    if workers is not None:
        check_positive_int(workers, "workers", name=name)
    if executor is None:
        check_installed("distributed", what=f"{name}(None, ...)", extra="dask")
        from distributed import Client, LocalCluster

        with explain_start(name=name):
            cluster = LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=":0")
        return Dask(Client(cluster), workers=workers, cluster=cluster)
    distributed = sys.modules.get("distributed")
    if distributed is not None and isinstance(executor, distributed.Client):
        check_open(executor, name=name)
        return Dask(executor, workers=workers)
    count = workers or os.cpu_count() or 1
    if isinstance(executor, Executor):
        check_not_forked(executor)
        return Engine(executor, workers=count)
    make: Callable[[], Any] = executor
    check_factory(executor, name=name)
    return FactoryEngine(make, workers=count)


def _start(make: Callable[[], Any]) -> Executor:
    executor = make()
    check_executor(executor)
    check_not_forked(executor)
    return executor
