from collections.abc import Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ... import _axes
from ..._axes._check_rows import check_rows_of_data
from ..._foreign import as_numpy, from_foreign_tree
from ..._pytree import PyTree
from ...sharding._layout import Layout
from ...sharding._shard import replicate_rows, shard_rows
from ._check import check_row_indices
from ._reader import RowReader


def is_batches(data: Any) -> bool:
    """Whether `data` is an iterable of batches rather than a PyTree of arrays.

    A list of arrays is a PyTree; a list of anything else, such as `(x, y)` tuples, is a list of batches.
    """
    if isinstance(data, list):
        return bool(data) and not all(_axes.is_array(x) or isinstance(x, _axes.Each) for x in data)
    is_tree = _axes.is_array(data) or isinstance(data, tuple | dict | eqx.Module)
    return isinstance(data, Iterable) and not is_tree


def in_memory(data: Any) -> bool:
    """Whether `data` is a PyTree of arrays: neither an iterable of batches nor a `RowReader`."""
    return not is_batches(data) and not isinstance(data, RowReader)


def on_device(
    data: PyTree, num_members: int, *, argument: str, name: str, layout: Layout | None = None, whole: bool = False
) -> tuple[PyTree, int]:
    """A data set on the device, checked, and its number of rows.

    Arrays are `(rows, ...)`; those marked `Each` are `(members, rows, ...)`. On a mesh, rows are sharded if they divide
    evenly; they are replicated if `whole`.
    """
    data = from_foreign_tree(data, argument, name=name)
    rows = check_rows_of_data(data, num_members, argument=argument, name=name, finite=False)
    data = _axes.map_each(_axes.Each, data)
    if layout is None:
        return jax.tree.map(jnp.asarray, data), rows
    return replicate_rows(data, layout) if whole else shard_rows(data, layout), rows


def without_marks(data: PyTree) -> PyTree:
    """The data without `Each`, in the structure that a member's loss receives."""
    return _axes.map_each(lambda value: value, data)


def as_row_indices(rows: Any, num_members: int, num_rows: int, *, name: str) -> np.ndarray | None:
    """The members' own rows `(members, n)` of the data, as int32 on the host."""
    if rows is None:
        return None
    rows = as_numpy(_axes.map_each(lambda value: value, rows), "rows", name=name)
    check_row_indices(rows, num_members, num_rows, name=name)
    return rows.astype(np.int32)


def member_shapes(data: PyTree, *, rows: int | None = None) -> PyTree:
    """The shapes of the data on the device as one member sees them, or of a batch of `rows` of their rows."""
    shape = lambda x, own: x.shape[own:] if rows is None else (rows, *x.shape[own + 1 :])
    of_one = lambda x, own: jax.ShapeDtypeStruct(shape(x, own), x.dtype) if eqx.is_array(x) else x
    of = lambda tree, own: jax.tree.map(lambda x: of_one(x, own), tree)
    return _axes.map_each(lambda value: of(value, 1), data, shared=lambda x: of(x, 0))
