"""The folders of a call: of the runs of its shards during training, and of their members, one checkpoint per shard."""

import errno
import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from .. import _axes
from .._caller import caller
from .._check import check_path
from .._ensemble import Ensemble
from .._files import save
from ..checkpoint import Checkpoints, contents
from ..checkpoint._engine import (
    CallRecord,
    as_path,
    check_own,
    check_resume,
    check_run_folder,
    check_same_call,
    check_valid,
    checkpoints_inside,
    child,
    conditions,
    explain_record,
    has_checkpoints,
    has_our_manifest,
    is_on_disk,
    is_saved,
    kind_of,
    list_folder,
    read_call,
    write_call,
)
from ..train._engine import Run, array_texts, code_text, digest_of, fit, option_text
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
            folder = checkpoints.folder
            check_run_folder(folder)
            if folder.is_dir() and kind_of(folder).name == "fit":
                raise FileExistsError(
                    errno.EEXIST,
                    f"`{caller()}` needs a folder for the checkpoints of its shards, and `{folder}` is the folder of a "
                    "run of `fit`.\nChoose another folder",
                )
            check_resume(checkpoints.resume, folder, "checkpoints of shards" if has_checkpoints(folder) else "")

    def divide(self, size: int) -> list[np.ndarray]:
        """The positions of the members of each shard: as divided in the folder, otherwise of about `size`."""
        count = None if self._shard is not None else self._count()
        if count is not None and count <= max(self._num_members // 2, 1):
            parts = np.array_split(np.arange(self._num_members), count)
        else:
            parts = divide(self._num_members, size)
        self.use(parts)
        return parts

    def use(self, parts: list[np.ndarray]) -> None:
        """Uses a given division; raises if the folder has another one."""
        self._firsts = [int(part[0]) for part in parts]
        found, count = self._count(), len(parts)
        if found is None or found == count:
            return
        given, hint = f"this call has {count}", "Choose another folder."
        if self._shard is not None:
            given, hint = f"`shard={self._shard}` makes {count}", "Leave `shard` out, or choose another folder."
        raise ValueError(
            f"`{caller()}` cannot resume: the checkpoints in `{self._folder}` are from a division into {found} shards, "
            f"and {given}.\n{hint}"
        )

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
        if len(counts) > 1:
            raise ValueError(
                f"`{caller()}` cannot resume: the checkpoints in `{self._folder}` are from divisions into "
                f"{sorted(counts)} shards, of more than one call.\nChoose another folder."
            )
        return counts.pop() if counts else None


# The identity of a call of `fleet.fit`: a short text for each of its members, functions, data and options.

# Settings of JAX that change random streams or dtypes, and one that changes the last bits.
_SETTINGS = ("jax_enable_x64", "jax_threefry_partitionable", "jax_default_prng_impl", "jax_numpy_dtype_promotion")
_PRECISION = "jax_default_matmul_precision"
# Options that affect time and memory, but not what is saved.
_IGNORED = ("plan", "mesh")


def call_identity(
    start: Any, ids: np.ndarray, functions: dict[str, Any], options: dict[str, Any], *, key: Any
) -> CallRecord:
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
    return CallRecord(code | texts, tuple(code), conditions(**{_PRECISION: str(current[_PRECISION])}))


def check_call_of_folder(saved: CallRecord, now: CallRecord, folder: Any) -> None:
    """Raises if a folder was written by a different call; warns if it was written under other conditions."""
    effect = "new shards may differ from the saved ones in their last bits"
    check_same_call(saved, now, folder, effect=effect, harmless=("backend", _PRECISION))


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


# The folder in which shards save their members.


def check_save_folder(path: Any) -> Any:
    """Raises unless `path` is a folder on a file system. Returns its absolute path."""
    check_path(path, "save")
    found = as_path(path)
    if not is_on_disk(found):
        raise TypeError(f"`{caller()}` needs a folder on a file system as `save`, got `{path}`.")
    if has_our_manifest(found):
        raise FileExistsError(
            errno.EEXIST,
            f"`{caller()}` needs a folder for all shards as `save`; `{path}` is a single checkpoint written by "
            "`ee.save`.\nChoose another folder",
        )
    return found.absolute()


class Store(NamedTuple):
    """Where one shard saves its members: the path of its checkpoint, and the digest of the call."""

    path: Path
    digest: str

    @property
    def is_complete(self) -> bool:
        """Whether the shard is complete."""
        return is_saved(self.path)

    def read(self) -> Columns:
        """The columns of a complete shard."""
        found = contents(self.path)
        record: Any = found.meta.get("fleet.fit") if isinstance(found.meta, dict) else None
        if not isinstance(record, dict) or record.get("call") != self.digest:
            raise ValueError(
                f"`{caller()}` cannot read `{self.path}`: it belongs to a different call than its folder.\n"
                "Remove it, and rerun the call of the folder."
            )
        if record.get("shard") != self.path.name:
            raise ValueError(
                f"`{caller()}` cannot read `{self.path}`: it holds `{record.get('shard')}` of this call under another "
                "name.\nRename it back, or remove it and rerun the call."
            )
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


class SavedCall(NamedTuple):
    """The call that a folder belongs to, and its division into shards."""

    folder: Path
    record: CallRecord
    ids: np.ndarray
    sizes: np.ndarray

    def positions(self) -> list[np.ndarray]:
        """The positions of the members of each shard."""
        return np.split(np.arange(len(self.ids)), np.cumsum(self.sizes)[:-1])

    def store(self, number: int) -> Store:
        """The store of the shard with this number."""
        return Store(shard_path(self.folder, number), self.record.digest)

    def complete(self) -> dict[int, Store]:
        """The stores of the completed shards, by number."""
        stores = {number: self.store(number) for number in range(len(self.sizes))}
        return {number: store for number, store in stores.items() if store.is_complete}


def shard_path(folder: Path, number: int) -> Path:
    """The checkpoint of the shard with this number."""
    return child(folder, "shard", number)


def save_call(folder: Path, record: CallRecord, ids: np.ndarray, positions: Sequence[np.ndarray]) -> SavedCall:
    """Saves the call."""
    sizes = np.array([len(part) for part in positions])
    for number in range(len(sizes)):  # before members are trained that could not be saved
        check_own(shard_path(folder, number))
    write_call(folder, record, {"ids": ids, "sizes": sizes})
    return SavedCall(folder, record, ids, sizes)


def load_call(folder: Path) -> SavedCall:
    """Reads the call."""
    record, arrays = read_call(folder)
    ids, sizes = (arrays.get(word, np.zeros(())) for word in ("ids", "sizes"))
    kinds = [(x.ndim, x.dtype.name) for x in (ids, sizes)]
    if kinds != [(1, "int32"), (1, "int64")] or sizes.sum() != len(ids):
        raise ValueError(
            f"`{caller()}` needs a folder of `fleet.fit(save=...)`, and `{folder}` holds something else.\n"
            "Choose another folder."
        )
    return SavedCall(folder, record, ids, sizes)
