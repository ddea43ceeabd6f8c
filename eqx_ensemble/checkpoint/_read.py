import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np

from .._check import CheckpointCorruptError
from ._check import damage_message
from ._dtypes import DTYPES, raw
from ._hashing import Digests
from ._layout import DIGEST, file_layout
from ._manifest import LIMIT, NAME, TABLE, Entry, Manifest, decode
from ._path import open_file

_PART = 2**20


class Wanted(NamedTuple):
    """A leaf to read, and where its array should lie; `None` for the memory of the host."""

    entry: Entry
    sharding: jax.sharding.Sharding | None


class Reader:
    """A checkpoint opened for reading: its manifest is whole, and its file of arrays has the size it should have.

    Numbers are checked as they are read. Memory is taken for one array at a time, which the size of the file bounds.
    """

    def __init__(self, path: Path, manifest: Manifest):
        self.folder, self.manifest, self.file = path, manifest, path / manifest.file
        self._file = open_file(self.file)
        try:
            self._layout = file_layout(self.manifest.entries)
            self._check_file()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def arrays(self, wanted: Sequence[Wanted], rows: Sequence[int] | None = None) -> Iterator[np.ndarray]:
        """The arrays of leaves, checked, one at a time; of those with members, `rows` only."""
        for entry, _ in wanted:
            yield self._array(entry, rows)

    def _array(self, entry: Entry, rows: Sequence[int] | None = None) -> np.ndarray:
        if entry.kind == "shared":
            data, found = self._read(entry, 0, entry.shape, 1)
            self._expect(found[0].hex() == entry.checksum, "the checksum does not match", entry)
            return data
        digests = self._digests(entry)
        count, *inner = entry.shape
        if rows is None:
            data, found = self._read(entry, 0, entry.shape, count)
            self._expect_members(entry, found, digests, range(count))
            return data
        data = np.empty((len(rows), *inner), DTYPES[entry.dtype])
        for i, row in enumerate(rows):
            one, found = self._read(entry, row, (1, *inner), 1)
            self._expect_members(entry, found, digests, [row])
            data[i] = one[0]
        return data

    def _check_file(self) -> None:
        size, expected = os.fstat(self._file.fileno()).st_size, self._layout.size
        if size != expected:
            raise CheckpointCorruptError(
                damage_message(self.file, f"it has {size} bytes, not {expected}", leaf=self._leaf_at(size)),
                str(self.file),
                self._leaf_at(size),
            )
        header = self._layout.header
        if self._bytes(0, len(header)) != header:
            raise CheckpointCorruptError(
                damage_message(self.file, "its header is not the one that follows from the manifest"), str(self.file)
            )

    def _leaf_at(self, size: int) -> str | None:
        """The first leaf that does not fit a file of this size."""
        for entry in self._layout.order:
            start, length = self._layout.spans[entry.tensor]
            if start + length > size:
                return entry.path
        return None

    def _expect(self, condition: bool, reason: str, entry: Entry, member: int | None = None) -> None:  # noqa: FBT001
        if not condition:
            raise CheckpointCorruptError(
                damage_message(self.file, reason, leaf=entry.path, member=member), str(self.file), entry.path, member
            )

    def _expect_members(self, entry: Entry, found: Sequence[bytes], digests: bytes, rows: Sequence[int]) -> None:
        for digest, row in zip(found, rows, strict=True):
            same = digest == digests[row * DIGEST : (row + 1) * DIGEST]
            self._expect(same, "the checksum does not match", entry, row)

    def _digests(self, entry: Entry) -> bytes:
        start = self._layout.spans[TABLE].start + self._layout.rows[entry.tensor] * DIGEST
        digests = self._bytes(start, entry.shape[0] * DIGEST)
        same = hashlib.sha256(digests).hexdigest() == entry.checksum
        self._expect(same, "the members' checksums have changed", entry)
        return digests

    def _read(self, entry: Entry, first_row: int, shape: Sequence[int], count: int) -> tuple[np.ndarray, list[bytes]]:
        """Numbers as they stand in the file, and the SHA-256 of each of `count` equal pieces of them."""
        data = np.empty(shape, DTYPES[entry.dtype])
        view = raw(data)
        self._file.seek(self._layout.spans[entry.tensor].start + first_row * len(view))
        size = len(view) // count
        step = max(1, _PART // max(1, size))
        found = []
        with Digests(len(view) if count > step else 0) as digests:
            for first in range(0, count, step):
                pieces = min(step, count - first)
                part = view[first * size : (first + pieces) * size]
                self._fill(part, entry)
                found.append(digests.add(part, pieces))
        if entry.dtype == "bool":  # NumPy takes any byte for a boolean, and then calculates with it
            self._expect(not (data.view(np.uint8) > 1).any(), "a boolean is neither true nor false", entry)
        return data, [digest for part in found for digest in part]

    def _fill(self, view: memoryview, entry: Entry) -> None:
        while view:
            count = self._file.readinto(view)
            self._expect(bool(count), "the file ends too early", entry)
            view = view[count:]

    def _bytes(self, start: int, size: int) -> bytes:
        self._file.seek(start)
        parts = []
        while size > 0 and (part := self._file.read(size)):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def read_manifest(path: Any) -> Manifest:
    """The manifest of the checkpoint in a folder."""
    file = path / NAME
    try:
        with open_file(file) as handle:
            data = handle.read(LIMIT + 1)
    except FileNotFoundError:
        raise CheckpointCorruptError(damage_message(file, "the file is missing"), str(file)) from None
    if len(data) > LIMIT:
        raise CheckpointCorruptError(
            damage_message(file, f"its bytes are more than the {LIMIT} that are read"), str(file)
        )
    return decode(data, file)
