import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np

from ._arrays_file import ArraysFile
from ._damage import corrupt_error
from ._decode import decode
from ._dtypes import DTYPES, raw
from ._hashing import Digests
from ._layout import DIGEST, file_layout
from ._manifest import LIMIT, NAME, TABLE, Entry, Manifest
from ._path import open_file

MISMATCH = "the checksum does not match"

_PART = 2**20


class Wanted(NamedTuple):
    """A leaf to read, and the sharding that its array is to have; `None` for host memory."""

    entry: Entry
    sharding: jax.sharding.Sharding | None


class Reader:
    """A checkpoint open for reading. The checksums of numbers are verified as they are read.

    Memory is taken for one array at a time, which the size of the file bounds.
    """

    def __init__(self, path: Path, manifest: Manifest):
        self.folder, self.manifest = path, manifest
        self._path, self._layout = path / manifest.file, file_layout(manifest.entries)
        self._file = ArraysFile(self._path, self._layout)

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def arrays(self, wanted: Sequence[Wanted], rows: Sequence[int] | None = None) -> Iterator[np.ndarray]:
        """The arrays of leaves, verified, one at a time; of those with members, `rows` only."""
        for entry, _ in wanted:
            yield self._read_shared(entry) if entry.kind == "shared" else self._read_members(entry, rows)

    def _read_shared(self, entry: Entry) -> np.ndarray:
        data, (digest,) = self._read(entry, 0, entry.shape, 1)
        if digest.hex() != entry.checksum:
            raise corrupt_error(self._path, MISMATCH, leaf=entry.path)
        return data

    def _read_members(self, entry: Entry, rows: Sequence[int] | None) -> np.ndarray:
        digests = self._digests(entry)
        count, *inner = entry.shape
        if rows is None:
            data, found = self._read(entry, 0, entry.shape, count)
            self._check_members(entry, found, digests, range(count))
            return data
        data = np.empty((len(rows), *inner), DTYPES[entry.dtype])
        for i, row in enumerate(rows):
            one, found = self._read(entry, row, (1, *inner), 1)
            self._check_members(entry, found, digests, [row])
            data[i] = one[0]
        return data

    def _check_members(self, entry: Entry, found: Sequence[bytes], digests: bytes, rows: Sequence[int]) -> None:
        for digest, row in zip(found, rows, strict=True):
            if digest != digests[row * DIGEST : (row + 1) * DIGEST]:
                raise corrupt_error(self._path, MISMATCH, leaf=entry.path, member=row)

    def _digests(self, entry: Entry) -> bytes:
        start = self._layout.spans[TABLE].start + self._layout.rows[entry.tensor] * DIGEST
        digests = self._file.read(start, entry.shape[0] * DIGEST)
        if hashlib.sha256(digests).hexdigest() != entry.checksum:
            raise corrupt_error(self._path, "the checksums of its members have changed", leaf=entry.path)
        return digests

    def _read(self, entry: Entry, first_row: int, shape: Sequence[int], count: int) -> tuple[np.ndarray, list[bytes]]:
        """Numbers as they are in the file, and the SHA-256 of each of `count` equal pieces of them."""
        data = np.empty(shape, DTYPES[entry.dtype])
        view = raw(data)
        start = self._layout.spans[entry.tensor].start + first_row * len(view)
        size = len(view) // count
        step = max(1, _PART // max(1, size))
        found = []
        with Digests(len(view) if count > step else 0) as digests:
            for first in range(0, count, step):
                pieces = min(step, count - first)
                part = view[first * size : (first + pieces) * size]
                self._file.fill(part, start + first * size, entry.path)
                found.append(digests.add(part, pieces))
        if entry.dtype == "bool" and (data.view(np.uint8) > 1).any():  # NumPy would calculate with such a byte
            raise corrupt_error(self._path, "a boolean is neither true nor false", leaf=entry.path)
        return data, [digest for part in found for digest in part]


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
