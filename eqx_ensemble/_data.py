"""What users pass as data: arrays with one row per example, or an iterable of batches."""

from collections.abc import Iterable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ._caller import caller
from ._check import MemberMismatchError, check_in_range
from ._foreign import from_foreign_tree, is_foreign, own_array
from ._leaves import kind_text
from ._marks import Each
from ._pytree import PyTree

_is_each = lambda x: isinstance(x, Each)


def is_batches(data: Any) -> bool:
    """Whether data is an iterable of batches: a list of anything but arrays, and any other iterable but a PyTree."""
    if isinstance(data, list):
        return bool(data) and not all(eqx.is_array(x) or isinstance(x, Each) for x in data)
    is_tree = eqx.is_array(data) or is_foreign(data) or isinstance(data, tuple | dict | eqx.Module)
    return isinstance(data, Iterable) and not is_tree


def take_data(data: PyTree, num_members: int, *, argument: str, least: int = 1) -> tuple[PyTree, int]:
    """Data as JAX arrays, copied in, and its number of rows.

    **Raises:** `TypeError` for what is no array of numbers; `ValueError` for arrays of different lengths;
    `MemberMismatchError` for an `Each` of other members.
    """
    if isinstance(data, jax.Array) and data.ndim and data.shape[0] >= least:  # nothing to look at
        return data, data.shape[0]
    data = from_foreign_tree(data, argument)
    sizes: dict[int, str] = {}
    for path, node in jax.tree_util.tree_flatten_with_path(data, is_leaf=_is_each)[0]:
        axis = int(_is_each(node))
        for inner, x in jax.tree_util.tree_flatten_with_path(node.value if axis else node)[0]:
            where = argument + jax.tree_util.keystr(path + inner)
            if not isinstance(x, jax.Array | np.ndarray) or (isinstance(x, np.ndarray) and x.dtype.kind in "OUSMm"):
                got = f"dtype {x.dtype}" if isinstance(x, np.ndarray) else kind_text(x)
                raise TypeError(f"`{caller()}` needs arrays of numbers as `{argument}`; at `{where}`: {got}.")
            check_in_range(x, path=where)
            if x.ndim <= axis or (axis and x.shape[0] != num_members):
                wanted = f"({num_members}, rows, ...)" if axis else "(rows, ...)"
                raise MemberMismatchError(f"`{caller()}` needs {wanted} at `{where}`, got {x.shape}.")
            sizes.setdefault(x.shape[axis], f"`{where}`: {x.shape}")
    if len(sizes) != 1 or min(sizes) < least:
        found = ", ".join(sizes.values()) or kind_text(data)
        hint = ""
        if num_members in sizes:
            hint = f"\nMark data with one part for each of {num_members} members, `(members, rows, ...)`, as `Each`."
        if not sizes and argument == "data":
            hint = "\nA loss without data is `fit(..., None, ...)`."
        raise ValueError(f"`{caller()}` needs arrays with one row per example in `{argument}`, got {found}.{hint}")
    return jax.tree.map(lambda x: jnp.asarray(own_array(x)), data), next(iter(sizes))


def member_shapes(tree: PyTree, batch_size: int | None = None) -> PyTree:
    """The shapes of what one member sees of data, or of a batch of it."""

    def one(x: Any, axis: int) -> Any:
        if not eqx.is_array(x):
            return x
        shape = x.shape[axis:] if batch_size is None else (batch_size, *x.shape[axis + 1 :])
        return jax.ShapeDtypeStruct(shape, x.dtype)

    own = lambda x: jax.tree.map(lambda leaf: one(leaf, int(_is_each(x))), x.value if _is_each(x) else x)
    return jax.tree.map(own, tree, is_leaf=_is_each)


def take_rows(rows: Any, num_members: int, num_rows: int) -> Each | None:
    """The members' own rows `(members, n)`; raises for other shapes and for rows that do not exist."""
    if rows is None:
        return None
    rows = np.asarray(rows.value if _is_each(rows) else rows)
    if rows.dtype.kind not in "iu" or rows.ndim != 2 or rows.shape[0] != num_members:
        raise MemberMismatchError(
            f"`{caller()}` needs `rows` to be indices ({num_members}, n), got {rows.dtype} of shape {rows.shape}."
        )
    if rows.size == 0 or rows.min() < 0 or rows.max() >= num_rows:
        raise IndexError(
            f"`{caller()}` needs `rows` in [0, {num_rows}), the rows of the data; got {rows.min()} to {rows.max()}."
        )
    return Each(jnp.asarray(rows, jnp.int32))


def batches_of(data: Iterable[Any], num_members: int) -> Iterator[PyTree]:
    """The batches of an iterable, each copied in: loaders may refill their arrays."""
    for batch in data:
        yield take_data(batch, num_members, argument="batch")[0]
