from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from .._check import check_array, check_positive_int, concrete, first_text, kept_rows, needs_message


def check_groups(
    name: str, groups: Any, num_groups: Any, rows: tuple[int, ...], mask: ArrayLike | None = None
) -> tuple[Array, int]:
    """Raises unless `groups` are integers from 0 to `num_groups - 1` (where concrete), one per row. Returns both."""
    count = check_positive_int(num_groups, "num_groups", name=name)
    if isinstance(groups, np.ndarray) and groups.dtype.kind in "OUST":
        fix = "Number the groups: `names, groups = np.unique(groups, return_inverse=True)`."
        raise TypeError(needs_message(name, "integer `groups`", f"got dtype {groups.dtype}", fix))
    array = check_array(name, "groups", groups)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        fix = "Number the groups from 0: `names, groups = np.unique(groups, return_inverse=True)`."
        got = f"got dtype {array.dtype}, shape {array.shape}"
        raise TypeError(needs_message(name, "integer `groups`", got, fix))
    if array.shape != rows:
        got = f"expected {rows}, got {array.shape}"
        raise ValueError(needs_message(name, "one of `groups` per row", got, "Groups are in the order of the rows."))
    host, kept = concrete(groups), kept_rows(mask)
    if host is not None and kept is not None and (wrong := ((host < 0) | (host >= count)) & kept).any():
        fix = "Count groups from 0, and leave rows without a group out (`mask`)."
        needs = f"`groups` from 0 to {count - 1}, as `num_groups` is {count}"
        raise ValueError(needs_message(name, needs, first_text(host, wrong), fix))
    return array.astype(jnp.int32), count
