"""Orbax writes and reads the arrays; the manifest and the checksums are ours. Only this module uses Orbax."""

import contextlib
import importlib.metadata
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from .._check import CheckpointCorruptError, check_version, missing_extra_message
from ..distributed import is_first
from ..distributed._engine import all_gather, raise_on_all
from ._check import check_manifest_size, check_same_in_processes, corrupt_error
from ._disk import absolute, is_on_disk
from ._folders import NotSyncedError, explain_orbax, explain_writing, next_number
from ._hashing import SIZE, checksum, digests, rows_of
from ._manifest import LIMIT, NAME, TABLE, Entry, Manifest, encode
from ._read import MISMATCH, Wanted
from ._snapshot import DTYPES, Snapshot
from ._structure import shape_text
from ._write import (
    check_own,
    give_up,
    make_parents,
    mark,
    put_manifest,
    remove_unused,
    sync_last,
    sync_names,
    write_manifest,
)

_OLDEST = (0, 12, 8)


def begin(path: Any, content: Snapshot) -> Callable[[], None]:
    """Begins a checkpoint at `path`. Once all arrays are copied, returns a function that completes it.

    Orbax writes into a new folder inside `path`, next to that of an earlier checkpoint. The manifest names one of them
    and is replaced atomically, on disks and in object stores: until then, the checkpoint at `path` is the earlier one.
    All processes must call both functions.
    """
    ocp = _orbax()
    path = absolute(path)
    entries, table = _with_checksums(content)
    number = _agreed_number(path)
    name = f"orbax-{number:04d}"
    versions = content.manifest.versions | {"orbax-checkpoint": importlib.metadata.version("orbax-checkpoint")}
    manifest = encode(content.manifest._replace(file=name, entries=entries, versions=versions))
    check_manifest_size(len(manifest), LIMIT, path)
    arrays = {tensor: data for tensor, data in content.arrays.items() if data.size} | {TABLE: table}
    with _writing(path, number), ocp.Context():  # without the options of an enclosing context
        response = ocp.save_async(str(path / name), arrays) if entries else None

    def finish() -> None:
        with _writing(path, number):
            if response is not None:
                response.result()
            if is_first():
                _commit(path, name, manifest)

    return finish


def _orbax() -> Any:
    use = {"what": 'format="orbax"', "extra": "orbax"}
    try:
        # Older versions have the module, but not all of its functions.
        check_version("orbax-checkpoint", _OLDEST, **use)
        from orbax.checkpoint.experimental import v1
    except ModuleNotFoundError:
        raise ImportError(missing_extra_message(use["what"], "orbax-checkpoint", use["extra"])) from None
    return v1


def _other_threads_have(dtype: Any) -> bool:
    """Whether JAX supports a dtype in the threads of Orbax, where `with jax.enable_x64(True)` has no effect."""
    if np.dtype(dtype).itemsize < 8:
        return True
    with ThreadPoolExecutor(1) as other:
        return other.submit(jax.dtypes.canonicalize_dtype, dtype).result() == dtype


def _agreed_number(path: Any) -> int:
    """The number of the folder to write, chosen by the first process once it may write there."""
    number, error = 0, None
    if is_first():
        try:
            if path.exists():
                check_own(path)
            with explain_writing(path):
                if is_on_disk(path):
                    make_parents(path)
                    mark(path)
                number = next_number(path)
        except OSError as failure:
            error = failure
    raise_on_all(error)
    return int(all_gather(np.array([number], np.int32))[0, 0])


def _with_checksums(content: Snapshot) -> tuple[tuple[Entry, ...], np.ndarray]:
    """The entries with their checksums, and the table of the checksums of their members.

    Each process computes those of the members that it holds in one piece. A leaf has no checksum if it has a member
    that no process holds in one piece. Parts that several processes hold must be equal.
    """
    places = rows_of(content.manifest.entries)
    known = np.zeros((sum(place.count for place in places), 1 + SIZE), np.uint8)
    for entry, first, _ in places:
        for row, digest in digests(content.arrays[entry.tensor], per_member=entry.kind == "members").items():
            known[first + row] = np.frombuffer(b"\1" + digest, np.uint8)
    of_all = all_gather(known)
    is_known = of_all[..., 0] > 0
    table = of_all[is_known.argmax(axis=0), np.arange(len(known)), 1:]
    differs = (is_known & (of_all[..., 1:] != table).any(axis=-1)).any(axis=0)
    checksums = {}
    for entry, first, count in places:
        rows = slice(first, first + count)
        check_same_in_processes(entry.path, same=not differs[rows].any())
        checksums[entry.tensor] = checksum(entry, table[rows].tobytes()) if is_known[:, rows].any(axis=0).all() else ""
    return tuple(entry._replace(checksum=checksums[entry.tensor]) for entry in content.manifest.entries), table


