"""The peak memory of a call, above the memory before it."""

import ctypes
import json
import os
import pathlib
import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax

STATUS = pathlib.Path("/proc/self/status")
CLEAR = pathlib.Path("/proc/self/clear_refs")
# Memory kept after it was freed does not show as used when it is used again. glibc keeps arrays of up to 32 MiB, and
# what compiling leaves between live blocks: the first are never to be taken from there, the second is given back.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}
UNKNOWN = "this system does not report the peak of a part of a run"


def peak(run: Callable[[], Any]) -> int | None:
    """The bytes by which a call raises this process's peak resident size; `None` where the system does not report it.

    Whatever it needs only once, such as compiling, is to be done before.
    """
    if not CLEAR.exists():
        return None
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)
    CLEAR.write_text("5")  # sets the peak back to the present size
    before = _resident("VmHWM")
    jax.block_until_ready(run())
    return max(_resident("VmHWM") - before, resource.getpagesize())


def in_child(script: str, *arguments: str) -> Any:
    """What a script's `child` prints: every measurement needs a process of its own."""
    command = [sys.executable, script, "child", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | GIVE_BACK)
    return json.loads(done.stdout)


def _resident(field: str) -> int:
    """A line of this process's status, in bytes."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])
