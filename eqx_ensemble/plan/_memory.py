import contextlib
import pathlib
import re
import threading
import time
from collections.abc import Iterator

import jax

_STATM = pathlib.Path("/proc/self/statm")
_MEMINFO = pathlib.Path("/proc/meminfo")
_SECONDS_BETWEEN_SAMPLES, _FRACTION_BETWEEN_SAMPLES = 2e-3, 0.02


class Peak:
    """The peak memory while something ran, in addition to the memory in use before; `None` if unknown."""

    bytes: int | None = None


@contextlib.contextmanager
def peak() -> Iterator[Peak]:
    """Measures the peak memory of this process's devices, the highest of them; on CPUs, that of the process.

    An accelerator reports its peak since the start of the process: a later, smaller one is missed. The memory of a
    process is sampled every two milliseconds, and gradually less often, because sampling takes time: shorter peaks are
    missed.
    """
    found = Peak()
    before = _device_stats()
    if before:
        yield found
        pairs = zip(_device_stats(), before, strict=True)
        key = "peak_bytes_in_use"
        found.bytes = max((new[key] - old["bytes_in_use"] for new, old in pairs if new[key] > old[key]), default=None)
        return
    start, began = _resident(), time.perf_counter()
    if start is None:
        yield found
        return
    most, over = start, threading.Event()

    def sample() -> None:
        nonlocal most
        while not over.wait(max(_SECONDS_BETWEEN_SAMPLES, _FRACTION_BETWEEN_SAMPLES * (time.perf_counter() - began))):
            most = max(most, _resident() or 0)

    watch = threading.Thread(target=sample, daemon=True)
    watch.start()
    try:
        yield found
    finally:
        over.set()
        watch.join()
    found.bytes = max(most, _resident() or 0) - start


def release_memory() -> None:
    """Returns freed memory to the system, where possible, so that its next use shows in `peak`."""
    import ctypes
    import sys

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def free_bytes() -> int | None:
    """The free memory of this process's fullest device, or of the machine for CPUs; `None` if unknown."""
    stats = _device_stats()
    if stats:
        known = all("bytes_limit" in one for one in stats)
        return min(one["bytes_limit"] - one["bytes_in_use"] for one in stats) if known else None
    found = re.search(r"MemAvailable:\s+(\d+) kB", _MEMINFO.read_text()) if _MEMINFO.exists() else None
    return None if found is None else 1024 * int(found[1])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a compiled program ran out of memory."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def _device_stats() -> list[dict[str, int]]:
    """The memory statistics of each device of this process; none for CPUs, and if unknown."""
    stats = [None if device.platform == "cpu" else device.memory_stats() for device in jax.local_devices()]
    return [one for one in stats if one and "peak_bytes_in_use" in one] if all(stats) else []


def _resident() -> int | None:
    if not _STATM.exists():
        return None
    import resource

    return int(_STATM.read_text().split()[1]) * resource.getpagesize()
