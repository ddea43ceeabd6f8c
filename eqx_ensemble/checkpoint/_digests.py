import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from ._dtypes import raw
from ._fingerprint import fingerprints
from ._manifest import Entry

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
