import functools as ft
import importlib.metadata
import json
import math
import platform
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._check import is_key, is_member_array
from .._ids import open_all, open_own
from ..distributed import to_host
from ._check import KEY_WORDS, check_json, check_not_traced, check_orbax_dtype, check_savable_dtype, check_saved_rows
from ._manifest import LIMIT, TABLE, Entry, Manifest, Number
from ._structure import is_array_like, is_number, saved_leaves, structure

_NATIVE = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
# Safetensors has no name for these, or readers in other languages have none: they are stored as their bytes.
_AS_BYTES = ("complex128", "int2", "int4", "uint2", "uint4", "float4_e2m1fn", "float8_e3m4", "float8_e4m3")
_AS_BYTES += ("float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
_AS_BYTES += ("float8_e8m0fnu",)

DTYPES = {"bool": np.dtype(bool)}
DTYPES |= {name: np.dtype(getattr(jnp, name)) for name in (*_NATIVE, *_AS_BYTES) if name != "bool"}
"""The dtypes that a file may name. Names from files are looked up in this table only."""


class Storage(NamedTuple):
    """The dtype and shape of an array in a safetensors file."""

    code: str
    shape: tuple[int, ...]


def storage_of(dtype: str, shape: tuple[int, ...]) -> Storage:
    """The safetensors dtype and shape of an array."""
    if dtype in _NATIVE:
        return Storage(_NATIVE[dtype], shape)
    return Storage("U8", (*shape, DTYPES[dtype].itemsize))


class Numbers(NamedTuple):
    """The numbers of an array, C-ordered and little-endian; for PRNG keys their data, with the generator's name."""

    data: Any
    key: str | None


def host_numbers(leaf: Any, path: str, *, copy: bool) -> Numbers:
    """The numbers of an array leaf, in host memory. Without `copy` they may share memory that JAX reuses later."""
    check_not_traced(leaf, path)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise NotImplementedError(
            f"The leaf at `{path}` is sharded over several processes, and this one holds a part of it only.\nPass "
            "`format='orbax'`, or gather it first: `distributed.to_host(tree)`."
        )
    leaf, key = _without_keys(leaf, path)
    data = np.array(leaf, order="C") if copy else np.asarray(leaf, order="C")
    return Numbers(_little(data, path), key)


def device_numbers(leaf: Any, path: str, *, copy: bool) -> Numbers:
    """The numbers of an array leaf on its devices, in one process or several.

    Orbax copies them itself, also without `copy`.
    """
    check_not_traced(leaf, path)
    leaf, key = _without_keys(leaf, path)
    check_orbax_dtype(leaf.dtype, path)
    if isinstance(leaf, jax.Array) and (jax.process_count() == 1 or not leaf.is_fully_addressable):
        check_savable_dtype(leaf.dtype, path, known=leaf.dtype.name in DTYPES)
        return Numbers(leaf, key)
    return Numbers(_little(np.asarray(leaf, order="C"), path), key)  # Orbax rejects the arrays of one process of many


def _without_keys(leaf: Any, path: str) -> tuple[Any, str | None]:
    if not is_key(leaf):
        return leaf, None
    key = str(jax.random.key_impl(leaf))
    if key not in KEY_WORDS:
        raise TypeError(
            f"The keys at `{path}` are of the generator {key!r}, which cannot be saved: use one of "
            f"{', '.join(KEY_WORDS)}."
        )
    return jax.random.key_data(leaf), key


def _little(data: np.ndarray, path: str) -> np.ndarray:
    check_savable_dtype(data.dtype, path, known=data.dtype.name in DTYPES)
    little = data.dtype.newbyteorder("<") if data.dtype.kind in "iufc" else data.dtype
    return data.astype(little, copy=False)


def raw(data: np.ndarray) -> memoryview:
    """The bytes of a C-ordered array, without a copy."""
    return data.reshape(-1).view(np.uint8).data


def key_dtype(kind: str) -> Any:
    """The dtype of typed keys of a generator."""
    return jax.eval_shape(lambda: jax.random.key(0, impl=kind)).dtype


def count_bytes(shape: Sequence[int], itemsize: int) -> int:
    """The size of an array, as a Python int, which does not wrap around."""
    return math.prod(shape) * itemsize


_PACKAGES = ("eqx_ensemble", "jax", "jaxlib", "equinox", "optax", "numpy")


class Snapshot(NamedTuple):
    """The content to write: the manifest, still without file name and checksums, and the arrays by tensor."""

    manifest: Manifest
    arrays: dict[str, Any]


def snapshot(
    tree: Any,
    *,
    per_member: Any = False,
    ids: Any = None,
    meta: Any = None,
    step: int | None = None,
    score: Any = None,
    copy: bool = False,
    take: Callable[..., Numbers] = host_numbers,
) -> Snapshot:
    """The content of a checkpoint, in host memory or on the devices that `take` leaves it on.

    **Arguments:**

    - `tree`: any PyTree. Arrays (also typed keys) and Python numbers are saved.
    - `per_member`: a bool, or a PyTree of bools that is a prefix of `tree`: whether leaves carry the leading `members`
        axis.
    - `ids`: the members' ids.
    - `meta`: metadata that JSON can represent.
    - `copy`: copy the arrays, for a writer in another thread; without it, arrays on the CPU are not copied.
    - `take`: the function that returns the numbers of an array leaf.
    """
    check_json(meta)
    if per_member is False:
        tree = open_all(tree)
    members = None if ids is None else tuple(int(i) for i in to_host(ids))
    if members is not None:
        tree, per_member = open_own(tree, per_member, members)
    flags = jax.tree.leaves(jax.tree.broadcast(per_member, tree))
    entries, numbers, arrays, firsts = [], [], {}, {}
    for (path, leaf), flag in zip(saved_leaves(tree), flags, strict=True):
        if is_number(leaf):
            numbers.append(Number(path, leaf))
        elif is_member_array(leaf):
            first = firsts.get((id(leaf), bool(flag)))
            if first is not None:  # an array that occurs twice is saved once
                entries.append(first._replace(path=path))
                continue
            data, key = take(leaf, path, copy=copy)
            if flag:
                check_saved_rows(data.shape, None if members is None else len(members), path)
            arrays[path] = data
            entry = Entry(path, path, "members" if flag else "shared", data.dtype.name, data.shape, key)
            firsts[id(leaf), bool(flag)] = entry
            entries.append(entry)
        elif is_array_like(leaf):
            check_savable_dtype("shapes only", path, known=False)
    manifest = Manifest(
        "", members, tuple(entries), tuple(numbers), structure(tree), meta, step, _score(score), versions()
    )
    return Snapshot(manifest, arrays)


def _score(score: Any) -> float | None:
    if score is None:
        return None
    return None if math.isnan(value := float(score)) else value


def versions() -> dict[str, str]:
    """The versions of Python and of the libraries that affect results."""
    return {"python": platform.python_version()} | {package: _version(package) for package in _PACKAGES}


@ft.cache  # looking one up takes longer than writing a small checkpoint
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


DIGEST = 32


class Span(NamedTuple):
    """A tensor in the file of arrays: its first byte and its number of bytes."""

    start: int
    size: int


class FileLayout(NamedTuple):
    """The layout of the file of arrays, computed from the leaves: no size or offset is read from the file itself."""

    header: bytes
    order: tuple[Entry, ...]
    spans: dict[str, Span]
    rows: dict[str, int]
    size: int


def file_layout(entries: Sequence[Entry]) -> FileLayout:
    """The layout for these leaves: large items first, so that each is aligned to its own size, the checksums last."""
    tensors = {entry.tensor: entry for entry in entries}.values()
    order = tuple(sorted(tensors, key=lambda entry: -DTYPES[entry.dtype].itemsize))
    fields, ends, end = {}, {}, 0
    for entry in order:
        start, end = end, end + count_bytes(entry.shape, DTYPES[entry.dtype].itemsize)
        code, shape = storage_of(entry.dtype, entry.shape)
        fields[entry.tensor] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
        ends[entry.tensor] = Span(start, end - start)
    rows, count = {}, 0
    for entry in order:
        if entry.kind == "members":
            rows[entry.tensor] = count
            count += entry.shape[0]
    ends[TABLE] = Span(end, count * DIGEST)
    fields[TABLE] = {"dtype": "U8", "shape": [count, DIGEST], "data_offsets": [end, end + count * DIGEST]}
    text = json.dumps(fields, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    spans = {tensor: Span(len(header) + span.start, span.size) for tensor, span in ends.items()}
    return FileLayout(header, order, spans, rows, len(header) + end + count * DIGEST)


def begins_as_ours(file: BinaryIO) -> bool:
    """Whether a file of arrays is ours, damaged or not: its header ends with our table.

    A file that a crash of the system left empty or full of zeros counts as ours.
    """
    start = file.read(4096)
    header = start[8:] + file.read(min(int.from_bytes(start[:8], "little"), LIMIT))
    return not any(start) or TABLE.encode() in header
