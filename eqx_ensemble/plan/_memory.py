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
    """The peak of memory while something ran, in addition to what was in use before; `None` where it is unknown."""

    bytes: int | None = None


@contextlib.contextmanager
def peak() -> Iterator[Peak]:
    """Watches the memory of the default device, or of the process where that is the device's.

    An accelerator reports its peak since the start of the process: a later, smaller one is not seen. The memory of a
    process is sampled every other millisecond, and less and less often, because sampling takes time: shorter peaks are
    missed.
    """
    found = Peak()
    before = _device_stats()
    if before is not None:
        yield found
        after = _device_stats()
        if after is not None and after["peak_bytes_in_use"] > before["peak_bytes_in_use"]:
            found.bytes = after["peak_bytes_in_use"] - before["bytes_in_use"]
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
    """The free memory of the default device, of the machine for a CPU; `None` where it is unknown."""
    stats = _device_stats()
    if stats is not None:
        return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else None
    found = re.search(r"MemAvailable:\s+(\d+) kB", _MEMINFO.read_text()) if _MEMINFO.exists() else None
    return None if found is None else 1024 * int(found[1])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a compiled program ran out of memory."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def _device_stats() -> dict[str, int] | None:
    device = jax.devices()[0]
    stats = None if device.platform == "cpu" else device.memory_stats()
    return stats if stats and "peak_bytes_in_use" in stats else None


def _resident() -> int | None:
    if not _STATM.exists():
        return None
    import resource

    return int(_STATM.read_text().split()[1]) * resource.getpagesize()
