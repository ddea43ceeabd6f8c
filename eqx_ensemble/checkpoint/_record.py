"""Checks of records in files that anyone may have written: a value of another type or size is refused, and named."""

import base64
import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ._check import MOST_NESTED, corrupt_error
from ._snapshot import DTYPES, count_bytes

_MOST_COUNT = 2**53


class InvalidRecordError(Exception):
    """Why a record is not what was written."""


def check_valid(reason: str, *, holds: bool) -> None:
    """Raises `InvalidRecordError` with this reason."""
    if not holds:
        raise InvalidRecordError(reason)


def check_fields(record: Any, kinds: Mapping[str, Callable[[Any], bool]], field: str) -> dict[str, Any]:
    """Checks that a record is a dict with these keys, and that each value passes its check. Returns it."""
    check_valid(f"`{field}` is not a record", holds=is_record(record))
    missing = [key for key in kinds if key not in record]
    check_valid(f"`{field}` lacks `{', '.join(missing)}`", holds=not missing)
    wrong = [key for key, is_kind in kinds.items() if not is_kind(record[key])]
    check_valid(f"`{field}` has another `{', '.join(wrong)}` than is written", holds=not wrong)
    return record


def check_depth(value: Any, depth: int = MOST_NESTED) -> None:
    """Checks that dicts and lists are nested at most `depth` times."""
    check_valid(f"metadata are nested more than {MOST_NESTED} times", holds=depth >= 0)
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            check_depth(item, depth - 1)


@contextlib.contextmanager
def explain_record(file: Any) -> Iterator[None]:
    """Turns `InvalidRecordError` into `CheckpointCorruptError` with the file."""
    try:
        yield
    except InvalidRecordError as error:
        raise corrupt_error(file, str(error)) from None


def is_list(value: Any, kind: type) -> bool:
    """Whether a value is a list of values of one type."""
    return type(value) is list and all(type(item) is kind for item in value)


def is_record(value: Any) -> bool:
    """Whether a value is a dict, whose keys are strings in JSON."""
    return type(value) is dict


def is_texts(value: Any) -> bool:
    """Whether a value is a dict of strings."""
    return type(value) is dict and all(type(item) is str for item in value.values())


def is_count(value: Any) -> bool:
    """Whether a value is an integer from zero on."""
    return type(value) is int and 0 <= value < _MOST_COUNT


def is_seconds(value: Any) -> bool:
    """Whether a value is a finite duration."""
    return type(value) in (int, float) and 0 <= value < _MOST_COUNT and math.isfinite(value)


def is_string(value: Any) -> bool:
    """Whether a value is a string."""
    return type(value) is str


# Arrays in JSON, bit for bit.

_MOST_AXES = 32


def is_encodable(array: np.ndarray) -> bool:
    """Whether an array has a dtype that can be written."""
    return array.dtype.name in DTYPES


def encode_array(array: np.ndarray) -> dict[str, Any]:
    """An array as JSON."""
    little = np.ascontiguousarray(array, _little(DTYPES[array.dtype.name]))
    return {"dtype": array.dtype.name, "shape": list(array.shape), "base64": encode_bytes(little.tobytes())}


def decode_array(value: Any, field: str) -> np.ndarray:
    """Inverts `encode_array`; `InvalidRecordError`, with the name of the array, for anything else."""
    fields = check_fields(value, {"dtype": is_string, "shape": _is_shape, "base64": is_string}, field)
    check_valid(f"`{field}` has an unknown dtype", holds=fields["dtype"] in DTYPES)
    dtype, shape, data = DTYPES[fields["dtype"]], fields["shape"], decode_bytes(fields["base64"], field)
    check_valid(f"`{field}` has another size than its shape", holds=len(data) == count_bytes(shape, dtype.itemsize))
    array = np.frombuffer(data, np.uint8).view(_little(dtype)).reshape(shape)
    return array.astype(dtype)


def encode_bytes(data: bytes) -> str:
    """Bytes as text."""
    return base64.b64encode(data).decode("ascii")


def decode_bytes(text: Any, field: str) -> bytes:
    """Inverts `encode_bytes`."""
    check_valid(f"`{field}` is not text", holds=is_string(text))
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        pass
    check_valid(f"`{field}` is not base64", holds=False)
    raise AssertionError


def _little(dtype: np.dtype) -> np.dtype:
    return dtype.newbyteorder("<") if dtype.kind in "iufc" else dtype


def _is_shape(value: Any) -> bool:
    return type(value) is list and len(value) <= _MOST_AXES and all(map(is_count, value))
