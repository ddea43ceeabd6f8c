import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._check import kind_text, number_text, path_text
from .._ids import close_all, open_all
from .._warnings import warn
from ._check import safe_text
from ._manifest import Entry, Manifest
from ._orbax import OrbaxReader
from ._read import Reader, Wanted
from ._snapshot import DTYPES, key_dtype
from ._structure import (
    LeafDifference,
    check_cast,
    check_same_leaves,
    check_same_structure,
    check_sharding,
    is_array_like,
    is_number,
    saved_leaves,
    shape_text,
    structure,
    structure_text,
    unlike,
)

_NOTHING = "nothing"


def restore(
    reader: Reader | OrbaxReader, like: Any, *, rows: Sequence[int] | None, cast: str | None, strict: bool
) -> Any:
    """Restores a tree: arrays and numbers from the file, everything else from `like`.

    All differences are found before any number is read. With `rows`, only these members are read, and the number of
    members in `like` does not matter.
    """
    check_cast(cast)
    saved = {entry.path for entry in reader.manifest.entries}
    like = open_all(like, lambda path: path_text(path) in saved)
    manifest, leaves = reader.manifest, saved_leaves(like)
    _compare(manifest, leaves, reader.folder, any_count=rows is not None, cast=cast)
    _compare_structure(manifest, like, reader.folder, strict=strict)
    entries = {entry.path: entry for entry in manifest.entries}
    wanted: dict[tuple, tuple[Entry, Any]] = {}
    for path, leaf in leaves:
        if is_array_like(leaf):
            _check_like(entries[path], leaf)
            wanted.setdefault(_identity(entries[path], leaf), (entries[path], leaf))
    asked = [Wanted(entry, _sharding(entry, leaf, rows)) for entry, leaf in wanted.values()]
    with contextlib.closing(reader.arrays(asked, rows)) as arrays:
        done = {which: _leaf(next(arrays), entry, leaf) for which, (entry, leaf) in wanted.items()}
    numbers = {number.path: number.value for number in manifest.numbers}
    restored = []
    for path, leaf in leaves:
        if is_number(leaf):
            restored.append(numbers[path])
        elif is_array_like(leaf):
            restored.append(done[_identity(entries[path], leaf)])
        else:
            restored.append(leaf)
    return close_all(jtu.tree_unflatten(jtu.tree_structure(like), restored))


def _identity(entry: Entry, like: Any) -> tuple:
    """A key that is equal for leaves that are one array, both when saved and when restored."""
    return entry.tensor, type(like), like.dtype


def _check_like(entry: Entry, like: Any) -> None:
    if entry.key is None and not isinstance(like, np.ndarray | np.generic):
        if jax.dtypes.canonicalize_dtype(like.dtype) != like.dtype:
            raise ValueError(
                f"The leaf at `{safe_text(entry.path)}` is {like.dtype}, and jax has 64-bit types switched "
                "off.\nEnable them (`jax.config.update('jax_enable_x64', True)`), or pass `cast='like'` with a "
                "`like` of 32 bits."
            )


def _sharding(entry: Entry, like: Any, rows: Sequence[int] | None) -> Any:
    """The sharding with which an array can be read: that of `like`, if it has several devices and nothing is cast."""
    sharding = getattr(like, "sharding", None)
    as_saved = rows is None and (entry.key is not None or DTYPES[entry.dtype] == like.dtype)
    if not (as_saved and isinstance(sharding, jax.sharding.NamedSharding) and len(sharding.device_set) > 1):
        return None
    check_sharding(sharding, like.shape, entry.path)
    return sharding


def _leaf(data: np.ndarray | jax.Array, entry: Entry, like: Any) -> Any:
    if entry.key is not None:
        return _put_like(jax.random.wrap_key_data(jnp.asarray(data), impl=entry.key), like)
    if isinstance(data, jax.Array):
        return data
    data = _cast(data, _native(like.dtype), entry)
    if isinstance(like, np.generic):
        return data[()]
    if isinstance(like, np.ndarray):
        return data
    return _put_like(jax.device_put(data), like)  # without a copy if `data` is aligned; nothing else refers to it


