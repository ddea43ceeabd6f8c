"""The folder in which shards save their members: one checkpoint for the call, and one per completed shard."""

import contextlib
import hashlib
import inspect
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from .. import _axes
from .._caller import caller
from .._ensemble import Ensemble
from .._files import load, save
from .._warnings import warn
from ..checkpoint import Checkpoints, contents
from ..checkpoint._engine import (
    RunLock,
    check_fields,
    check_own,
    check_valid,
    checkpoints_inside,
    explain_folder,
    explain_record,
    has_manifest,
    is_checkpoint,
    is_count,
    is_list,
    is_texts,
    list_folder,
    versions,
)
from ..methods._rounds import has_checkpoints
from ..train._engine import Run, array_texts, check_same_call, code_text, digest_of, fit, option_text
from ._check_saved import (
    check_begun,
    check_call_record,
    check_not_of_fit,
    check_one_division,
    check_same_division,
    check_shard_of_call,
)
from ._columns import Columns, columns_of, from_json, to_json
from ._divide import divide, is_maker
from ._worker import settings

# The folder in which shards save their runs during training, and its division into shards.

_SHARD = re.compile(r"shard-([0-9]{5,})-of-([0-9]{5,})")


class ShardCheckpoints:
    """The checkpoints of each shard of a call; `None` if it saves none.

    A resumed call keeps the division of the folder, whatever the current number of workers.
    """

    def __init__(self, checkpoints: Checkpoints | None, num_members: int, *, shard: int | None) -> None:
        self._checkpoints, self._num_members, self._shard = checkpoints, num_members, shard
        self._folder = None if checkpoints is None else checkpoints.folder
        self._firsts: list[int] = []
        if checkpoints is not None:
            check_not_of_fit(self._folder)
            check_begun(self._folder, checkpoints.resume, begun=has_checkpoints(self._folder))

    def divide(self, size: int) -> list[np.ndarray]:
        """The positions of the members of each shard: as divided in the folder, otherwise of about `size`."""
        count = None if self._folder is None or self._shard is not None else self._count()
        if count is not None and count <= max(self._num_members // 2, 1):
            parts = np.array_split(np.arange(self._num_members), count)
        else:
            parts = divide(self._num_members, size)
        self.use(parts)
        return parts

    def use(self, parts: list[np.ndarray]) -> None:
        """Uses a given division; raises if the folder has another one."""
        self._firsts = [int(part[0]) for part in parts]
        if self._folder is not None:
            check_same_division(self._count(), len(parts), self._shard, self._folder)

    def of_shard(self, positions: np.ndarray) -> Checkpoints | None:
        """The checkpoints of the shard of the members at these positions."""
        if self._checkpoints is None:
            return None
        number = self._firsts.index(int(positions[0]))
        return checkpoints_inside(self._checkpoints, f"shard-{number:05d}-of-{len(self._firsts):05d}", resume="auto")

    def _count(self) -> int | None:
        """The number of shards in the folder; `None` if it has none yet."""
        if self._folder is None or not self._folder.exists():
            return None
        matches = [_SHARD.fullmatch(entry.name) for entry in list_folder(self._folder)]
        counts = {int(match[2]) for match in matches if match}
        check_one_division(counts, self._folder)
        return counts.pop() if counts else None


# The identity of a call of `fleet.fit`: a short text for each of its members, functions, data and options.

# Settings of JAX that change random streams or dtypes, and those that change the last bits.
_SETTINGS = ("jax_enable_x64", "jax_threefry_partitionable", "jax_default_prng_impl", "jax_numpy_dtype_promotion")
_DEVICE = ("backend", "jax_default_matmul_precision")
# Options that affect time and memory, but not what is saved.
_IGNORED = ("plan", "mesh")


class CallIdentity(NamedTuple):
    """The identity of a call.

    **Attributes:**

    - `texts`: the texts that identify the call, by name.
    - `code`: the names of the texts that can be compared under equal library versions only.
    - `conditions`: these versions, the kind of device and the precision of matrix products.
    """

    texts: dict[str, str]
    code: tuple[str, ...]
    conditions: dict[str, str]

    @property
    def digest(self) -> str:
        """The SHA-256 digest of the texts and conditions."""
        return hashlib.sha256(json.dumps([self.texts, self.conditions], sort_keys=True).encode()).hexdigest()


def call_identity(
    start: Any, ids: np.ndarray, functions: dict[str, Any], options: dict[str, Any], *, key: Any
) -> CallIdentity:
    """The identity of a call.

    **Arguments:**

    - `start`: the ensemble, state or run, or a function that makes an ensemble.
    - `functions`: the loss and the optimiser, by name.
    - `options`: the data and all options, by name.
    """
    texts = {"members": option_text(ids), "key": option_text(key)}
    code = {word: code_text(fn) for word, fn in functions.items()}
    if isinstance(start, Run):
        start = start.train_state, start.ensemble, start.selection
    if not is_maker(start) or jax.tree.leaves(eqx.filter(start, _axes.is_array)):
        texts["ensemble"] = digest_of(start)
    code["the members' code"] = code_text(eqx.filter(start, _axes.is_array, inverse=True))
    for word, value in options.items():
        if word in _IGNORED or value is None or _is_default(word, value):
            continue
        if not _is_data(value):
            code[word] = code_text(value)
        elif jax.tree_util.treedef_is_leaf(jax.tree.structure(value)):
            texts[word] = option_text(value)
        else:
            arrays = jax.tree.map(lambda x: x if _axes.is_array(x) else np.asarray(x), value)
            texts |= array_texts(arrays, word)
    current = settings()
    texts |= {word: str(current[word]) for word in _SETTINGS}
    return CallIdentity(code | texts, tuple(code), _conditions(str(current["jax_default_matmul_precision"])))


def _conditions(precision: str) -> dict[str, str]:
    """What affects the last bits of results."""
    packages = {name: version for name, version in versions().items() if name not in ("python", "numpy")}
    packages["bytecode"] = str(sys.implementation.cache_tag)
    return packages | dict(zip(_DEVICE, (jax.default_backend(), precision), strict=True))


def check_same_identity(saved: CallIdentity, now: CallIdentity, folder: Any) -> None:
    """Raises if a folder was written by a different call; warns if it was written under other conditions."""
    before, after = saved.texts, now.texts
    differ = [word for word in now.conditions if saved.conditions.get(word) != now.conditions[word]]
    if differ:
        changes = ", ".join(f"{word} {saved.conditions.get(word)} -> {now.conditions[word]}" for word in differ)
        others = not set(differ) <= set(_DEVICE)
        warn(
            f"`{caller()}` resumes in `{folder}`, which was written under other conditions ({changes}): new shards may "
            f"differ from the saved ones in their last bits{', and functions cannot be compared' if others else ''}."
        )
        if others:
            code = {*saved.code, *now.code}
            before, after = ({word: x for word, x in texts.items() if word not in code} for texts in (before, after))
    check_same_call(before, after, folder)


def _is_default(word: str, value: Any) -> bool:
    """Whether an option has its default value in `fit`."""
    known = inspect.signature(fit).parameters
    default = known[word].default if word in known else None
    plain = isinstance(value, bool | int | float | str) and isinstance(default, bool | int | float | str)
    return value is default or (plain and value == default)


def _is_data(value: Any) -> bool:
    """Whether a value consists of arrays, numbers and strings, without functions."""
    plain = lambda leaf: _axes.is_array(leaf) or isinstance(leaf, bool | int | float | complex | str | np.generic)
    return not callable(value) and all(map(plain, jax.tree.leaves(value)))


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

    def read(self) -> Columns:
        """The columns of a complete shard."""
        found = contents(self.path)
        record = check_shard_of_call(found.meta, self.digest, self.path)
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


def read_call(folder: Path) -> SavedCall:
    """Reads the checkpoint of the call."""
    found = contents(folder / _CALL)
    record = check_call_record(found.meta, folder)
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
