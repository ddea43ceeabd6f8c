import errno
import functools as ft
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .._caller import caller
from .._check import CheckpointCorruptError, check_path, number_text
from ..distributed import is_first
from ..distributed._engine import raise_on_all
from . import _orbax
from ._check import corrupt_error
from ._disk import as_path, has_manifest, is_on_disk, list_folder
from ._folders import has_our_manifest, is_unfinished, is_written, not_a_checkpoint_message
from ._manifest import Entry, Manifest, is_orbax
from ._orbax import OrbaxReader
from ._read import Reader, Wanted, read_manifest
from ._snapshot import DTYPES, Snapshot, count_bytes, device_numbers, host_numbers, key_dtype
from ._structure import shape_text
from ._write import write

# Recognises folders that are not checkpoints.

STEP = re.compile(r"step-([0-9]{12})")
_SHARD = re.compile(r"shard-[0-9]{6,}")
_ORBAX = {"_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt", "ocdbt.process_0", "orbax.checkpoint"}
_SINGLE = (".eqx", ".safetensors")


class Kind(NamedTuple):
    """The kind of a folder, as `not_a_checkpoint_message` names it, and the names in the folder that show it."""

    name: str
    found: list[str]


def kind_of(folder: Path) -> Kind:
    """The kind of a folder, from the names in it."""
    entries = sorted(list_folder(folder), key=lambda entry: entry.name)
    steps = [entry for entry in entries if STEP.fullmatch(entry.name) and entry.is_dir()]
    if steps:
        return Kind("fit" if any(map(_is_of_fit, steps)) else "run", [entry.name for entry in steps])
    found = [entry.name for entry in entries]
    if _ORBAX & {*found}:
        return Kind("orbax", found)
    inside = [entry.name for entry in entries if entry.is_dir() and has_our_manifest(entry)]
    shards = [name for name in inside if name != "call"]
    if "call" in inside and (not shards or any(map(_SHARD.fullmatch, shards))):
        return Kind("shards", shards) if shards else Kind("other", found)
    if inside:
        return Kind("checkpoints", inside)
    single = [name for name in found if name.endswith(_SINGLE)]
    if single:
        return Kind("files", single)
    return Kind("other" if found else "empty", found)


def _is_of_fit(step: Path) -> bool:
    try:
        return is_of_fit(read_manifest(step))
    except (CheckpointCorruptError, ValueError, OSError):
        return False


def is_of_fit(manifest: Manifest) -> bool:
    """Whether `fit` wrote a checkpoint."""
    meta: Any = manifest.meta
    return isinstance(meta, dict) and isinstance(meta.get("fit"), dict) and "call" in meta["fit"]


_ATTEMPTS = 5


def open_checkpoint(path: Any) -> Reader | OrbaxReader:
    """Opens a checkpoint of either format for reading.

    **Arguments:** `path`, the folder, from `as_path`; `name`, the public function, for messages.
    """
    if is_on_disk(path):
        if not os.path.exists(path):
            raise FileNotFoundError(errno.ENOENT, f"`{caller()}` found no checkpoint at `{path}`")
        if not os.path.isdir(path):
            raise NotADirectoryError(
                errno.ENOTDIR,
                f"`{caller()}` needs the folder that `save` wrote, and `{path}` is a file.\nA file of "
                "`equinox.tree_serialise_leaves` is read by `equinox.tree_deserialise_leaves`",
            )
        if not (has_our_manifest(path) or any(map(is_written, list_folder(path)))):
            raise FileNotFoundError(errno.ENOENT, not_a_checkpoint_message(path, *kind_of(path)))
    if not (not is_unfinished(path) if is_on_disk(path) else has_manifest(path)):
        raise FileNotFoundError(errno.ENOENT, f"`{caller()}` found no finished checkpoint at `{path}`")
    for _ in range(_ATTEMPTS):
        manifest = read_manifest(path)
        try:
            return OrbaxReader(path, manifest) if is_orbax(manifest.file) else Reader(path, manifest)
        except FileNotFoundError:
            # If the checkpoint was overwritten in between, the new manifest names other arrays.
            if read_manifest(path) == manifest:
                first = manifest.entries[0].path if manifest.entries else None
                raise corrupt_error(path / manifest.file, "the file is missing", leaf=first) from None
    raise corrupt_error(path, "another process keeps overwriting it")


FormatName = Literal["safetensors", "orbax"]


