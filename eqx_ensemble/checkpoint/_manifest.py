import hashlib
import json
import math
import re
from typing import Any, Literal, NamedTuple

from .._check import CheckpointCorruptError
from ._check import KEY_WORDS, damage_message, format_version_message
from ._dtypes import DTYPES

NAME = "checkpoint.json"
FORMAT, VERSION = "eqx_ensemble checkpoint", 1
LIMIT = 16 * 2**20
"""The most bytes that a manifest may have: that many can become some 400 MB of Python objects, and no more."""

TABLE = "<checksums>"
"""The tensor with the SHA-256 of every member's part of every leaf: `(leaves with members * members, 32)`, bytes."""

_SEAL = b'{"sha256": "%s",\n"manifest": '
_START = re.compile(re.escape(_SEAL).replace(b"%s", b"[0-9a-f]{64}"))
_HEX = 64
_MOST_AXES = 32
_FLOAT, _NOT_FINITE = "<float>", ("nan", "inf", "-inf")
_TYPES = ("bool", "int", "float", "complex")


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
    """What a checkpoint says of itself, beside the numbers."""

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
    """Whether bytes begin as manifests do, whatever may have become of the rest."""
    return _START.match(data) is not None


def encode(manifest: Manifest) -> bytes:
    """The manifest as JSON, its SHA-256 in front."""
    content = {"format": FORMAT, "version": VERSION} | manifest._asdict()
    content["meta"], content["score"] = strict(manifest.meta), strict(manifest.score)
    content["entries"] = [entry._asdict() for entry in manifest.entries]
    content["numbers"] = [_number_fields(number) for number in manifest.numbers]
    body = _lines(content).encode("ascii")
    return _SEAL % _digest(body) + body + b"}\n"


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
    """A value as JSON has it: NaN and the infinities, for which it has no numbers, stand as `{"<float>": "nan"}`."""
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: repr(float(value))}
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    return [strict(item) for item in value] if isinstance(value, list | tuple) else value


def unstrict(value: Any) -> Any:
    """What `strict` was given, tuples aside."""
    if isinstance(value, dict):
        if set(value) == {_FLOAT} and value[_FLOAT] in _NOT_FINITE:
            return float(value[_FLOAT])
        return {key: unstrict(item) for key, item in value.items()}
    return [unstrict(item) for item in value] if isinstance(value, list) else value


