"""One call over shards: opens the engine, divides the members, and closes what it opened."""

import functools as ft
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ._check import check_retries, check_shard
from ._divide import default_size, divide
from ._engines import open_engine
from ._run_shards import Hooks, run_shards
from ._shard import Finished, Shard
from ._worker import Task


class Call(NamedTuple):
    """A call of `fn(common, own)` on workers; `part(positions)` makes the argument `own` of each shard.

    `arrays` are leaves of `common` and of the parts that are sent to each worker once.
    """

    name: str
    fn: Callable[[Any, Any], Any]
    common: Any
    part: Callable[[np.ndarray], Any]
    arrays: list[Any]
    ids: np.ndarray


def run_call(
    call: Call,
    executor: Any,
    *,
    shard: int | None,
    workers: int | None,
    retries: int,
    hooks: Hooks,
    start: Callable[[int], list[tuple[int, np.ndarray]]] | None = None,
) -> Finished:
    """Runs a call on an executor. `start(size)` returns the numbered shards to run; by default all of them."""
    retries, count = check_retries(retries, name=call.name), len(call.ids)
    if shard is not None:
        check_shard(shard, count, name=call.name)
    with open_engine(executor, workers, name=call.name) as engine:
        size = default_size(count, engine.num_workers()) if shard is None else shard
        numbered = list(enumerate(divide(count, size))) if start is None else start(size)
        shards = [
            Shard(number, positions, call.ids[positions], ft.partial(call.part, positions))
            for number, positions in numbered
        ]
        task = Task(call.fn, call.common)
        return run_shards(engine, task, shards, call.arrays, retries=retries, hooks=hooks, name=call.name)
