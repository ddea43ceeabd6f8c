"""A call of `fleet.fit` with `save`: finds the completed shards in the folder, and runs the others."""

import time
from pathlib import Path
from typing import Any

import numpy as np

from .._warnings import warn
from ..train._check_run import warn_of_diverged
from ._check_saved import check_same_size
from ._columns import Columns
from ._divide import divide
from ._folder import (
    CallIdentity,
    SavedCall,
    ShardCheckpoints,
    check_same_identity,
    has_call,
    lock_folder,
    read_call,
    store_of,
    write_call,
)
from ._run_shards import Call, Hooks, run_call
from ._shard import Finished, check_some_done, lost_message
from ._sharded_run import ShardedRun, run_of_columns


def save_shards(
    call: Call,
    executor: Any,
    folder: Path,
    checkpoints: ShardCheckpoints,
    identity: CallIdentity,
    like: Any,
    *,
    shard: int | None,
    workers: int | None,
    retries: int,
    hooks: Hooks,
    first_step: int,
    data: Any,
) -> ShardedRun[Any]:
    """Runs the shards that are not in the folder yet. The argument `store` of each is where it saves."""
    begun = time.perf_counter()
    with lock_folder(folder):
        saved, done = _read_done(folder, identity, shard, name=call.name)
        finished = Finished([], [], interrupted=False)
        if saved is None or len(done) < len(saved.sizes):
            found: list[SavedCall] = [] if saved is None else [saved]

            def start(size: int) -> list[tuple[int, np.ndarray]]:
                if found:
                    checkpoints.use(found[0].positions())
                else:
                    found.append(write_call(folder, identity, call.ids, checkpoints.divide(size)))
                return [pair for pair in enumerate(found[0].positions()) if pair[0] not in done]

            def part(positions: np.ndarray) -> Any:
                number = int(np.searchsorted(np.cumsum(found[0].sizes), positions[0], side="right"))
                return call.part(positions) | {"store": store_of(folder, number, found[0].identity.digest)}

            finished = run_call(
                call._replace(part=part),
                executor,
                shard=shard,
                workers=workers,
                retries=retries,
                hooks=hooks,
                start=start,
            )
            saved = found[0]
    done |= {part.number: columns for part, columns in finished.results if columns is not None}
    interrupted = finished.interrupted or any(columns is None for _, columns in finished.results)
    check_some_done(finished, done, name=call.name)
    message = lost_message(finished._replace(interrupted=interrupted), name=call.name)
    if message:
        warn(f"{message}\nRerun the same call to resume in `{folder}`.")
    seconds = time.perf_counter() - begun
    run = run_of_columns(folder, saved, done, like, lost=tuple(finished.lost), interrupted=interrupted, seconds=seconds)
    warn_of_diverged(run, run.ids, first_step=first_step, data=data)
    return run


def _read_done(
    folder: Path, identity: CallIdentity, shard: int | None, *, name: str
) -> tuple[SavedCall | None, dict[int, Columns]]:
    """The call and the completed shards in a folder; raises if it belongs to a different call.

    A different call that completed no shard, because it failed, is replaced.
    """
    if not has_call(folder):
        return None, {}
    saved = read_call(folder, name=name)
    stores = [store_of(folder, number, saved.identity.digest) for number in range(len(saved.sizes))]
    complete = [number for number, store in enumerate(stores) if store.is_complete]
    if not complete and saved.identity.digest != identity.digest:
        return None, {}
    check_same_identity(saved.identity, identity, folder, name=name)
    if shard is not None:
        expected = np.array([len(part) for part in divide(len(saved.ids), shard)])
        check_same_size(shard, saved.sizes, expected, folder, name=name)
    return saved, {number: stores[number].read(name=name) for number in complete}
