"""Runs one shard on a worker; its error is returned as a value, so that errors of the executor concern workers only."""

import collections
import contextlib
import dataclasses
import functools as ft
import mmap
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .._warnings import record_warnings
from ._serialise import dumps, loads, refs_on_worker

# Shortens error messages that workers return: a failed assertion on an array can have megabytes.

_MOST = 10_000  # characters

E = TypeVar("E", bound=Exception)


def shorten(text: str) -> str:
    """The beginning and the end of a long text."""
    if len(text) <= _MOST:
        return text
    half = _MOST // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def with_short_message(error: E) -> E:
    """The error, with long strings among its arguments shortened."""
    if any(isinstance(arg, str) and len(arg) > _MOST for arg in error.args):
        error.args = tuple(shorten(arg) if isinstance(arg, str) else arg for arg in error.args)
    return error


# The JAX settings that affect results, carried from the caller to workers.

_CONTEXTS = {
    "jax_enable_x64": jax.enable_x64,
    "jax_threefry_partitionable": jax.threefry_partitionable,
    "jax_default_prng_impl": jax.default_prng_impl,
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
    "jax_numpy_rank_promotion": jax.numpy_rank_promotion,
    "jax_debug_nans": jax.debug_nans,
    "jax_debug_infs": jax.debug_infs,
}


def settings() -> dict[str, Any]:
    """The settings of this thread."""
    return {name: getattr(jax.config, name) for name in _CONTEXTS}


@contextlib.contextmanager
def use_settings(given: dict[str, Any]) -> Iterator[None]:
    """Applies settings to this thread inside `with`."""
    with contextlib.ExitStack() as stack:
        for name, value in given.items():
            if getattr(jax.config, name) != value:
                stack.enter_context(_CONTEXTS[name](value))
        yield


_MOST_TASKS = 4


class Task(NamedTuple):
    """What all shards have in common: a function of `common` and of a shard's own arguments."""

    fn: Callable[..., Any]
    common: Any


class Attempt(NamedTuple):
    """The number of the attempt, by which engines that cache results see a new call, and JAX's settings."""

    number: int
    settings: dict[str, Any]


class Outcome(NamedTuple):
    """The result of a shard or the error that it raised, its duration, and the texts of its warnings."""

    result: Any
    error: Exception | None
    seconds: float
    warnings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ArrayFile:
    """An array in a file of raw bytes, which the processes of a machine map into shared memory."""

    path: str
    shape: tuple[int, ...]
    dtype: str

    def read(self) -> np.ndarray:
        """The memory-mapped array."""
        return _read(self)


@ft.lru_cache(maxsize=8)  # a mapped file takes disk space even after it is deleted
def _read(file: ArrayFile) -> np.ndarray:
    with open(file.path, "rb") as opened:
        data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(data, jnp.dtype(file.dtype)).reshape(file.shape)


def run_shard(task: bytes, own: bytes, attempt: Attempt, *arrays: Any) -> bytes:
    """Runs a shard; returns its serialised outcome."""
    held = [array.read() if isinstance(array, ArrayFile) else array for array in arrays]
    with use_settings(attempt.settings):
        outcome = _run(task, own, held)
        try:
            return _to_send(outcome, held)
        except Exception as problem:
            text = "a result" if outcome.error is None else f"{type(outcome.error).__name__}: {outcome.error}"
            error = RuntimeError(f"{text} (which cannot be serialised: {type(problem).__name__}: {problem})")
            for note in getattr(outcome.error, "__notes__", ()):
                error.add_note(note)
            return dumps(Outcome(None, error, outcome.seconds))


def _run(task: bytes, own: bytes, held: list[Any]) -> Outcome:
    begun, result = time.perf_counter(), None
    error: Exception | None = None
    with record_warnings() as texts:  # the caller warns once for all members
        try:
            fn, common = _read_task(task, held)
            result = fn(common, loads(own, held))
        except SystemExit as ended:  # it would end the worker or the caller
            error = RuntimeError(f"The shard raised SystemExit({ended.code!r}).")
            error.add_note(_trace(ended))
        except Exception as caught:
            trace, error = _trace(caught), with_short_message(caught)
            error.add_note(trace)
    return Outcome(result, error, time.perf_counter() - begun, tuple(texts))


_tasks: "collections.OrderedDict[Any, tuple[Task, list[Any]]]" = collections.OrderedDict()


def _read_task(task: bytes, held: list[Any]) -> Task:
    """The same object for all shards of a call, so that programs are compiled once."""
    key = task, *map(id, held)
    found = _tasks.pop(key, None) or (loads(task, held), held)  # keeps alive the arrays whose ids are in `key`
    _tasks[key] = found
    while len(_tasks) > _MOST_TASKS:
        _tasks.pop(next(iter(_tasks)), None)
    return found[0]


def _trace(error: BaseException) -> str:
    return "On the worker:\n" + shorten("".join(traceback.format_exception(error)).rstrip())


def _to_send(outcome: Outcome, held: list[Any]) -> bytes:
    """Serialises an outcome. Arrays that the caller sent are not sent back."""
    data = dumps(outcome, refs_on_worker(held))
    if outcome.error is not None:
        loads(data, held)  # fails for exceptions whose constructors need more than a message
    return data
