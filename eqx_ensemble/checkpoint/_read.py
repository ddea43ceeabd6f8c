import hashlib
from collections.abc import Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np

from .._aligned import empty_aligned
from ._arrays_file import ArraysFile
from ._damage import corrupt_error
from ._decode import decode
from ._dtypes import DTYPES, raw
from ._hashing import Digests, Pending
from ._layout import DIGEST, file_layout
from ._manifest import LIMIT, NAME, TABLE, Entry, Manifest
from ._path import open_file

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
        for digest, checksum, member in zip(found, checksums, members, strict=True):
            if digest != checksum:
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
