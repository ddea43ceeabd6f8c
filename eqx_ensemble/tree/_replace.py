from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .. import _check
from ._check import check_distinct, check_index, check_leading_axes
from ._compare import compare_trees, replace_rules
from ._index import map_columns

T = TypeVar("T")

_write = jax.jit(lambda leaf, rows, value: leaf.at[rows].set(value, mode="clip"))


def replace(tree: T, index: Any, value: Any) -> T:
    """Replaces members of a stacked tree.

    **Arguments:**

    - `tree`: a stacked PyTree, each of its arrays of shape `(members, ...)`.
    - `index`: the members, as in [`eqx_ensemble.tree.take`][], each at most once. A traced index is clamped.
    - `value`: for an int `index`, one member: the same tree with arrays `(...)`. Otherwise a stacked tree with as many
        members as `index` selects. Its leaves that are not arrays must equal those of `tree`.

    **Returns:**

    A new stacked tree; `tree` itself does not change.

    **Raises:**

    `MemberMismatchError` if `value` differs from the members in structure, shapes, dtypes or static values;
    `ValueError` if a member is given twice; the errors of [`eqx_ensemble.tree.take`][] for an invalid index.

    ```python
    import jax.numpy as jnp
    from eqx_ensemble.tree import replace

    # {"w": [[0., 0.], [1., 1.], [0., 0.]]}
    replace({"w": jnp.zeros((3, 2))}, 1, {"w": jnp.ones(2)})
    ```
    """
    name = "tree.replace"
    rows = check_index(index, check_leading_axes(tree, name=name)[0], name=name)
    if isinstance(rows, np.ndarray):
        check_distinct(rows, name=name)
    count = None if np.ndim(rows) == 0 else np.shape(rows)[0]
    columns = compare_trees([tree, value], name=name, rules=replace_rules(count))
    return map_columns(lambda leaves: _replace_column(leaves, rows), columns)


def _replace_column(leaves: list, rows: Any) -> Any:
    leaf, value = leaves
    return _write(jnp.asarray(leaf), rows, jnp.asarray(value)) if _check.is_member_array(leaf) else leaf
