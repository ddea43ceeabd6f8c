from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from . import _keys


def key_words(key: Any, ids: Any, *, purpose: str) -> np.ndarray:
    """The 32-bit words `(members, 2)` of the members' keys."""
    return np.asarray(jax.random.key_data(_keys.member_keys(key, ids, purpose=purpose)))


def generators(key: Any, ids: Any, *, purpose: str) -> Iterator[np.random.Generator]:
    """One generator per member, from its key; `ids` is the number of members, or their ids.

    Rows are drawn on the host, where a permutation costs a thirtieth of one drawn by threefry, and draws do not depend
    on a device or on 64-bit types.
    """
    for high, low in key_words(key, ids, purpose=purpose).tolist():
        yield np.random.Generator(np.random.Philox(key=high << 32 | low))
