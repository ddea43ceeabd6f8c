"""What runs on a worker: one shard, with its error as a value, so that all that an executor raises is about workers."""

import dataclasses
import functools as ft
import mmap
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._warnings import ignore_warnings
from ._travel import dumps, loads


class Task(NamedTuple):
    """What all shards have in common, as a function of a shard's own part."""

    fn: Callable[..., Any]
    common: Any


class Outcome(NamedTuple):
    """The result of a shard, or the error that it raised."""

    result: Any
    error: Exception | None


@dataclasses.dataclass(frozen=True)
class ArrayFile:
    """An array in a file of its bytes, which the processes of one machine have in memory once."""

    path: str
    shape: tuple[int, ...]
    dtype: str

    def read(self) -> np.ndarray:
        """The array, mapped."""
        return _read(self)


@ft.lru_cache(maxsize=8)  # a file that is mapped keeps its space after it is deleted
def _read(file: ArrayFile) -> np.ndarray:
    with open(file.path, "rb") as opened:
        data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(data, jnp.dtype(file.dtype)).reshape(file.shape)


def run_shard(task: bytes, own: bytes, attempt: int, *arrays: Any) -> bytes:
    """Runs a shard. `attempt` tells engines that remember results that this is another call."""
    held = [array.read() if isinstance(array, ArrayFile) else array for array in arrays]
    try:
        fn, common = loads(task, held)
        with ignore_warnings():  # the caller warns once, of all members
            outcome = Outcome(fn(common, loads(own, held)), None)
    except Exception as error:
        outcome = Outcome(None, error)
    try:
        return _to_send(outcome)
    except Exception as problem:
        text = "a result" if outcome.error is None else f"{type(outcome.error).__name__}: {outcome.error}"
        reason = f"which cannot be sent back, {type(problem).__name__}: {problem}"
        return dumps(Outcome(None, RuntimeError(f"{text} ({reason})")), name="fleet")


def _to_send(outcome: Outcome) -> bytes:
    data = dumps(outcome, name="fleet")
    if outcome.error is not None:
        loads(data)  # exceptions whose constructors need more than a message can be pickled, and not unpickled
    return data
