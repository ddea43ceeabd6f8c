import io
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, Literal, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as safetensors_bytes

from .._caller import caller
from .._check import check_path, check_word, kind_text
from .._ensemble import Ensemble, Group, M, check_ensemble_or_group, stack
from ..checkpoint._engine import (
    LeafDifference,
    absolute,
    as_path,
    check_same_leaves,
    corrupt_error,
    count_bytes,
    is_array_like,
    is_number,
    is_on_disk,
    saved_leaves,
    write_file,
)
from ._like import PLAIN_DTYPES, check_like_given, check_no_typed_keys, check_paths, evaluate_make, is_maker
from ._save_load import Model, PathLike, Tree, load

_AFTER = "<after the last leaf>"
_KINDS = {bool: "b", int: "iu", float: "f", complex: "c"}


def read_equinox(path: Path, like: Any) -> Any:
    """Reads a file of `equinox.tree_serialise_leaves`, which has neither names nor a count of its arrays.

    The headers of the arrays are compared with `like` first; NumPy then allocates memory for arrays in the file only.
    """
    check_no_typed_keys(like, "files of `equinox.tree_serialise_leaves` hold none")
    with open(path, "rb") as file:
        gaps, size = [], os.fstat(file.fileno()).st_size
        for where, leaf in saved_leaves(like):
            if is_array_like(leaf) or is_number(leaf):
                found = _header(file, size, path, where)
                if found is None or not _fits(found, leaf):
                    gaps.append(_gap(where, found, leaf))
        while (found := _header(file, size, path, _AFTER)) is not None:
            gaps.append(_gap(_AFTER, found, None))
        check_same_leaves(gaps, path, only_dtypes=False)
        file.seek(0)
        return eqx.tree_deserialise_leaves(file, like)


def _header(file: BinaryIO, size: int, path: Path, where: str) -> jax.ShapeDtypeStruct | np.ndarray | None:
    """Shape and dtype of the next array in the file, which is skipped; None at the end."""
    if file.tell() == size:
        return None
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    except ValueError as error:
        reason = f"it is no file of `equinox.tree_serialise_leaves`: {error}"
        raise corrupt_error(path, reason, leaf=where) from None
    end = file.tell() + count_bytes(shape, dtype.itemsize)
    if dtype.hasobject or end > size:
        raise corrupt_error(path, "the file ends too early", leaf=where)
    file.seek(end)
    return np.broadcast_to(np.empty((), dtype), shape)


def _fits(found: Any, leaf: Any) -> bool:
    if is_number(leaf):
        return found.shape == () and found.dtype.kind in _KINDS[type(leaf)]
    same = found.dtype == leaf.dtype
    if found.dtype.kind == "V":  # how NumPy writes bfloat16 and other types that it lacks
        same = np.dtype(leaf.dtype).kind == "V" and found.dtype.itemsize == leaf.dtype.itemsize
    return same and found.shape == leaf.shape


def _gap(where: str, found: Any, leaf: Any) -> LeafDifference:
    saved = "nothing" if found is None else f"{found.dtype}{list(found.shape)}"
    if leaf is None:
        return LeafDifference(where, saved, "nothing")
    return LeafDifference(where, saved, kind_text(leaf) if is_number(leaf) else f"{leaf.dtype}{list(leaf.shape)}")


def to_safetensors(model: Any) -> bytes:
    """The arrays of a model under names such as `layers.0.weight`."""
    check_no_typed_keys(model, "safetensors files hold plain arrays")
    arrays = {}
    for where, leaf in _named_leaves(model):
        if is_array_like(leaf):
            arrays[where] = np.array(leaf, order="C")
            dtype = arrays[where].dtype
            if dtype.name not in PLAIN_DTYPES:
                raise TypeError(
                    f"`{caller()}` cannot write the array `{where}` of dtype {dtype.name}: safetensors has no such "
                    "type.\nCast it, or use `format='eqx'` or `save`."
                )
    return safetensors_bytes(arrays)


def read_safetensors(path: Path, like: Any) -> Any:
    """Reads a model from its arrays by name; everything else, numbers included, comes from `like`."""
    check_no_typed_keys(like, "safetensors files hold plain arrays")
    try:
        with safe_open(path, framework="np") as file:
            found = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
            gaps = []
            for where, leaf in _named_leaves(like):
                if is_array_like(leaf):
                    saved = found.pop(where, None)
                    shape = None if saved is None else tuple(saved.get_shape())
                    if saved is None or shape != leaf.shape or file.get_tensor(where).dtype != leaf.dtype:
                        text = "nothing" if saved is None else f"{saved.get_dtype()}{list(shape or ())}"
                        gaps.append(LeafDifference(where, text, f"{leaf.dtype}{list(leaf.shape)}"))
            gaps += [LeafDifference(where, f"{s.get_dtype()}{s.get_shape()}", "nothing") for where, s in found.items()]
            check_same_leaves(gaps, path, only_dtypes=False)
            read = lambda where, leaf: _as(leaf, file.get_tensor(where)) if is_array_like(leaf) else leaf
            leaves = [read(where, leaf) for where, leaf in _named_leaves(like)]
    except SafetensorError as error:
        raise corrupt_error(path, f"it is no safetensors file: {error}") from None
    return jtu.tree_unflatten(jtu.tree_structure(like), leaves)


