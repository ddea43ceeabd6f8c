import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._check import is_key
from ._check import check_key_kind, check_not_traced, check_orbax_dtype, check_savable, check_savable_dtype

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
    check_savable(leaf, path)
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
    check_key_kind(key, path)
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
