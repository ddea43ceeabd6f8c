"""Reads manifests from untrusted files: only what `encode` writes is accepted."""

import json
import math
from typing import Any

from ._check import KEY_WORDS, format_version_message
from ._check_record import InvalidRecordError, check_depth, check_valid, is_list, is_texts
from ._damage import corrupt_error
from ._dtypes import DTYPES
from ._manifest import FLOAT, FORMAT, SEAL, TABLE, VERSION, Entry, Manifest, Number, digest, is_orbax

_HEX = 64
_MOST_AXES = 32
_NOT_FINITE = ("nan", "inf", "-inf")
_TYPES = ("bool", "int", "float", "complex")


def decode(data: bytes, file: Any) -> Manifest:
    """The manifest in these bytes; `CheckpointCorruptError` if they are not what `encode` wrote."""
    start = len(SEAL) - len(b"%s") + _HEX
    body = data[start:-2]
    if data != SEAL % digest(body) + body + b"}\n":
        raise corrupt_error(file, "its checksum does not match")
    try:
        content = json.loads(body.decode("ascii"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
        check_valid("not a manifest", holds=type(content) is dict and content.get("format") == FORMAT)
        if content.get("version") == VERSION:
            return _manifest(content)
    except InvalidRecordError as error:
        raise corrupt_error(file, str(error)) from None
    except (RecursionError, ValueError) as error:  # what the JSON parser raises
        raise corrupt_error(file, f"it is not the JSON of a manifest ({type(error).__name__})") from None
    raise ValueError(format_version_message(file, content.get("version"), VERSION))


def _no_duplicates(pairs: list) -> dict:
    check_valid("a key occurs twice", holds=len({key for key, _ in pairs}) == len(pairs))
    return dict(pairs)


def _no_constant(name: str) -> None:
    raise InvalidRecordError(f"`{name}` is not a JSON number")


def _manifest(content: dict) -> Manifest:
    check_valid("a field is missing or unknown", holds=set(content) == {"format", "version", *Manifest._fields})
    check_depth(content["meta"])
    members = content["members"]
    if members is not None:
        check_valid("`members` are not ids", holds=_is_ids(members))
        members = tuple(members)
    structure, versions = content["structure"], content["versions"]
    check_valid("`structure` or `versions` are not strings", holds=is_texts(structure) and is_texts(versions))
    step, score, meta = content["step"], unstrict(content["score"]), unstrict(content["meta"])
    check_valid("`step` is not a step number", holds=step is None or (type(step) is int and 0 <= step < 10**12))
    check_valid("`score` is not a number", holds=score is None or type(score) is float)
    are_leaves = is_list(content["entries"], dict) and is_list(content["numbers"], dict)
    check_valid("`entries` or `numbers` are not leaves", holds=are_leaves)
    check_valid("`file` is not the name of a file of arrays", holds=_is_file(content["file"]))
    entries = _entries(content["entries"], members)
    numbers = tuple(_number(number) for number in content["numbers"])
    paths = [leaf.path for leaf in (*entries, *numbers)]
    check_valid("two leaves have one path", holds=len({TABLE, *paths}) == 1 + len(paths))
    return Manifest(content["file"], members, entries, numbers, structure, meta, step, score, versions)


def _is_ids(value: Any) -> bool:
    return is_list(value, int) and 0 < len(value) == len(set(value)) and all(0 <= i < 2**31 for i in value)


def _is_file(name: Any) -> bool:
    """Whether a name is of one of the two kinds that are opened; neither can leave the folder."""
    if type(name) is not str:
        return False
    start, end = ("orbax-", "") if is_orbax(name) else ("arrays-", ".safetensors")
    number = name[len(start) : len(name) - len(end)]
    return name == start + number + end and number.isascii() and number.isdigit() and len(number) <= 12


def _entries(fields_of: list[dict], members: tuple[int, ...] | None) -> tuple[Entry, ...]:
    tensors: dict[str, Entry] = {}
    entries = []
    for fields in fields_of:
        entry = _entry(fields)
        if entry.kind == "members":
            check_valid(
                "a leaf lacks the members axis", holds=members is not None and entry.shape[:1] == (len(members),)
            )
        first = tensors.setdefault(entry.tensor, entry)
        check_valid("a leaf names a missing tensor", holds=first.path == entry.tensor)
        check_valid("tied leaves differ", holds=first._replace(path=entry.path) == entry)
        entries.append(entry)
    return tuple(entries)


def _entry(fields: dict) -> Entry:
    check_valid("a leaf has missing or unknown fields", holds=set(fields) == set(Entry._fields))
    path, tensor, kind, dtype, checksum = (fields[k] for k in ("path", "tensor", "kind", "dtype", "checksum"))
    shape, key = fields["shape"], fields["key"]
    check_valid(
        "a leaf has a wrong field", holds=all(type(text) is str for text in (path, tensor, kind, dtype, checksum))
    )
    check_valid("a leaf has an unknown dtype or kind", holds=dtype in DTYPES and kind in ("members", "shared"))
    check_valid("a shape is not a list of integers", holds=is_list(shape, int) and len(shape) <= _MOST_AXES)
    check_valid("a shape has a negative size", holds=all(size >= 0 for size in shape))
    check_valid("a shape is too large", holds=math.prod(size or 1 for size in shape) < 2**59)
    if key is not None:
        words = KEY_WORDS.get(key) if type(key) is str else None
        check_valid(
            "keys of an unknown generator", holds=words is not None and dtype == "uint32" and shape[-1:] == [words]
        )
    return Entry(path, tensor, kind, dtype, tuple(shape), key, checksum)


def _number(fields: dict) -> Number:
    check_valid(
        "a number has wrong fields", holds=set(fields) == {"path", "type", "value"} and type(fields["path"]) is str
    )
    kind, text = fields["type"], fields["value"]
    try:
        if kind == "bool" and type(text) is bool:
            return Number(fields["path"], text)
        if kind == "int" and type(text) is str:
            return Number(fields["path"], int(text, 16))
        if kind == "float" and type(text) is str:
            return Number(fields["path"], float.fromhex(text))
        if kind == "complex" and is_list(text, str) and len(text) == 2:
            return Number(fields["path"], complex(float.fromhex(text[0]), float.fromhex(text[1])))
    except (ValueError, OverflowError):
        pass
    raise InvalidRecordError(f"a number is not one of {', '.join(_TYPES)}")


def unstrict(value: Any) -> Any:
    """Reverts `strict`, except that tuples become lists."""
    if isinstance(value, dict):
        if set(value) == {FLOAT} and value[FLOAT] in _NOT_FINITE:
            return float(value[FLOAT])
        return {key: unstrict(item) for key, item in value.items()}
    return [unstrict(item) for item in value] if isinstance(value, list) else value
