import zlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Key

from ._check import MemberMismatchError, check_key, check_key_shape, check_positive_int
from ._leaves import is_key


def member_keys(key: Any, num_members: int, *, purpose: str = "build") -> Key[Array, " members"]:
    """One key per member, drawn from one key.

    The key of a member is `fold_in(fold_in(key, tag), i)`, where `tag` is the CRC-32 of `purpose`. It depends on the
    member's position alone: member 3 of eight is member 3 of eighty. `keys[8:]` are keys for more members.

    **Arguments:**

    - `key`: one key, typed or legacy, of the threefry kind: other generators draw differently under `vmap`. Keys
        `(members,)` are returned as they are.
    - `num_members`: the number of members.
    - `purpose`: a name for the use of the keys, `"build"` or `"fit"`; streams of different purposes are independent.

    **Returns:** typed keys `(members,)`.

    **Raises:** `TypeError` for anything but threefry keys; `MemberMismatchError` for another number of keys.

    ```python
    make = lambda key: eqx.nn.Linear(2, 1, key=key)
    ensemble = ee.build(make, 8, key=key)
    alone = make(ee.member_keys(key, 8)[3])  # the same model as ensemble[3]
    ```
    """
    check_positive_int(num_members, "num_members")
    shape = check_key_shape(key, wanted="one key, or one per member")
    key = key if is_key(key) else jax.random.wrap_key_data(key, impl="threefry2x32")
    if shape == ():
        return _member_keys(key, np.uint32(tag(purpose)), num_members)
    if shape != (num_members,):
        raise MemberMismatchError(f"`key` is one key, or one per member ({num_members},); got keys of shape {shape}.")
    return key


_member_keys = jax.jit(
    lambda key, tag, n: jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, tag), jax.numpy.arange(n)),
    static_argnums=2,
)


def own_key(seed: int = 0) -> Key[Array, ""]:
    """A key that the library makes itself, whatever the default generator of JAX is."""
    return jax.random.key(seed, impl="threefry2x32")


def root(key: Any) -> Key[Array, ""]:
    """`key`, typed or legacy, as one typed threefry key."""
    check_key(key)
    return key if is_key(key) else jax.random.wrap_key_data(key, impl="threefry2x32")


def tag(purpose: str) -> int:
    """The number that represents a purpose. `fold_in` with small numbers would collide with `split`."""
    return zlib.crc32(purpose.encode())


def key_words(key: Any, num_members: int, *, purpose: str) -> np.ndarray:
    """The 32-bit words `(members, 2)` of the members' keys."""
    return np.asarray(jax.random.key_data(member_keys(key, num_members, purpose=purpose)))


def generators(key: Any, num_members: int, *, purpose: str) -> Iterator[np.random.Generator]:
    """One generator per member, from its key.

    Rows are drawn on the host, where a permutation costs a thirtieth of one drawn by threefry, and draws do not depend
    on a device or on 64-bit types.
    """
    for high, low in key_words(key, num_members, purpose=purpose).tolist():
        yield np.random.Generator(np.random.Philox(key=high << 32 | low))
