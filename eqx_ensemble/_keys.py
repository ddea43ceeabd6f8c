import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key, UInt32

from ._check import check_integer_ids, check_key, check_positive_int, is_key, is_traced, kind_text


def root(key: Any) -> Key[Array, ""]:
    """`key`, typed or legacy, as one typed threefry key."""
    check_key(key)
    return key if is_key(key) else jax.random.wrap_key_data(key)


def member_keys(key: Any, ids: Any, *, purpose: str = "build") -> Key[Array, " members"]:
    """One key per member, drawn from one root key.

    The key of a member is `fold_in(fold_in(key, tag), id)`, where `tag` is the CRC-32 of `purpose`. It depends on the
    member's id alone, so growing or reordering an ensemble changes no member's randomness, and streams for different
    purposes are independent. With the default, these are the keys that [`eqx_ensemble.build`][] passes to the
    constructor.

    **Arguments:**

    - `key`: one key, typed or legacy, of the threefry kind. Other generators draw differently under `vmap`.
    - `ids`: the number of members, or their ids `(members,)`.
    - `purpose`: a name for the use of the keys.

    **Returns:** typed keys `(members,)`.

    **Raises:** `TypeError` for anything but one threefry key; `TypeError` and `ValueError` for invalid `ids`.

    ```python
    make = lambda key: eqx.nn.Linear(2, 1, key=key)
    ensemble = ee.build(make, 8, key=key)
    alone = make(ee.member_keys(key, 8)[3])  # the same model as ensemble[3]
    ```
    """
    if not isinstance(purpose, str):
        raise TypeError(f"`member_keys` needs `purpose` to be a string, got {kind_text(purpose)}.")
    return _member_keys(root(key), np.uint32(tag(purpose)), member_ids(ids, "ids"))


@jax.jit
def _member_keys(key: Key[Array, ""], tag: UInt32[Array, ""], ids: Int[Array, " members"]) -> Key[Array, " members"]:
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.fold_in(key, tag), ids)


def member_ids(ids: Any, argument: str = "num_members") -> Int[np.ndarray, " members"] | Int[Array, " members"]:
    """Ids `(members,)` from a count, the argument `argument` of the function `name`, or from ids."""
    if isinstance(ids, int | np.integer):
        check_positive_int(ids, argument)
        return np.arange(ids, dtype=np.int32)  # known also inside of `jax.jit`
    check_ids(ids)
    return jnp.asarray(ids, dtype=jnp.int32) if is_traced(ids) else np.asarray(ids, np.int32)


def tag(purpose: str) -> int:
    """The number that represents a purpose. `fold_in` with small numbers would collide with `split`."""
    return zlib.crc32(purpose.encode())


def check_ids(values: Any) -> None:
    """Raises unless `values` is a vector of at least one integer, each from 0 to 2**31 - 1, and all different."""
    check_integer_ids(values)
    if is_traced(values):
        return
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise TypeError(f"`ids` are integers of shape (members,), got {array.dtype} of shape {array.shape}.")
    if array.size == 0:
        raise ValueError("`ids` must name at least one member, got none.")
    if array.min() < 0 or array.max() >= 2**31:
        raise ValueError(f"`ids` must be in [0, 2**31), got {array.min()} to {array.max()}.")
    check_distinct_ids(array, "Give each member a different id.")


COPIES_KEEP_IDS = (
    "A copy keeps the id of the member that it replaces: "
    "`equinox.tree_at(lambda e: e.stacked, ensemble, tree.take(ensemble.stacked, index))`."
)


def check_distinct_ids(values: Any, fix: str) -> None:
    """Raises if ids repeat."""
    if is_traced(values):
        return
    unique, counts = np.unique(np.asarray(values), return_counts=True)
    if (counts > 1).any():
        raise ValueError(
            "Members need different ids, because each member's random stream follows from its id; repeated: "
            f"{unique[counts > 1].tolist()}.\n{fix}"
        )


def key_words(key: Any, ids: Any, *, purpose: str) -> np.ndarray:
    """The 32-bit words `(members, 2)` of the members' keys."""
    return np.asarray(jax.random.key_data(member_keys(key, ids, purpose=purpose)))


def generators(key: Any, ids: Any, *, purpose: str) -> Iterator[np.random.Generator]:
    """One generator per member, from its key; `ids` is the number of members, or their ids.

    Rows are drawn on the host, where a permutation costs a thirtieth of one drawn by threefry, and draws do not depend
    on a device or on 64-bit types.
    """
    for high, low in key_words(key, ids, purpose=purpose).tolist():
        yield np.random.Generator(np.random.Philox(key=high << 32 | low))
