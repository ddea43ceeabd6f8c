import hashlib
import json
import math
import re
from typing import Any, Literal, NamedTuple

NAME = "checkpoint.json"
FORMAT, VERSION = "eqx_ensemble checkpoint", 1
LIMIT = 16 * 2**20
"""The maximum size of a manifest in bytes; as Python objects, it takes at most about 400 MB."""

TABLE = "<checksums>"
"""The tensor with the checksum of every member's part of every leaf: `(leaves with members * members, 32)`, bytes."""

SEAL = b'{"sha256": "%s",\n"manifest": '
_START = re.compile(re.escape(SEAL).replace(b"%s", b"[0-9a-f]{64}"))
FLOAT = "<float>"
"""The key of a float that is not finite in JSON."""


class Entry(NamedTuple):
    """An array leaf. Leaves that are one array (tied weights) name the same `tensor`, the path of the first of them."""

    path: str
    tensor: str
    kind: Literal["members", "shared"]
    dtype: str
    shape: tuple[int, ...]
    key: str | None
    checksum: str = ""


class Number(NamedTuple):
    """A leaf that is a Python number."""

    path: str
    value: bool | int | float | complex


class Manifest(NamedTuple):
    """The description of a checkpoint: everything except the numbers of its arrays."""

    file: str
    members: tuple[int, ...] | None
    entries: tuple[Entry, ...]
    numbers: tuple[Number, ...]
    structure: dict[str, str]
    meta: Any
    step: int | None
    score: float | None
    versions: dict[str, str]


def begins_as_ours(data: bytes) -> bool:
    """Whether bytes begin as a manifest does, damaged or not."""
    return _START.match(data) is not None


def encode(manifest: Manifest) -> bytes:
    """The manifest as JSON, after its SHA-256."""
    content = {"format": FORMAT, "version": VERSION} | manifest._asdict()
    content["meta"], content["score"] = strict(manifest.meta), strict(manifest.score)
    content["entries"] = [entry._asdict() for entry in manifest.entries]
    content["numbers"] = [_number_fields(number) for number in manifest.numbers]
    body = _lines(content).encode("ascii")
    return SEAL % digest(body) + body + b"}\n"


def _lines(content: dict) -> str:
    """JSON with one line for each leaf and each node."""
    fields = []
    for name, value in content.items():
        if type(value) is list and value:
            text = "[\n  " + ",\n  ".join(map(_json, value)) + "\n ]"
        elif name == "structure":
            text = json.dumps(value, indent=2).replace("\n}", "\n }")
        else:
            text = _json(value)
        fields.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(fields) + "\n}"


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def strict(value: Any) -> Any:
    """A value in strict JSON: NaN and the infinities, which it lacks, become `{"<float>": "nan"}`."""
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT: repr(float(value))}
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    return [strict(item) for item in value] if isinstance(value, list | tuple) else value


def is_orbax(file: str) -> bool:
    """Whether the arrays are in a folder of Orbax, and not in a safetensors file."""
    return file.startswith("orbax-")


def _number_fields(number: Number) -> dict:
    """A number as exact text: `float.hex`, and `hex` for integers, which JSON readers may round."""
    value = text = number.value
    if type(value) is int:
        text = hex(value)
    elif isinstance(value, float):
        text = value.hex()
    elif isinstance(value, complex):
        text = [value.real.hex(), value.imag.hex()]
    return {"path": number.path, "type": type(value).__name__, "value": text}


def digest(body: bytes) -> bytes:
    """The SHA-256 of a manifest, in hexadecimal digits."""
    return hashlib.sha256(body).hexdigest().encode()