def _native(dtype: Any) -> Any:
    """The dtype in this machine's byte order, which all restored arrays have."""
    return dtype.newbyteorder("=") if isinstance(dtype, np.dtype) else dtype


def _put_like(leaf: jax.Array, like: Any) -> jax.Array:
    """The leaf with the sharding of `like`, if that has several devices and the shapes are equal."""
    sharding = getattr(like, "sharding", None)
    if sharding is None or len(sharding.device_set) < 2 or leaf.shape != like.shape:
        return leaf
    return jax.device_put(leaf, sharding)


def _cast(data: np.ndarray, dtype: Any, entry: Entry) -> np.ndarray:
    if data.dtype == dtype:
        return data
    with np.errstate(over="ignore"):
        new = data.astype(dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        fits = bool(np.all(np.isfinite(new) == np.isfinite(data)))
    else:
        fits = bool(np.all(new.astype(object) == data.astype(object)))
    if not fits:
        raise ValueError(
            f"The leaf saved at `{safe_text(entry.path)}` as {data.dtype} holds numbers outside {np.dtype(dtype)}: "
            "casting would change them into others.\nLoad it as it was saved, or rescale it first."
        )
    return new


def _compare(
    manifest: Manifest, leaves: list[tuple[str, Any]], path: Any, *, any_count: bool, cast: str | None
) -> None:
    saved: dict[str, Any] = {entry.path: entry for entry in manifest.entries}
    saved |= {number.path: number for number in manifest.numbers}
    gaps, dtypes = [], []
    for where, leaf in leaves:
        if not (is_number(leaf) or is_array_like(leaf)):
            continue
        found = saved.pop(where, None)
        same_shape, same_dtype = _same(found, leaf, any_count=any_count, cast=cast)
        if not (same_shape and same_dtype):
            gaps.append(LeafDifference(where, _saved_text(found), _expected_text(leaf)))
            dtypes.append(same_shape)
    gaps += [LeafDifference(where, _saved_text(found), _NOTHING) for where, found in saved.items()]
    only_dtypes = len(dtypes) == len(gaps) and all(dtypes)
    check_same_leaves(gaps, path, only_dtypes=only_dtypes and cast is None)


def _same(found: Any, leaf: Any, *, any_count: bool, cast: str | None) -> tuple[bool, bool]:
    """Whether what was saved has the shape and the dtype of the leaf."""
    if is_number(leaf):
        same = not (found is None or isinstance(found, Entry)) and type(found.value) is type(leaf)
        return same, same
    if not isinstance(found, Entry):
        return False, False
    shape = found.shape if found.key is None else found.shape[:-1]
    start = 1 if any_count and found.kind == "members" else 0
    same_shape = len(shape) == len(leaf.shape) and shape[start:] == leaf.shape[start:]
    dtype = DTYPES[found.dtype] if found.key is None else key_dtype(found.key)
    expected = _native(leaf.dtype)
    if dtype == expected or found.key is not None or jnp.issubdtype(expected, jax.dtypes.extended):
        return same_shape, dtype == expected
    kinds = jnp.floating, jnp.integer, jnp.complexfloating
    castable = any(jnp.issubdtype(dtype, kind) and jnp.issubdtype(expected, kind) for kind in kinds)
    return same_shape, cast == "like" and castable


def _saved_text(found: Any) -> str:
    if found is None:
        return _NOTHING
    if not isinstance(found, Entry):
        return f"the {type(found.value).__name__} {number_text(found.value)}"
    if found.key is not None:
        return shape_text(found.shape[:-1], key_dtype(found.key))
    return shape_text(found.shape, DTYPES[found.dtype])


def _expected_text(leaf: Any) -> str:
    return f"{kind_text(leaf)}" if is_number(leaf) else shape_text(leaf.shape, leaf.dtype)


def _compare_structure(manifest: Manifest, like: Any, path: Any, *, strict: bool) -> None:
    expected = structure(like)
    gaps = [
        LeafDifference(where, manifest.structure.get(where, _NOTHING), expected.get(where, _NOTHING))
        for where in unlike(manifest.structure, expected)
    ]
    if strict:
        check_same_structure(gaps, path)
    elif gaps:
        warn(structure_text(gaps, path))
