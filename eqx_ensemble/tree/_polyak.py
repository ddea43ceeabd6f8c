from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from .. import _check
from ._accumulate import add_up, result_dtype, sum_dtype
from ._check import check_fraction, check_same_ids
from ._columns import map_columns
from ._compare import POLYAK_RULES, compare_trees

T = TypeVar("T")


def polyak(old: T, new: T, tau: Any) -> T:
    r"""Takes a step of a Polyak average, as for target networks: moves `old` towards `new` by the fraction `tau`.

    Each floating-point or complex array becomes $\tau\, x_{new} + (1 - \tau)\, x_{old}$, as in
    `optax.incremental_update`, in its own dtype. (Below 32 bits it is computed in float32 and rounded to the dtype: in
    bfloat16 a step of less than 1/256 of a value may be lost.) All other arrays are taken from `new`: counters, keys,
    and the ids of an [`eqx_ensemble.Ensemble`][]. Leaves that are not arrays must be equal, and are kept. The members'
    ids are compared outside `jax.jit` only, which synchronises with their device unless both trees hold the same array.

    **Arguments:**

    - `old`, `new`: PyTrees that differ only in the values of their arrays: a target ensemble and the trained one.
    - `tau`: one number from 0 (`old`) to 1 (`new`). It may be traced; then its value is not checked.

    **Returns:**

    A PyTree with the structure of `old`.

    **Raises:**

    `MemberMismatchError` if the trees differ in structure, shapes, dtypes, static values, or in the ids of their
    members; `TypeError` and `ValueError` for a `tau` that is not one number from 0 to 1.

    ```python
    online = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 4, key=key)
    target = online  # arrays are immutable
    target = ee.tree.polyak(target, online, 0.005)  # after every step
    ```
    """
    name = "tree.polyak"
    check_fraction(tau, "tau", name=name)
    columns = compare_trees([old, new], name=name, rules=POLYAK_RULES)
    check_same_ids(old, new, name=name)
    # Python numbers are rounded once, to each leaf's type: `1 - tau` of a rounded `tau` is another weight.
    weights = jnp.stack([1 - tau, tau]) if isinstance(tau, jax.Array) else [1 - float(tau), float(tau)]
    return map_columns(lambda leaves: _move_column(leaves, weights), columns)


def _move_column(leaves: list, weights: Any) -> Any:
    old, new = leaves
    if not _check.is_member_array(new):
        return old
    if not jnp.issubdtype(_check.member_dtype(new), jnp.inexact):
        return new
    dtype = sum_dtype(new, weights)
    return add_up(leaves, weights, dtype).astype(result_dtype(new, weights))
