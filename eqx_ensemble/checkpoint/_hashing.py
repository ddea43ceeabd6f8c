import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import NamedTuple

import jax
import numpy as np

from ._manifest import Entry
from ._snapshot import raw

# The checksum of a piece of memory: SHA-256; for large pieces, after a compression at a fraction of its cost.
#
# A piece of 64 KiB or more is split into rows of 4,096 little-endian 64-bit words and a rest. Each column $w_1, w_2,
# ...$ is compressed into one word, $a_j = m(a_{j-1}) \oplus w_j$ from $a_0 = 0$, where $m(a) = (a \oplus \lfloor a /
# 2^{29} \rfloor) \cdot M \bmod 2^{64}$ with an odd $M$. The checksum is the SHA-256 of the 4,096 words and the rest.
#
# $m$ is a bijection, so $a_j$ is a bijective function of $a_{j-1}$ for a given $w_j$, and of $w_j$ for a given
# $a_{j-1}$: a change of a single word always changes its column's result. Hence every flipped bit, and every burst of
# up to 32 KiB less 8 bytes, is detected unless SHA-256 collides. Several changes in a column, such as swapped blocks,
# cancel with a probability of about $2^{-64}$, in every column that they touch. This detects damage; it does not
# protect against forgery.

_COLUMNS = 4096
_ROW = 8 * _COLUMNS
_LARGE = 2 * _ROW
_AT_ONCE = 2**18
_SHIFT, _FACTOR = np.uint64(29), np.uint64(0x9E3779B97F4A7C15)


def fingerprints(data: memoryview, count: int) -> list[bytes]:
    """The checksums of `count` equal pieces of `data`."""
    size = len(data) // max(1, count)
    if size < _LARGE:
        return [hashlib.sha256(data[i * size : (i + 1) * size]).digest() for i in range(count)]
    pieces = np.frombuffer(data, np.uint8).reshape(count, size)
    step = max(1, _AT_ONCE // _ROW)
    return [found for first in range(0, count, step) for found in _compress(pieces[first : first + step])]


def _compress(pieces: np.ndarray) -> list[bytes]:
    """The checksums of a few pieces `(pieces, bytes)`, which are compressed together."""
    count, size = pieces.shape
    num_rows = size // _ROW
    words = pieces[:, : num_rows * _ROW].view("<u8").reshape(count, num_rows, _COLUMNS)
    state = np.zeros((count, _COLUMNS), "<u8")
    shifted = np.empty_like(state)
    for row in range(num_rows):
        np.right_shift(state, _SHIFT, out=shifted)
        np.bitwise_xor(state, shifted, out=state)
        np.multiply(state, _FACTOR, out=state)
        np.bitwise_xor(state, words[:, row], out=state)
    rests = pieces[:, num_rows * _ROW :]
    return [hashlib.sha256(state[i].tobytes() + rests[i].tobytes()).digest() for i in range(count)]


SIZE = 32


def digests(leaf: np.ndarray | jax.Array, *, per_member: bool) -> dict[int, bytes]:
    """The checksum of each member's part of an array, by member; a shared array counts as member 0.

    For an array on several devices or in several processes: the members that this process holds in one piece.
    """
    found = {}
    for first, block in _blocks(leaf, per_member=per_member):
        count = block.shape[0] if per_member else 1
        found |= {first + i: digest for i, digest in enumerate(fingerprints(raw(block), count))}
    return found


def _blocks(leaf: np.ndarray | jax.Array, *, per_member: bool) -> Iterator[tuple[int, np.ndarray]]:
    """Blocks of complete members in host memory, each with the position of its first member."""
    if isinstance(leaf, np.ndarray):
        yield 0, leaf
        return
    axis, shards = int(per_member), {}
    for shard in leaf.addressable_shards:
        if shard.data.shape[axis:] == leaf.shape[axis:]:
            first = (shard.index[0].start or 0) if per_member else 0
            shards.setdefault(first, shard)
    covered = sum(shard.data.shape[0] for shard in shards.values()) == leaf.shape[0] if per_member else bool(shards)
    if leaf.is_fully_addressable and not covered:
        whole = np.empty(leaf.shape, leaf.dtype)  # `np.asarray(leaf)` would be cached on the leaf
        for shard in leaf.addressable_shards:
            whole[shard.index] = shard.data
        yield 0, whole
    else:
        for first, shard in shards.items():
            yield first, np.asarray(shard.data, order="C")


class DigestRows(NamedTuple):
    """The rows of an array in a table of checksums: one for each of its members, or one if it is shared."""

    entry: Entry
    first: int
    count: int


def rows_of(entries: Sequence[Entry]) -> list[DigestRows]:
    """The rows of all arrays, in the order of the entries."""
    rows, first = [], 0
    for entry in entries:
        if entry.tensor == entry.path:
            count = entry.shape[0] if entry.kind == "members" else 1
            rows.append(DigestRows(entry, first, count))
            first += count
    return rows


def checksum(entry: Entry, digests: bytes) -> str:
    """The checksum in the manifest of an array with these rows in the table."""
    return digests.hex() if entry.kind == "shared" else hashlib.sha256(digests).hexdigest()


_WORTH_A_THREAD = 2**22
_JOB = 2**22
_MOST_THREADS = 3


class Pending(NamedTuple):
    """Checksums that are being computed: `found` is complete when `done` has a token for each job."""

    found: list[bytes]
    num_jobs: int
    done: SimpleQueue[BaseException | None]


class _Job(NamedTuple):
    data: memoryview
    first: int
    count: int
    of: Pending

    def run(self) -> None:
        error = None
        try:
            self.of.found[self.first : self.first + self.count] = fingerprints(self.data, self.count)
        except BaseException as failure:
            error = failure
        self.of.done.put(error)


class Digests:
    """Checksums of pieces of memory, computed in other threads while this one reads or writes.

    Hashing, reading and writing all release Python's lock. `result` computes the jobs that no thread has started: for
    small sizes, and if the system has no more threads, all of them.
    """

    def __init__(self, num_bytes: int) -> None:
        """**Arguments:** `num_bytes`, the number of bytes that will be hashed."""
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        if num_bytes >= _WORTH_A_THREAD:
            for _ in range(min(_MOST_THREADS, max(1, (os.cpu_count() or 1) - 1))):
                # Not a pool, which accepts no work while Python exits, when a last save may still be written.
                thread = threading.Thread(target=self._work, name="eqx_ensemble.digests", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the system has no more threads
                    break
                self._threads.append(thread)

    def __enter__(self) -> "Digests":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            while True:
                self._jobs.get_nowait()
        except Empty:
            pass
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def add(self, data: memoryview, count: int) -> Pending:
        """Starts the checksums of `count` equal pieces of `data`, which must not change until `result` returns."""
        size = len(data) // max(1, count)
        step = max(1, _JOB // max(1, size))
        starts = range(0, count, step)
        pending = Pending([b""] * count, len(starts), SimpleQueue())
        for start in starts:
            pieces = min(step, count - start)
            self._jobs.put(_Job(data[start * size : (start + pieces) * size], start, pieces, pending))
        return pending

    def result(self, pending: Pending) -> list[bytes]:
        """The checksums, once they are complete. This thread helps to compute them."""
        for _ in range(pending.num_jobs):
            while pending.done.empty():
                try:
                    job = self._jobs.get_nowait()
                except Empty:
                    break
                if job is not None:
                    job.run()
            error = pending.done.get()
            if error is not None:
                raise error
        return pending.found

    def _work(self) -> None:
        while job := self._jobs.get():
            job.run()
