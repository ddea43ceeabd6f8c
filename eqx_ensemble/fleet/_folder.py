"""The folder in which shards save their members: one checkpoint for the call, and one per completed shard."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._ensemble import Ensemble
from .._files import load, save
from ..checkpoint import contents
from ..checkpoint._check_folders import explain_folder
from ..checkpoint._names import is_sealed
from ..checkpoint._run_lock import RunLock
from ..train._run import Run
from ._check_saved import check_call_record, check_shard_of_call
from ._columns import Columns, columns_of, from_json, to_json
from ._identity import CallIdentity

_CALL = "call"


class SavedCall(NamedTuple):
    """The call that a folder belongs to, and its division into shards."""

    identity: CallIdentity
    ids: np.ndarray
    sizes: np.ndarray

    def positions(self) -> list[np.ndarray]:
        """The positions of the members of each shard."""
        return np.split(np.arange(len(self.ids)), np.cumsum(self.sizes)[:-1])


class Store(NamedTuple):
    """Where one shard saves its members: the path of its checkpoint, and the digest of the call."""

    path: Path
    digest: str

    @property
    def is_complete(self) -> bool:
        """Whether the shard is complete."""
        return is_sealed(self.path)

    def read(self, *, name: str) -> Columns:
        """The columns of a complete shard."""
        meta = contents(self.path).meta
        return from_json(check_shard_of_call(meta, self.digest, self.path, name=name)["columns"])

    def write(self, run: Run[Any]) -> Columns:
        """Saves the members of a run atomically; returns its columns."""
        columns = columns_of(run)
        members: Ensemble[Any] | tuple[Any, Any] = run.ensemble if run.state is None else (run.ensemble, run.state)
        record = {"call": self.digest, "shard": self.path.name, "columns": to_json(columns)}
        save(self.path, members, meta={"fleet.fit": record})
        return columns


def store_of(folder: Path, number: int, digest: str) -> Store:
    """The store of the shard with this number."""
    return Store(folder / f"shard-{number:06d}", digest)


def write_call(folder: Path, identity: CallIdentity, ids: np.ndarray, positions: Sequence[np.ndarray]) -> SavedCall:
    """Writes the checkpoint of the call."""
    sizes = np.array([len(part) for part in positions])
    meta = {"fleet.fit": identity._asdict() | {"members": len(ids), "shards": len(sizes)}}
    save(folder / _CALL, {"ids": ids, "sizes": sizes}, meta=meta)
    return SavedCall(identity, ids, sizes)


def has_call(folder: Path) -> bool:
    """Whether a folder holds a call of `fleet.fit`."""
    return is_sealed(folder / _CALL)


def read_call(folder: Path, *, name: str) -> SavedCall:
    """Reads the checkpoint of the call."""
    found = contents(folder / _CALL)
    record = check_call_record(found.meta, folder, name=name)
    like = {"ids": np.empty(record["members"], np.int32), "sizes": np.empty(record["shards"], np.int64)}
    tree = load(folder / _CALL, like)
    identity = CallIdentity(record["texts"], tuple(record["code"]), record["conditions"])
    return SavedCall(identity, tree["ids"], tree["sizes"])


@contextlib.contextmanager
def lock_folder(folder: Path | None) -> Iterator[None]:
    """Locks the folder for one call; does nothing without a folder."""
    if folder is None:
        yield
        return
    lock = RunLock(folder)
    with explain_folder(folder):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