def _as(like: Any, data: np.ndarray) -> Any:
    return data if isinstance(like, np.ndarray) else jnp.asarray(data)


def _named_leaves(tree: Any) -> list[tuple[str, Any]]:
    keyed, _ = jtu.tree_flatten_with_path(tree)
    return [(jtu.keystr(path, simple=True, separator="."), leaf) for path, leaf in keyed]


def export_members(
    ensemble: Ensemble[Any] | Group, folder: PathLike, *, format: Literal["eqx", "safetensors"] = "eqx"
) -> list[Path]:
    """Writes each member to a separate file that other libraries can read.

    **Arguments:**

    - `ensemble`: the ensemble or the group.
    - `folder`: the folder; files with the same names are replaced.
    - `format`: `"eqx"` for `equinox.tree_deserialise_leaves`; `"safetensors"` for arrays by name, such as
        `layers.0.weight`.

    **Returns:** the paths in the order of the members: `member-000003.eqx` for the member with id 3.

    **Raises:** `TypeError` for typed keys, and in safetensors for complex128.

    ```python
    import tempfile

    make = lambda key: eqx.nn.Linear(3, 1, key=key)
    paths = ee.export_members(ee.build(make, 2, key=key), tempfile.mkdtemp())
    eqx.tree_deserialise_leaves(paths[0], make(key))  # the first member
    ```
    """
    check_ensemble_or_group(ensemble)
    check_path(folder, "folder")
    check_word(format, "format", ("eqx", "safetensors"))
    paths = []
    for i, member_id in enumerate(ensemble.ids.tolist()):
        paths.append(absolute(as_path(folder)) / f"member-{member_id:06d}.{format}")
        write_file(paths[-1], _encode(ensemble[i], format))
    return paths


def _encode(model: Any, format: str) -> bytes:
    if format == "safetensors":
        return to_safetensors(model)
    check_no_typed_keys(model, "`equinox.tree_serialise_leaves` cannot write them")
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, model)
    return file.getvalue()


@overload
def load_members(paths: Iterable[PathLike], like: Model, *, ids: Any = None) -> Ensemble[Model]: ...
@overload
def load_members(paths: Iterable[PathLike], like: Callable[..., M], *, ids: Any = None) -> Ensemble[M]: ...
@overload
def load_members(paths: Iterable[PathLike], like: Tree, *, ids: Any = None) -> Ensemble[Tree]: ...
def load_members(paths: Iterable[PathLike], like: Any, *, ids: Any = None) -> Ensemble[Any]:
    """Loads many files of one model each into one [`eqx_ensemble.Ensemble`][].

    **Arguments:**

    - `paths`: files of `equinox.tree_serialise_leaves` or of [`eqx_ensemble.export_members`][], without checksums; or
        folders of [`eqx_ensemble.save`][].
    - `like`: a template of the model in one file: a function that makes it from a key, a model, or its shapes.
    - `ids`: the members' ids; `0, 1, 2, ...` if not given.

    **Returns:** an ensemble with one member per path.

    **Raises:** `MemberMismatchError` with every leaf that differs from `like`; `CheckpointCorruptError` for files that
    are truncated or in another format.

    ```python
    import tempfile

    folder = tempfile.mkdtemp()
    make = lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key)
    paths = [f"{folder}/{i}.eqx" for i in range(4)]
    for i, path in enumerate(paths):
        eqx.tree_serialise_leaves(path, make(jax.random.key(i)))
    ensemble = ee.load_members(paths, make)
    ```
    """
    paths = check_paths(paths)
    check_like_given(like)
    like = evaluate_make(like) if is_maker(like) else like
    return stack([_one(as_path(path), like) for path in paths], ids=ids)


def _one(path: Any, like: Any) -> Any:
    if not is_on_disk(path) or path.is_dir():
        return load(path, like)
    if path.suffix == ".safetensors":
        return read_safetensors(path, like)
    if not path.exists() and path.suffix == "":
        path = path.with_suffix(".eqx")  # as equinox does
    return read_equinox(path, like)
