r"""The checksum of a piece of memory: SHA-256; for large pieces, after a compression at a fraction of its cost.

A piece of 64 KiB or more is split into rows of 4,096 little-endian 64-bit words and a rest. Each column $w_1, w_2, ...$
is compressed into one word, $a_j = m(a_{j-1}) \oplus w_j$ from $a_0 = 0$, where
$m(a) = (a \oplus \lfloor a / 2^{29} \rfloor) \cdot M \bmod 2^{64}$ with an odd $M$. The checksum is the SHA-256 of the
4,096 words and the rest.

$m$ is a bijection, so $a_j$ is a bijective function of $a_{j-1}$ for a given $w_j$, and of $w_j$ for a given
$a_{j-1}$: a change of a single word always changes its column's result. Hence every flipped bit, and every burst of up
to 32 KiB less 8 bytes, is detected unless SHA-256 collides. Several changes in a column, such as swapped blocks, cancel
with a probability of about $2^{-64}$, in every column that they touch. This detects damage; it does not protect against
forgery.
"""

import hashlib

import numpy as np

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
