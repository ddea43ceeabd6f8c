"""Arrays in JSON, bit for bit."""

import base64
from typing import Any

import numpy as np

from ._check_record import check_fields, check_valid, is_count, is_string
from ._dtypes import DTYPES, count_bytes

_MOST_AXES = 32


def is_encodable(array: np.ndarray) -> bool:
    """Whether an array has a dtype that can be written."""
    return array.dtype.name in DTYPES


def encode_array(array: np.ndarray) -> dict[str, Any]:
    """An array as JSON."""
    little = np.ascontiguousarray(array, _little(DTYPES[array.dtype.name]))
    return {"dtype": array.dtype.name, "shape": list(array.shape), "base64": encode_bytes(little.tobytes())}


def decode_array(value: Any, name: str) -> np.ndarray:
    """Inverts `encode_array`; `InvalidRecordError`, with the name of the array, for anything else."""
    fields = check_fields(value, {"dtype": is_string, "shape": _is_shape, "base64": is_string}, name)
    check_valid(f"`{name}` has an unknown dtype", holds=fields["dtype"] in DTYPES)
    dtype, shape, data = DTYPES[fields["dtype"]], fields["shape"], decode_bytes(fields["base64"], name)
    check_valid(f"`{name}` has another size than its shape", holds=len(data) == count_bytes(shape, dtype.itemsize))
    array = np.frombuffer(data, np.uint8).view(_little(dtype)).reshape(shape)
    return array.astype(dtype)


def encode_bytes(data: bytes) -> str:
    """Bytes as text."""
    return base64.b64encode(data).decode("ascii")


def decode_bytes(text: Any, name: str) -> bytes:
    """Inverts `encode_bytes`."""
    check_valid(f"`{name}` is not text", holds=is_string(text))
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        pass
    check_valid(f"`{name}` is not base64", holds=False)
    raise AssertionError


def _little(dtype: np.dtype) -> np.dtype:
    return dtype.newbyteorder("<") if dtype.kind in "iufc" else dtype


def _is_shape(value: Any) -> bool:
    return type(value) is list and len(value) <= _MOST_AXES and all(map(is_count, value))
