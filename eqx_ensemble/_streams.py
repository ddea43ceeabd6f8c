import zlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from ._check import is_typed_key


def key_words(key: Any, num_members: int, *, purpose: str) -> np.ndarray:
    """The words `(members, 2)` of the keys that `eqx_ensemble.member_keys` gives members 0, 1, 2 and so on."""
    root = key if is_typed_key(key) else jax.random.wrap_key_data(key)
    tagged = jax.random.fold_in(root, np.uint32(zlib.crc32(purpose.encode())))
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(tagged, np.arange(num_members, dtype=np.int32))
    return np.asarray(jax.random.key_data(keys))


def generators(key: Any, num_members: int, *, purpose: str) -> Iterator[np.random.Generator]:
    """One generator for each member, from its key.

    Rows are drawn on the host, where a permutation costs a thirtieth of one drawn by threefry, and no draw depends
    on a device or on the width of its numbers.
    """
    for high, low in key_words(key, num_members, purpose=purpose).tolist():
        yield np.random.Generator(np.random.Philox(key=high << 32 | low))
