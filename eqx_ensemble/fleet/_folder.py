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
from ..checkpoint._check_record import check_fields, check_valid, explain_record, is_count, is_list, is_texts
from ..checkpoint._commit import check_own
from ..checkpoint._names import is_checkpoint
from ..checkpoint._path import has_manifest
from ..checkpoint._run_lock import RunLock
from ..train._run import Run
from ._check_saved import check_call_record, check_shard_of_call
from ._columns import Columns, columns_of, from_json, to_json
from ._identity import CallIdentity

_CALL = "call"
_CALL_FIELDS = {
    "texts": is_texts,
    "code": lambda value: is_list(value, str),
    "conditions": is_texts,
    "members": is_count,
    "shards": is_count,
}


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
        return _is_saved(self.path)

    def read(self, *, name: str) -> Columns:
        """The columns of a complete shard."""
        found = contents(self.path)
        record = check_shard_of_call(found.meta, self.digest, self.path, name=name)
        with explain_record(self.path):
            columns = from_json(record.get("columns"))
            check_valid("its columns are of other members", holds=tuple(columns.ids.tolist()) == found.ids)
        return columns

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
    for number in range(len(sizes)):  # before members are trained that could not be saved
        check_own(store_of(folder, number, "").path)
    meta = {"fleet.fit": identity._asdict() | {"members": len(ids), "shards": len(sizes)}}
    save(folder / _CALL, {"ids": ids, "sizes": sizes}, meta=meta)
    return SavedCall(identity, ids, sizes)


def has_call(folder: Path) -> bool:
    """Whether a folder holds a call of `fleet.fit`."""
    return _is_saved(folder / _CALL)


def _is_saved(path: Path) -> bool:
    """Whether there is a checkpoint, damaged or not."""
    return has_manifest(path) and is_checkpoint(path)


def read_call(folder: Path, *, name: str) -> SavedCall:
    """Reads the checkpoint of the call."""
    found = contents(folder / _CALL)
    record = check_call_record(found.meta, folder, name=name)
    with explain_record(folder / _CALL):
        check_fields(record, _CALL_FIELDS, "fleet.fit")
        saved = tuple(found.leaves.get(f"['{word}']") for word in ("ids", "sizes"))
        expected = f"i32[{record['members']}]", f"i64[{record['shards']}]"
        check_valid("its numbers of members and shards have changed", holds=saved == expected)
    like = {"ids": np.empty(record["members"], np.int32), "sizes": np.empty(record["shards"], np.int64)}
    tree = load(folder / _CALL, like)
    identity = CallIdentity(record["texts"], tuple(record["code"]), record["conditions"])
    return SavedCall(identity, tree["ids"], tree["sizes"])


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Locks the folder for one call."""
    lock = RunLock(folder)
    with explain_folder(folder):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
