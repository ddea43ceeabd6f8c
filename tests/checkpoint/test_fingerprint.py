"""The checksum is the one that its documentation defines, and finds what it promises to find."""

import hashlib

import numpy as np
import pytest

from eqx_ensemble.checkpoint._hashing import fingerprints

ROW = 4096 * 8
FACTOR = 0x9E3779B97F4A7C15


def rng():
    return np.random.default_rng(0)


def reference(piece):
    """The definition, in Python's integers."""
    if len(piece) < 2 * ROW:
        return hashlib.sha256(piece).digest()
    end = len(piece) // ROW * ROW
    words = [int.from_bytes(piece[i : i + 8], "little") for i in range(0, end, 8)]
    state = [0] * 4096
    for i, word in enumerate(words):
        a = state[i % 4096]
        state[i % 4096] = (a ^ a >> 29) * FACTOR % 2**64 ^ word
    return hashlib.sha256(b"".join(a.to_bytes(8, "little") for a in state) + piece[end:]).digest()


@pytest.mark.parametrize("size", [0, 1, 8, 2 * ROW - 1, 2 * ROW, 2 * ROW + 1, 3 * ROW, 3 * ROW + 12_345])
@pytest.mark.parametrize("count", [0, 1, 3, 11])
def test_it_is_the_definition(size, count):
    data = rng().bytes(size * count)
    expected = [reference(data[i * size : (i + 1) * size]) for i in range(count)]
    assert fingerprints(memoryview(data), count) == expected


def test_memory_that_is_not_aligned():
    data = rng().bytes(3 * ROW + 5)
    assert fingerprints(memoryview(data)[5:], 1) == [reference(data[5:])]


def one(data):
    return fingerprints(memoryview(data), 1)[0]


SIZE = 5 * ROW + 1000


def test_every_bit():
    """A sample of them; those of the first and the last word of rows, and of the rest, among them."""
    data = bytearray(rng().bytes(SIZE))
    whole = one(data)
    edges = [8 * byte + bit for byte in (0, 7, ROW - 8, ROW - 1, ROW, 5 * ROW - 1, 5 * ROW, SIZE - 1) for bit in (0, 7)]
    for bit in [*edges, *rng().integers(0, 8 * SIZE, 500).tolist()]:
        data[bit // 8] ^= 1 << bit % 8
        assert one(data) != whole
        data[bit // 8] ^= 1 << bit % 8
    assert one(data) == whole


def test_bursts():
    data = rng().bytes(SIZE)
    draw = np.random.default_rng(1)
    for _ in range(200):
        length = int(draw.integers(1, ROW - 8 + 1))
        start = int(draw.integers(0, SIZE - length + 1))
        for burst in (bytes(length), b"\xff" * length, draw.bytes(length)):
            changed = data[:start] + burst + data[start + length :]
            assert changed == data or one(changed) != one(data)


def swapped(data, first, second, size):
    changed = bytearray(data)
    changed[first : first + size], changed[second : second + size] = (
        data[second : second + size],
        data[first : first + size],
    )
    return bytes(changed)


SWAPS = [(0, ROW, 4096), (512, 3 * ROW + 512, 512), (0, 2 * ROW, ROW), (8, 16, 8), (0, ROW, 8)]


def test_swapped_blocks_and_pairs_of_bits():
    """Also at distances of rows, where one column sees both changes; the same bit twice, a sign for instance."""
    numbers = rng().normal(size=SIZE // 8)
    for data in (rng().bytes(SIZE), numbers.tobytes(), np.tile(numbers[:4096], 5).tobytes()):
        for first, second, size in SWAPS:
            changed = swapped(data, first, second, size)
            assert (one(changed) == one(data)) == (changed == data)
        for bit in (0, 31, 62, 63):
            changed = bytearray(data)
            for row in (1, 3):
                changed[row * ROW + bit // 8] ^= 1 << bit % 8
            assert one(bytes(changed)) != one(data)


def test_without_the_shift_pairs_of_high_bits_would_be_silent():
    """A negative control: a polynomial modulo a power of two sees nothing of them."""

    def polynomial(column):
        state = 0
        for word in column:
            state = (state * FACTOR + word) % 2**64
        return state

    column = [int(word) for word in rng().integers(0, 2**63, 5)]
    changed = [word ^ (i in (1, 3)) << 63 for i, word in enumerate(column)]
    assert polynomial(changed) == polynomial(column)


def test_lengths():
    data = rng().bytes(SIZE)
    found = {one(data[:length]) for length in (SIZE, SIZE - 1, SIZE - 8, 5 * ROW, 4 * ROW, 2 * ROW, 2 * ROW - 1)}
    assert len(found) == 7
    zeros = {one(bytes(length)) for length in (2 * ROW, 2 * ROW + 1, 2 * ROW + 8)}
    assert len(zeros) == 3
