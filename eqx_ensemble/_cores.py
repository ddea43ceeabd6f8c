"""Independent work on the cores of a CPU: threads of this process, which run compiled programs at the same time.

JAX releases Python's lock while a program runs, so that programs of several threads share one CPU device. XLA itself
runs small operations on one core.
"""

import contextlib
import functools as ft
import os
import pathlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax

A = TypeVar("A")
B = TypeVar("B")

_CPU = pathlib.Path("/sys/devices/system/cpu/cpu0/cache")
_GROUPS = pathlib.Path("/sys/fs/cgroup")
_OWN_GROUP = pathlib.Path("/proc/self/cgroup")
_USUAL_CACHE = 2**20


def num_cores() -> int:
    """The number of CPU cores that this process may use; 1 if JAX computes elsewhere, or on the mesh of `jax.set_mesh`.

    Limits are the cores of the process (`taskset`), the quota of its container, `OMP_NUM_THREADS`, which joblib and
    Dask set in their workers, and the workers of pytest-xdist.
    """
    if jax.default_backend() != "cpu" or not jax.sharding.get_abstract_mesh().empty:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = min([cores, *_quota(), *_number_in("OMP_NUM_THREADS")])
    return max(cores // max([1, *_number_in("PYTEST_XDIST_WORKER_COUNT")]), 1)


def _number_in(variable: str) -> list[int]:
    found = re.match(r"\s*([1-9]\d*)", os.environ.get(variable, ""))  # a list of numbers begins with the outermost
    return [int(found[1])] if found else []


@ft.lru_cache(maxsize=1)
def _quota() -> list[int]:
    """The whole cores of each quota on this process's group and the groups around it."""
    own = re.findall(r"^\d+:([^:]*):/(.*)$", _read(_OWN_GROUP), flags=re.MULTILINE)
    found = []
    for controllers, name in own:
        is_new = controllers == ""
        if not is_new and "cpu" not in controllers.split(","):
            continue
        root = _GROUPS if is_new else _GROUPS / "cpu"
        group = root / name
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root):
                break
            text = (
                _read(folder / "cpu.max")
                if is_new
                else " ".join(_read(folder / f"cpu.cfs_{part}_us").strip() for part in ("quota", "period"))
            )
            if limit := re.match(r"(\d+)\s+(\d+)", text):
                found.append(max(int(limit[1]) // int(limit[2]), 1))
    return found


@ft.lru_cache(maxsize=1)
def cache_bytes() -> int:
    """The bytes of a core's own second-level cache; 1 MiB if the system does not tell."""
    for folder in sorted(_CPU.glob("index*")):
        size = re.match(r"(\d+)K", _read(folder / "size"))
        if _read(folder / "level").strip() == "2" and size:
            sharing = bin(int(_read(folder / "shared_cpu_map").replace(",", "") or "1", 16)).count("1")
            return 1024 * int(size[1]) // max(sharing, 1)
    return _USUAL_CACHE


def _read(path: pathlib.Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


# Threads end with the call, so that none is left when the process forks or exits. All calls share one count: threads
# that compute in several calls, as in a worker of Dask, or in a call inside of another, are never more than the cores.

_LOCK = threading.Lock()
_num_computing = 0
_mine = threading.local()


def on_cores(fn: Callable[[A], B], items: Sequence[A], *, cores: int | None = None) -> list[B]:
    """`fn` of each item, on at most `cores` cores, by default all of this process; the calling thread is one of them.

    An error ends the call, when items begun before it have ended; of several, the first item's is raised.
    """
    results: list[Any] = [None] * len(items)
    errors: dict[int, BaseException] = {}
    left = iter(range(len(items)))
    cores = num_cores() if cores is None else cores
    config = _config()

    def work(*, helps: bool) -> None:
        while not errors and not (helps and _num_computing > cores):
            with _LOCK:
                index = next(left, None)
            if index is None:
                return
            try:
                results[index] = fn(items[index])
            except BaseException as error:
                errors[index] = error

    def help_out() -> None:
        with _as_in(config) as is_same, _computing():
            if is_same:
                work(helps=True)

    with _computing():
        count = min(len(items), cores - _num_computing + 1) - 1
        threads = [threading.Thread(target=help_out, name=f"eqx_ensemble-core-{i}") for i in range(1, count + 1)]
        try:
            with contextlib.suppress(RuntimeError):  # if the system allows no more threads
                for thread in threads:
                    thread.start()
            work(helps=False)
        except BaseException as error:  # Ctrl-C outside of `fn`
            errors[-1] = error
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if errors:
        raise errors[min(errors)]
    return results


@contextlib.contextmanager
def _computing() -> Iterator[None]:
    """Counts the thread among those that compute, once."""
    global _num_computing
    if getattr(_mine, "counts", False):
        yield
        return
    _mine.counts = True
    with _LOCK:
        _num_computing += 1
    try:
        yield
    finally:
        _mine.counts = False
        with _LOCK:
            _num_computing -= 1


# A thread begins with the configuration of the process. What `with jax.enable_x64(True)` sets for the calling thread
# would be missing, and the same call would be another program.

_SETTERS: dict[str, Callable[[Any], Any]] = {
    "jax_enable_x64": jax.enable_x64,
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_default_device": jax.default_device,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
    "jax_debug_nans": jax.debug_nans,
    "jax_debug_infs": jax.debug_infs,
    "jax_transfer_guard": jax.transfer_guard,  # before its parts, which it sets as well
    "jax_transfer_guard_host_to_device": jax.transfer_guard_host_to_device,
    "jax_transfer_guard_device_to_device": jax.transfer_guard_device_to_device,
    "jax_transfer_guard_device_to_host": jax.transfer_guard_device_to_host,
}


_NAMES = tuple(name for name in dir(jax.config) if name.startswith("jax_"))


def _config() -> dict[str, Any]:
    return {name: getattr(jax.config, name) for name in _NAMES}


@contextlib.contextmanager
def _as_in(config: dict[str, Any]) -> Iterator[bool]:
    """JAX configured as in another thread; yields whether it is, since some settings cannot be repeated."""
    with contextlib.ExitStack() as stack:
        own = _config()
        for name, set_value in _SETTERS.items():
            if own.get(name) != config.get(name):
                stack.enter_context(set_value(config[name]))
        yield _config() == config
