from collections.abc import Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .. import _check, _leaves
from ._check import check_distinct, check_index, check_leading_axes, check_trees
from ._compare import CONCATENATE_RULES, Rules, compare_trees, replace_rules
from ._index import map_columns

T = TypeVar("T")

_write = jax.jit(lambda leaf, rows, value: leaf.at[rows].set(value, mode="clip"))


def replace(tree: T, index: Any, value: Any) -> T:
    """Replaces members of a stacked tree.

    **Arguments:**

    - `tree`: a stacked PyTree, each of its arrays of shape `(members, ...)`.
    - `index`: the members, as in [`eqx_ensemble.tree.take`][], each at most once.
    - `value`: for an int `index`, one member: the same tree with arrays `(...)`. Otherwise a stacked tree with as many
        members as `index` selects.

    **Returns:** a new stacked tree.

    **Raises:** `MemberMismatchError` if `value` differs from the members in structure, shapes, dtypes or static values;
    `ValueError` if a member is given twice; the errors of [`eqx_ensemble.tree.take`][] for an invalid index.

    ```python
    # {"w": [[0., 0.], [1., 1.], [0., 0.]]}
    ee.tree.replace({"w": jnp.zeros((3, 2))}, 1, {"w": jnp.ones(2)})
    ```
    """
    rows = check_index(index, check_leading_axes(tree)[0])
    if isinstance(rows, np.ndarray):
        check_distinct(rows)
    count = None if np.ndim(rows) == 0 else np.shape(rows)[0]
    columns = compare_trees([tree, value], rules=replace_rules(count))
    return map_columns(lambda leaves: _replace_column(leaves, rows), columns)


def _replace_column(leaves: list, rows: Any) -> Any:
    leaf, value = leaves
    return _write(jnp.asarray(leaf), rows, jnp.asarray(value)) if _leaves.is_member_array(leaf) else leaf


def stack(trees: Iterable[T], *, promote_scalars: bool = False) -> T:
    """Stacks trees of one structure into one whose arrays have a new leading axis `members`.

    Arrays `(...)`, one per tree, become one JAX array `(members, ...)`; NumPy arrays take JAX's precision. Everything
    else (functions, strings, Python scalars, static fields) must be equal and is kept once; closures, partials and
    other objects are compared by their contents.

    [`eqx_ensemble.stack`][] makes an [`eqx_ensemble.Ensemble`][] of models, with shared leaves.

    **Arguments:**

    - `trees`: one or more PyTrees that differ only in the values of their arrays.
    - `promote_scalars`: stack Python floats that differ (learning rates, dropout rates) into arrays `(members,)`
        instead of raising an error.

    **Returns:** a PyTree with the structure of the first tree.

    **Raises:** `MemberMismatchError` if trees differ in anything but array values, also in an array in a closure or a
    static field; `TypeError` for a single tree, `ValueError` for an empty sequence.

    ```python
    models = [
        eqx.nn.Linear(2, 3, key=key) for key in jax.random.split(jax.random.key(0), 4)
    ]
    ee.tree.stack(models).weight.shape  # (4, 3, 2)
    ```
    """
    _check.check_flag(promote_scalars, "promote_scalars")
    rules = Rules(scalars="floats" if promote_scalars else "equal")
    columns = compare_trees(check_trees(trees), rules=rules)
    return map_columns(_stack_column, columns)


def _stack_column(leaves: list) -> Any:
    if _leaves.is_member_array(leaves[0]):
        return jnp.stack([jnp.asarray(leaf) for leaf in leaves])
    # Compared by `repr`, as in the check: NaN equals NaN, and 0.0 differs from -0.0.
    if type(leaves[0]) is float and len({repr(leaf) for leaf in leaves}) > 1:
        return jnp.asarray(leaves)
    return leaves[0]


def concatenate(trees: Iterable[T]) -> T:
    """Concatenates stacked trees along their `members` axis.

    Everything but arrays must be equal and is kept once, as in [`eqx_ensemble.tree.stack`][].

    **Arguments:**

    - `trees`: one or more stacked PyTrees of the same kind of member, with arrays `(members_0, ...)`,
        `(members_1, ...)`.

    **Returns:** a stacked PyTree with arrays `(members_0 + members_1 + ..., ...)`.

    **Raises:** `MemberMismatchError` if the trees differ in anything but their arrays' values and number of members, or
    if the arrays of one tree disagree on that number; `TypeError` for a single tree; `ValueError` for an empty
    sequence.

    ```python
    ee.tree.concatenate([{"w": jnp.zeros((2, 3))}, {"w": jnp.ones((1, 3))}])["w"].shape  # (3, 3)
    ```
    """
    listed = check_trees(trees)
    for tree in listed:
        check_leading_axes(tree)
    columns = compare_trees(listed, rules=CONCATENATE_RULES)
    return map_columns(_concatenate_column, columns)


def _concatenate_column(leaves: list) -> Any:
    if _leaves.is_member_array(leaves[0]):
        return jnp.concatenate([jnp.asarray(leaf) for leaf in leaves])
    return leaves[0]
