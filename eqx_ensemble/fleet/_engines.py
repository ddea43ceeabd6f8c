"""What runs shards: an executor, a factory of executors that is called again when one breaks, or Dask."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np

from .._check import check_installed, kind_text
from ._worker import ArrayFile


class Engine:
    """An executor that somebody else closes.

    **Attributes:**

    - `num_open`: how many shards may be submitted and not done.
    """

    def __init__(self, executor: Executor, *, num_open: int) -> None:
        self.executor, self.num_open = executor, num_open

    def shard_of(self, num_members: int) -> int:
        """A size of shards for which each worker gets some sixteen of them."""
        return max(2, -(-num_members // (8 * self.num_open)))

    def submit(self, fn: Callable[..., Any], *args: Any) -> "Future[Any]":
        """Submits a call."""
        return self.executor.submit(fn, *args)

    def restart(self) -> bool:
        """Whether there is an executor to go on with after this one broke."""
        return False

    @contextlib.contextmanager
    def share(self, arrays: Sequence[np.ndarray]) -> Iterator[list[Any]]:
        """What stands for arrays in the arguments of a call: files that workers on this machine map into memory."""
        if not arrays:
            yield []
            return
        with tempfile.TemporaryDirectory(prefix="eqx_ensemble-") as folder:
            files = []
            for number, array in enumerate(arrays):
                path = os.path.join(folder, str(number))
                np.ascontiguousarray(array).tofile(path)
                files.append(ArrayFile(path, array.shape, array.dtype.name))
            yield files

    def close(self) -> None:
        """Closes what this engine started."""


class Restarting(Engine):
    """Executors of a factory, one after another."""

    def __init__(self, make: Callable[[], Executor], *, num_open: int) -> None:
        self._make = make
        super().__init__(_start(make), num_open=num_open)

    def restart(self) -> bool:
        """Starts another executor."""
        self.close()
        self.executor = _start(self._make)
        return True

    def close(self) -> None:
        """Shuts the executor down without waiting for its open shards."""
        self.executor.shutdown(wait=False, cancel_futures=True)


class Dask(Engine):
    """The workers of a Dask client, which repeats the shards of workers that die by itself."""

    def __init__(self, client: Any, *, cluster: Any = None) -> None:
        self._client, self._cluster = client, cluster
        super().__init__(client.get_executor(pure=False), num_open=2 * max(sum(client.nthreads().values()), 1))

    @contextlib.contextmanager
    def share(self, arrays: Sequence[np.ndarray]) -> Iterator[list[Any]]:
        """Futures of arrays, which every worker fetches once."""
        yield self._client.scatter(list(arrays)) if arrays else []

    def close(self) -> None:
        """Closes the cluster if it was started here."""
        if self._cluster is not None:
            self._client.close()
            self._cluster.close()


def as_engine(executor: Any, *, name: str) -> Engine:
    """The engine of an argument `executor`."""
    if executor is None:
        check_installed("distributed", what=f"{name}(None, ...)", extra="dask")
        from distributed import Client, LocalCluster

        cluster = LocalCluster(threads_per_worker=1, dashboard_address=":0")
        return Dask(Client(cluster), cluster=cluster)
    distributed = sys.modules.get("distributed")
    if distributed is not None and isinstance(executor, distributed.Client):
        return Dask(executor)
    count = 2 * (os.cpu_count() or 1)
    if isinstance(executor, Executor):
        return Engine(executor, num_open=count)
    make: Callable[[], Any] = executor
    if not callable(executor):
        raise TypeError(
            f"`{name}` needs an executor as of `concurrent.futures`, a function that makes one, a client of Dask, or "
            f"`None` for Dask on this machine; got {kind_text(executor)}.\n"
            f"For example `lambda: ProcessPoolExecutor(2, multiprocessing.get_context('spawn'))`."
        )
    return Restarting(make, num_open=count)


def _start(make: Callable[[], Any]) -> Executor:
    executor = make()
    if not isinstance(executor, Executor):
        raise TypeError(f"A function that makes executors has to return one, got {kind_text(executor)}.")
    return executor
