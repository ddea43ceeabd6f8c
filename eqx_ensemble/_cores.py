"""Independent work on the cores of a CPU, by threads: JAX and NumPy release Python's lock while they compute."""

import os
import re
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import jax


def num_cores() -> int:
    """The number of cores that this process may use.

    Limits are the cores of the process (`taskset`), `OMP_NUM_THREADS`, which joblib and Dask set in their workers, and
    the workers of pytest-xdist.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = re.match(r"\s*([1-9]\d*)", os.environ.get("OMP_NUM_THREADS", ""))  # of a list the outermost
    cores = min(cores, int(found[1])) if found else cores
    return max(cores // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT") or 1), 1)


def thread_pool(cores: int) -> Executor:
    """Threads that compute as this one does: itself if options such as `jax.enable_x64` are set for it alone."""
    pool = ThreadPoolExecutor(cores)
    if pool.submit(_config).result() == _config():
        return pool
    pool.shutdown()
    return _SameThread()


class _SameThread(Executor):
    """A pool that runs calls at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        future: Future = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def _config() -> list[Any]:
    return [getattr(jax.config, name) for name in dir(jax.config) if name.startswith("jax_")]


def cache_size() -> int:
    """The bytes of a core's second-level cache."""
    usual = 2**20
    try:
        return os.sysconf("SC_LEVEL2_CACHE_SIZE") or usual
    except (ValueError, OSError):
        return usual