def decode(data: bytes, file: Any) -> Manifest:
    """The manifest in these bytes; `CheckpointCorruptError` if they are not what `encode` wrote."""
    start = len(_SEAL) - len(b"%s") + _HEX
    body = data[start:-2]
    if data != _SEAL % _digest(body) + body + b"}\n":
        raise CheckpointCorruptError(damage_message(file, "its checksum does not match"), str(file))
    try:
        content = json.loads(body.decode("ascii"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
        _expect(type(content) is dict and content.get("format") == FORMAT, "this is no manifest")
        known = content.get("version") == VERSION
        if known:
            return _manifest(content)
    except _Refused as error:
        raise CheckpointCorruptError(damage_message(file, str(error)), str(file)) from None
    except (RecursionError, ValueError) as error:  # what the JSON parser raises
        raise CheckpointCorruptError(
            damage_message(file, f"it is not the JSON of a manifest ({type(error).__name__})"), str(file)
        ) from None
    raise ValueError(format_version_message(file, content.get("version"), VERSION))


class _Refused(Exception):
    """Why bytes are no manifest."""


def _expect(condition: bool, reason: str) -> None:  # noqa: FBT001
    if not condition:
        raise _Refused(reason)


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()


def _no_duplicates(pairs: list) -> dict:
    _expect(len({key for key, _ in pairs}) == len(pairs), "a key stands there twice")
    return dict(pairs)


def _no_constant(name: str) -> None:
    raise _Refused(f"`{name}` is no number of JSON")


def _manifest(content: dict) -> Manifest:
    _expect(set(content) == {"format", "version", *Manifest._fields}, "a field is missing or unknown")
    members = content["members"]
    if members is not None:
        _expect(_is_list(members, int) and len(members) > 0, "`members` are no ids")
        _expect(all(0 <= i < 2**31 for i in members) and len(set(members)) == len(members), "`members` are no ids")
        members = tuple(members)
    structure, versions = content["structure"], content["versions"]
    _expect(_is_texts(structure) and _is_texts(versions), "`structure` or `versions` are no texts")
    step, score, meta = content["step"], unstrict(content["score"]), unstrict(content["meta"])
    _expect(step is None or (type(step) is int and step >= 0), "`step` is no step")
    _expect(score is None or type(score) in (int, float), "`score` is no number")
    _expect(_is_list(content["entries"], dict) and _is_list(content["numbers"], dict), "`entries` are no leaves")
    _expect(_is_file(content["file"]), "`file` is no name of a file of arrays")
    entries = _entries(content["entries"], members)
    numbers = tuple(_number(number) for number in content["numbers"])
    paths = [leaf.path for leaf in (*entries, *numbers)]
    _expect(len({TABLE, *paths}) == 1 + len(paths), "two leaves have one path")
    return Manifest(content["file"], members, entries, numbers, structure, meta, step, score, versions)


def _is_list(value: Any, kind: type) -> bool:
    return type(value) is list and all(type(item) is kind for item in value)


def _is_texts(value: Any) -> bool:
    return type(value) is dict and all(type(item) is str for item in value.values())


def is_orbax(name: str) -> bool:
    """Whether the arrays of a manifest stand in a folder of Orbax, and not in a safetensors file."""
    return name.startswith("orbax-")


def _is_file(name: Any) -> bool:
    """Only two kinds of names are ever opened, which lead out of no folder."""
    if type(name) is not str:
        return False
    start, end = ("orbax-", "") if is_orbax(name) else ("arrays-", ".safetensors")
    number = name[len(start) : len(name) - len(end)]
    return name == start + number + end and number.isascii() and number.isdigit() and len(number) <= 12


def _entries(listed: list[dict], members: tuple[int, ...] | None) -> tuple[Entry, ...]:
    tensors: dict[str, Entry] = {}
    entries = []
    for fields in listed:
        entry = _entry(fields)
        if entry.kind == "members":
            _expect(members is not None and entry.shape[:1] == (len(members),), "a leaf has not the members axis")
        first = tensors.setdefault(entry.tensor, entry)
        _expect(first.path == entry.tensor, "a leaf names a tensor that is not there")
        _expect(first._replace(path=entry.path) == entry, "tied leaves differ")
        entries.append(entry)
    return tuple(entries)


def _entry(fields: dict) -> Entry:
    _expect(set(fields) == set(Entry._fields), "a leaf has missing or unknown fields")
    path, tensor, kind, dtype, checksum = (fields[k] for k in ("path", "tensor", "kind", "dtype", "checksum"))
    shape, key = fields["shape"], fields["key"]
    _expect(all(type(text) is str for text in (path, tensor, kind, dtype, checksum)), "a leaf has a wrong field")
    _expect(dtype in DTYPES and kind in ("members", "shared"), "a leaf has an unknown dtype or kind")
    _expect(_is_list(shape, int) and len(shape) <= _MOST_AXES, "a shape is no list of integers")
    _expect(all(size >= 0 for size in shape), "a shape has a negative size")
    _expect(math.prod(size or 1 for size in shape) < 2**59, "a shape is too large")
    if key is not None:
        words = KEY_WORDS.get(key) if type(key) is str else None
        _expect(words is not None and dtype == "uint32" and shape[-1:] == [words], "keys of an unknown generator")
    return Entry(path, tensor, kind, dtype, tuple(shape), key, checksum)


def _number_fields(number: Number) -> dict:
    """Exact texts: Python's `float.hex`, and such for integers too, which JSON readers may round."""
    value = text = number.value
    if type(value) is int:
        text = hex(value)
    elif isinstance(value, float):
        text = value.hex()
    elif isinstance(value, complex):
        text = [value.real.hex(), value.imag.hex()]
    return {"path": number.path, "type": type(value).__name__, "value": text}


def _number(fields: dict) -> Number:
    _expect(set(fields) == {"path", "type", "value"} and type(fields["path"]) is str, "a number has wrong fields")
    kind, text = fields["type"], fields["value"]
    try:
        if kind == "bool" and type(text) is bool:
            return Number(fields["path"], text)
        if kind == "int" and type(text) is str:
            return Number(fields["path"], int(text, 16))
        if kind == "float" and type(text) is str:
            return Number(fields["path"], float.fromhex(text))
        if kind == "complex" and _is_list(text, str) and len(text) == 2:
            return Number(fields["path"], complex(float.fromhex(text[0]), float.fromhex(text[1])))
    except (ValueError, OverflowError):
        pass
    raise _Refused(f"a number is none of {', '.join(_TYPES)}")
