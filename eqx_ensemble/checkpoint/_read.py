import hashlib
import json
import math
import os
from collections.abc import Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np

from .._foreign import empty_aligned
from ._check import KEY_WORDS, corrupt_error, format_version_message
from ._disk import open_file
from ._hashing import Digests, Pending
from ._manifest import FLOAT, FORMAT, LIMIT, NAME, SEAL, TABLE, VERSION, Entry, Manifest, Number, digest, is_orbax
from ._record import InvalidRecordError, check_depth, check_valid, is_list, is_texts
from ._snapshot import DIGEST, DTYPES, FileLayout, file_layout, raw


class ArraysFile:
    """The file of arrays, open for reading; its size and header are checked against the manifest."""

    def __init__(self, path: Path, layout: FileLayout) -> None:
        self._path = path
        self._file = open_file(path)
        try:
            self._check(layout)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def read(self, start: int, size: int) -> bytes:
        """The bytes from `start` on, fewer at the end of the file."""
        self._file.seek(start)
        parts = []
        while size > 0 and (part := self._file.read(size)):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def fill(self, view: memoryview, start: int, leaf: str) -> None:
        """Fills `view` with bytes of a leaf, from `start` on."""
        self._file.seek(start)
        while view:
            count = self._file.readinto(view)
            if not count:
                raise corrupt_error(self._path, "the file ends too early", leaf=leaf)
            view = view[count:]

    def _check(self, layout: FileLayout) -> None:
        size = os.fstat(self._file.fileno()).st_size
        if size != layout.size:
            leaf = _first_beyond(layout, size)
            raise corrupt_error(self._path, f"it has {size} bytes, not {layout.size}", leaf=leaf)
        if self.read(0, len(layout.header)) != layout.header:
            raise corrupt_error(self._path, "its header is not the one that follows from the manifest")


def _first_beyond(layout: FileLayout, size: int) -> str | None:
    """The first leaf that does not fit a file of this size."""
    for entry in layout.order:
        start, length = layout.spans[entry.tensor]
        if start + length > size:
            return entry.path
    return None


# Reads manifests from untrusted files: only what `encode` writes is accepted.

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


def _no_constant(text: str) -> None:
    raise InvalidRecordError(f"`{text}` is not a JSON number")


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


MISMATCH = "the checksum does not match"

_PART = 2**22


class Wanted(NamedTuple):
    """A leaf to read, and the sharding that its array is to have; `None` for host memory."""

    entry: Entry
    sharding: jax.sharding.Sharding | None


class _Unverified(NamedTuple):
    """An array whose checksums are being computed, with the expected ones and their members."""

    entry: Entry
    data: np.ndarray
    checksums: list[str]
    members: Sequence[int | None]
    pending: list[Pending]


class Reader:
    """A checkpoint open for reading. The checksums of numbers are verified as they are read.

    Memory is allocated one array ahead only, bounded by the size of the file.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = path, manifest
        self._path, self._layout = path / manifest.file, file_layout(manifest.entries)
        self._file = ArraysFile(self._path, self._layout)

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def arrays(self, wanted: Sequence[Wanted], rows: Sequence[int] | None = None) -> Generator[np.ndarray, None, None]:
        """The arrays of leaves, verified, one at a time; of those with members, `rows` only.

        The next array is read while the checksums of the one before are computed.
        """
        with Digests(sum(self._layout.spans[entry.tensor].size for entry, _ in wanted)) as digests:
            before = None
            for entry, _ in wanted:
                current = self._array(entry, rows, digests)
                if before is not None:
                    yield self._verify(before, digests)
                before = current
            if before is not None:
                yield self._verify(before, digests)

    def _array(self, entry: Entry, rows: Sequence[int] | None, digests: Digests) -> _Unverified:
        if entry.kind == "shared":
            data = empty_aligned(entry.shape, DTYPES[entry.dtype])
            return _Unverified(entry, data, [entry.checksum], [None], self._read(entry, 0, data, 1, digests))
        table = self._table(entry)
        count, *inner = entry.shape
        data = empty_aligned((count if rows is None else len(rows), *inner), DTYPES[entry.dtype])
        numbers = range(count) if rows is None else rows
        pending = []
        if rows is None:
            pending = self._read(entry, 0, data, count, digests)
        else:
            for i, row in enumerate(rows):
                pending += self._read(entry, row, data[i : i + 1], 1, digests)
        return _Unverified(entry, data, [table[DIGEST * i : DIGEST * (i + 1)].hex() for i in numbers], numbers, pending)

    def _verify(self, unverified: _Unverified, digests: Digests) -> np.ndarray:
        entry, data, checksums, members, pending = unverified
        found = [digest.hex() for each in pending for digest in digests.result(each)]
        for own, checksum, member in zip(found, checksums, members, strict=True):
            if own != checksum:
                raise corrupt_error(self._path, MISMATCH, leaf=entry.path, member=member)
        if entry.dtype == "bool" and (data.view(np.uint8) > 1).any():  # NumPy would calculate with such a byte
            raise corrupt_error(self._path, "a boolean is neither true nor false", leaf=entry.path)
        return data

    def _table(self, entry: Entry) -> bytes:
        start = self._layout.spans[TABLE].start + self._layout.rows[entry.tensor] * DIGEST
        table = self._file.read(start, entry.shape[0] * DIGEST)
        if hashlib.sha256(table).hexdigest() != entry.checksum:
            raise corrupt_error(self._path, "the checksums of its members have changed", leaf=entry.path)
        return table

    def _read(self, entry: Entry, first_row: int, data: np.ndarray, count: int, digests: Digests) -> list[Pending]:
        """Fills an array with numbers as they are in the file, and begins the checksums of `count` equal pieces."""
        view = raw(data)
        size = len(view) // max(1, count)
        start = self._layout.spans[entry.tensor].start + first_row * size
        step = max(1, _PART // max(1, size))
        pending = []
        for first in range(0, count, step):
            pieces = min(step, count - first)
            part = view[first * size : (first + pieces) * size]
            self._file.fill(part, start + first * size, entry.path)
            pending.append(digests.add(part, pieces))
        return pending


def read_manifest(path: Any) -> Manifest:
    """The manifest of the checkpoint in a folder."""
    file = path / NAME
    try:
        with open_file(file) as handle:
            data = handle.read(LIMIT + 1)
    except FileNotFoundError:
        raise corrupt_error(file, "the file is missing") from None
    if len(data) > LIMIT:
        raise corrupt_error(file, f"it has more than the {LIMIT} bytes that are read")
    return decode(data, file)
