"""The permutations of `fit` once more, in plain NumPy: one number after another, walking until it is inside."""

import numpy as np

from eqx_ensemble.train import _order as _permute

MASK = 2**32 - 1


def mix(x):
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def epoch_words(words, epoch):
    high, low = (int(word) for word in words)
    first = mix((mix(high ^ (epoch * 0x9E3779B9 & MASK)) + low) & MASK)
    return first, mix((first + low + 0x85EBCA6B) & MASK)


def network(words, x, rows, columns):
    row, column = divmod(x, columns)
    for i in range(_permute.num_rounds(min(rows, columns))):
        key = words[0] + 0x9E3779B9 * (i + 1)
        seen, size = (column, rows) if i % 2 == 0 else (row, columns)
        hashed = ((seen + key) * 0x7FEB352D) & MASK
        hashed = ((hashed ^ (hashed >> 15) ^ words[1]) * 0x846CA68B) & MASK
        by = (hashed if size > 1024 else hashed >> 16 << 16) * size >> 32
        if i % 2 == 0:
            row = (row + by) % rows
        else:
            column = (column + by) % columns
    return row * columns + column


def plain_permutation(words, epoch, length):
    """All of an epoch's permutation of `range(length)`."""
    words = epoch_words(words, epoch)
    if length < 64:
        hashes = [mix(mix((i + words[0]) & MASK) ^ words[1]) for i in range(length)]
        ranks = sorted(range(length), key=lambda i: (hashes[i], i))
        return np.argsort(ranks)
    rows, columns = _permute.factors(length)
    found = []
    for position in range(length):
        x = network(words, position, rows, columns)
        while x >= length:
            x = network(words, x, rows, columns)
        found.append(x)
    return np.array(found)
