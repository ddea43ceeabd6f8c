import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key, UInt32

from . import _check


def root(key: Any, *, name: str) -> Key[Array, ""]:
    """The one typed threefry key behind `key`, which may be typed or of the legacy kind."""
    _check.check_key(key, name=name)
    return key if _check.is_typed_key(key) else jax.random.wrap_key_data(key)


def member_keys(key: Any, ids: Any, *, purpose: str = "build") -> Key[Array, " members"]:
    """One key per member, drawn from one root key.

    The key of a member is `fold_in(fold_in(key, tag), id)` where `tag` is the CRC-32 of `purpose`: it depends on
    the member's id alone, so growing or reordering an ensemble changes no member's randomness, and two purposes
    never share a stream. These are the keys that `eqx_ensemble.build` hands to the constructor:

    ```python
    make = lambda key: eqx.nn.Linear(2, 1, key=key)
    ensemble = ee.build(make, 8, key=key)
    alone = make(ee.member_keys(key, 8)[3])  # the same model as ensemble[3]
    ```

    **Arguments:**

    - `key`: one key, typed or legacy, of the threefry kind. Other generators draw differently under `vmap`.
    - `ids`: the number of members, or their ids `(members,)`.
    - `purpose`: what the keys are for.

    **Returns:** typed keys `(members,)`.

    **Raises:** `TypeError` for what is not one threefry key.
    """
    if not isinstance(purpose, str):
        raise TypeError(f"`member_keys` needs `purpose` to be a text, got {_check.kind_text(purpose)}.")
    return _member_keys(root(key, name="member_keys"), np.uint32(tag(purpose)), member_ids(ids))


@jax.jit
def _member_keys(key: Key[Array, ""], tag: UInt32[Array, ""], ids: Int[Array, " members"]) -> Key[Array, " members"]:
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.fold_in(key, tag), ids)


def member_ids(ids: Any) -> Int[Array, " members"]:
    """Ids `(members,)` from a count or from ids."""
    if isinstance(ids, int | np.integer):
        _check.member_count(ids)
        return jnp.arange(ids, dtype=jnp.int32)
    _check.ids(ids)
    return jnp.asarray(ids, dtype=jnp.int32)


def tag(purpose: str) -> int:
    """The number that stands for a purpose. `fold_in` with small numbers would collide with `split`."""
    return zlib.crc32(purpose.encode())
