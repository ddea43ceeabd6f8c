from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from . import _keys


def key_words(key: Any, num_members: int, *, purpose: str) -> np.ndarray:
    """The 32-bit words `(members, 2)` of the members' keys."""
    return np.asarray(jax.random.key_data(_keys.member_keys(key, num_members, purpose=purpose)))


def generators(key: Any, num_members: int, *, purpose: str) -> Iterator[np.random.Generator]:
    """One generator for each member, from its key.

    Rows are drawn on the host, where a permutation costs a thirtieth of one drawn by threefry, and no draw depends
    on a device or on the width of its numbers.
    """
    for high, low in key_words(key, num_members, purpose=purpose).tolist():
        yield np.random.Generator(np.random.Philox(key=high << 32 | low))


class HostStream:
    """NumPy's Philox generator, which can be set to any member's stream at any epoch.

    Row orders are drawn on the host because a permutation drawn by threefry costs as much as training on it; one
    generator is reused because making one costs as much as a permutation.
    """

    def __init__(self):
        self._bits = np.random.Philox(key=0)
        self._start = self._bits.state
        self._generator = np.random.Generator(self._bits)

    def permutation(self, key_data: np.ndarray, epoch: int, length: int) -> np.ndarray:
        """A permutation of `range(length)` that follows from the words of a member's key and the epoch alone."""
        self._start["state"]["key"][:] = int(key_data[0]) << 32 | int(key_data[1]), epoch
        self._bits.state = self._start
        return self._generator.permutation(length)
