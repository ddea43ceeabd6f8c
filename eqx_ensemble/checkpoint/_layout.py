import json
from collections.abc import Sequence
from typing import BinaryIO, NamedTuple

from ._manifest import LIMIT, TABLE, Entry
from ._snapshot import DTYPES, count_bytes, storage_of

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
