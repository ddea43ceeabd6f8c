import os
from typing import Any, NamedTuple

from .._check import check_path, number_text
from ._check_like import shape_text
from ._dtypes import DTYPES, count_bytes, key_dtype
from ._formats import open_checkpoint
from ._manifest import Entry, Manifest, is_orbax
from ._orbax import OrbaxReader
from ._path import as_path
from ._read import Reader, Wanted


class Contents(NamedTuple):
    """The contents of a checkpoint, from its manifest.

    **Attributes:**

    - `ids`: the members' ids; `None` for a tree without members.
    - `leaves`: by path, the arrays as `f32[8,50,13]` and the Python numbers.
    - `structure`: by path, the rest of the tree: types, static fields, functions by name.
    - `meta`, `step`, `score`: as they were saved.
    - `versions`: those of Python and of the libraries that wrote it.
    - `num_bytes`: the size of its arrays.
    - `format`: `"safetensors"` or `"orbax"`.
    - `unchecked`: the paths of leaves without a checksum, in which a changed bit is not detected. Only the format
        `"orbax"` has them: leaves of which no process held all, or all of one member's part.
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

    **Arguments:**

    - `path`: the checkpoint's folder.

    **Returns:** [`eqx_ensemble.checkpoint.Contents`][].

    **Raises:** `CheckpointCorruptError` for a damaged manifest, or a file of arrays of the wrong size;
    `FileNotFoundError` if there is no checkpoint; `ValueError` for another version of the format.

    ```python
    import tempfile

    path = f"{tempfile.mkdtemp()}/model"
    ee.save(path, eqx.nn.Linear(3, 1, key=key), meta={"note": "an example"})
    ee.checkpoint.contents(path).leaves  # {".weight": "f32[1,3]", ".bias": "f32[1]"}
    ```
    """
    check_path(path, "path", name="checkpoint.contents")
    with open_checkpoint(as_path(path), name="checkpoint.contents") as reader:
        return contents_of(reader)


def verify(path: str | os.PathLike[str]) -> Contents:
    """Reads a checkpoint and verifies all of its checksums, without the model's code.

    In the format `"orbax"`, all arrays are read into host memory at once. Leaves without a checksum are not verified;
    `unchecked` lists them.

    **Arguments:**

    - `path`: the checkpoint's folder.

    **Returns:** [`eqx_ensemble.checkpoint.Contents`][].

    **Raises:** `CheckpointCorruptError` with the file, the leaf and the member, if a checksum does not match; otherwise
    as [`eqx_ensemble.checkpoint.contents`][].

    ```python
    import tempfile

    path = f"{tempfile.mkdtemp()}/model"
    ee.save(path, eqx.nn.Linear(3, 1, key=key))
    ee.checkpoint.verify(path).num_bytes  # 16
    ```
    """
    check_path(path, "path", name="checkpoint.verify")
    with open_checkpoint(as_path(path), name="checkpoint.verify") as reader:
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