class Format(NamedTuple):
    """A format of checkpoints: the functions in which formats differ."""

    take: Callable[..., Any]
    """Returns the numbers of an array leaf, for a `Snapshot`."""

    begin: Callable[[Any, Snapshot], Callable[[], None]]
    """Begins a checkpoint; returns a function that completes it, in any thread."""

    stands: Callable[[Any], bool]
    """Whether there is a complete checkpoint at a path."""

    settle: Callable[[Callable[[], None]], None]
    """Runs a job that may fail. All processes that write a checkpoint together call it."""

    leads: Callable[[], bool]
    """Whether this process does the work that one process does for all."""


def _begin(path: Any, content: Snapshot) -> Callable[[], None]:
    return ft.partial(write, path, content)


def _run(job: Callable[[], None]) -> None:
    job()


def _run_together(job: Callable[[], None]) -> None:
    error = None
    try:
        job()
    except Exception as failure:
        error = failure
    raise_on_all(error)


FORMATS: dict[str, Format] = {
    "safetensors": Format(host_numbers, _begin, Path.is_dir, _run, lambda: True),
    "orbax": Format(device_numbers, _orbax.begin, has_manifest, _run_together, is_first),
}


class Contents(NamedTuple):
    """The contents of a checkpoint, from its manifest.

    **Attributes:**

    - `ids`: the members' ids, or `None`.
    - `leaves`: by path, the arrays as `f32[8,50,13]` and the Python numbers.
    - `structure`: by path, the rest of the tree: types, static fields, functions by name.
    - `meta`, `step`, `score`, `format`: as they were saved.
    - `versions`: of Python and the libraries that wrote it.
    - `num_bytes`: the size of its arrays.
    - `unchecked`: the paths of leaves without a checksum, of format `"orbax"` only.
    """

    ids: tuple[int, ...] | None
    leaves: dict[str, str]
    structure: dict[str, str]
    meta: Any
    step: int | None
    score: float | None
    versions: dict[str, str]
    num_bytes: int
    format: str
    unchecked: tuple[str, ...]


def contents(path: str | os.PathLike[str]) -> Contents:
    """Lists the contents of a checkpoint, without reading its arrays and without the model's code.

    **Returns:** [`eqx_ensemble.checkpoint.Contents`][].

    **Raises:** `CheckpointCorruptError` for a damaged manifest, or a file of the wrong size; `FileNotFoundError` if
    there is no checkpoint; `ValueError` for another version of the format.

    ```python
    import tempfile

    path = f"{tempfile.mkdtemp()}/model"
    ee.save(path, eqx.nn.Linear(3, 1, key=key))
    ee.checkpoint.contents(path).leaves  # {".weight": "f32[1,3]", ".bias": "f32[1]"}
    ee.checkpoint.verify(path).num_bytes  # 16
    ```
    """
    check_path(path, "path")
    with open_checkpoint(as_path(path)) as reader:
        return contents_of(reader)


def verify(path: str | os.PathLike[str]) -> Contents:
    """Reads a checkpoint and verifies all checksums, without the model's code.

    With format `"orbax"`, all arrays are read into host memory at once, and leaves in `unchecked` are not verified.

    **Returns:** [`eqx_ensemble.checkpoint.Contents`][].

    **Raises:** as [`eqx_ensemble.checkpoint.contents`][]; `CheckpointCorruptError` with the file, leaf and member whose
    checksum does not match.
    """
    check_path(path, "path")
    with open_checkpoint(as_path(path)) as reader:
        for _ in reader.arrays([Wanted(entry, None) for entry in _tensors(reader.manifest)]):
            pass
        return contents_of(reader)


def _tensors(manifest: Manifest) -> list[Entry]:
    """The arrays, each once."""
    return [entry for entry in manifest.entries if entry.tensor == entry.path]


def contents_of(reader: Reader | OrbaxReader) -> Contents:
    """The contents of an open checkpoint."""
    manifest = reader.manifest
    leaves = {entry.path: _text(entry) for entry in manifest.entries}
    leaves |= {number.path: number_text(number.value) for number in manifest.numbers}
    num_bytes = sum(count_bytes(entry.shape, DTYPES[entry.dtype].itemsize) for entry in _tensors(manifest))
    return Contents(
        manifest.members,
        leaves,
        manifest.structure,
        manifest.meta,
        manifest.step,
        manifest.score,
        manifest.versions,
        num_bytes,
        "orbax" if is_orbax(manifest.file) else "safetensors",
        tuple(entry.path for entry in manifest.entries if entry.checksum == ""),
    )


def _text(entry: Entry) -> str:
    if entry.key is not None:
        return shape_text(entry.shape[:-1], key_dtype(entry.key))
    return shape_text(entry.shape, DTYPES[entry.dtype])