@contextlib.contextmanager
def _writing(path: Any, number: int) -> Iterator[None]:
    try:
        with explain_orbax(path):
            yield
    except NotSyncedError:
        raise  # the disk may still return to the old manifest, which names the old arrays
    except BaseException:
        if is_first():
            give_up(path, number)
        raise


def _commit(path: Any, name: str, manifest: bytes) -> None:
    if is_on_disk(path):
        for entry in [*(path / name).rglob("*"), path / name]:  # which Orbax does not sync
            if entry.exists():
                sync_names(entry)
        write_manifest(path, manifest)
        sync_names(path)
        put_manifest(path)
        sync_last(path)
    else:
        (path / NAME).write_bytes(manifest)  # objects are written atomically
    remove_unused(path)


class OrbaxReader:
    """A checkpoint whose arrays Orbax wrote, open for reading. All arrays are read and verified at once."""

    def __init__(self, path: Any, manifest: Manifest) -> None:
        self.folder, self.manifest, self.file = path, manifest, path / manifest.file
        if manifest.entries and not self.file.exists():
            raise FileNotFoundError(self.file)

    def __enter__(self) -> "OrbaxReader":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def arrays(
        self, wanted: Sequence[Wanted], rows: Sequence[int] | None = None
    ) -> Generator[np.ndarray | jax.Array, None, None]:
        """The arrays of leaves, verified, with the sharding that is wanted; of those with members, `rows` only.

        All processes must ask for the same leaves. If one of them finds damage, all raise.
        """
        loaded, error = {}, None
        try:
            loaded = self._load(wanted)
            self._verify(loaded)
        except (CheckpointCorruptError, OSError) as failure:
            error = failure
        raise_on_all(error)
        for entry, _ in wanted:
            data = loaded[entry.tensor]
            yield data if rows is None or entry.kind == "shared" else data[np.asarray(rows, int)]

    def _load(self, wanted: Sequence[Wanted]) -> dict[str, Any]:
        """Loads all arrays, each to NumPy or with a sharding: by default, Orbax uses the devices of the save."""
        like: dict[str, Any] = {TABLE: np.ndarray}
        loaded: dict[str, Any] = {}
        for entry, sharding in wanted:
            struct = jax.ShapeDtypeStruct(entry.shape, DTYPES[entry.dtype], sharding=sharding)
            if 0 in entry.shape:
                loaded[entry.tensor] = np.empty(entry.shape, struct.dtype)  # which Orbax does not save
            elif sharding is None or like.get(entry.tensor, struct) != struct or not _other_threads_have(struct.dtype):
                like[entry.tensor] = np.ndarray
            else:
                like[entry.tensor] = struct
        ocp = _orbax()
        try:
            with ocp.Context():
                return loaded | (ocp.load(str(absolute(self.file)), like) if wanted else {})
        except MemoryError:
            raise
        except Exception as error:
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                raise
            raise corrupt_error(self.file, f"Orbax cannot read it: {error}") from error

    def _verify(self, loaded: dict[str, Any]) -> None:
        """Checks that the parts of arrays that this process holds are as they were saved."""
        for entry, first, count in rows_of(self.manifest.entries):
            data = loaded[entry.tensor]
            if data.shape != entry.shape or data.dtype != DTYPES[entry.dtype]:
                found = shape_text(data.shape, data.dtype)
                raise corrupt_error(self.file, f"it has {found}", leaf=entry.path)
            rows = loaded[TABLE][first : first + count].tobytes()
            if entry.checksum == "":
                continue
            if checksum(entry, rows) != entry.checksum:
                raise corrupt_error(self.file, "its checksums have changed", leaf=entry.path)
            for row, digest in digests(data, per_member=entry.kind == "members").items():
                if digest != rows[row * SIZE : (row + 1) * SIZE]:
                    member = row if entry.kind == "members" else None
                    raise corrupt_error(self.file, MISMATCH, leaf=entry.path, member=member)
