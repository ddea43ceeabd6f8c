from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ... import _axes, tree
from ..._axes import Each
from ..._axes._check_rows import check_no_batch, check_rows_of_data
from ..._check import check_mask
from ..._foreign import from_foreign_tree
from ..._predict._rows import take_rows
from ..._pytree import PyTree
from ._check_data import check_pair, check_row_weights


class Data(NamedTuple):
    """Inputs, targets and weights of rows: shared `(rows, ...)`, or in an `Each` `(members, rows, ...)`."""

    x: PyTree
    y: Any
    weights: Any

    def batch(self, start: int, size: int, num_rows: int) -> "Data":
        """`size` rows from `start`; padded by repeating the last row with weight zero."""
        rows = np.arange(start, start + size)
        beyond = rows >= num_rows
        some = _map_rows(lambda x, axis: take_rows(x, np.minimum(rows, num_rows - 1), axis=axis), self)
        zero = lambda x, _: jnp.where(beyond, jnp.zeros((), x.dtype), x)
        return some._replace(weights=_map_rows(zero, some.weights)) if beyond.any() else some


def prepare(data: Any, num_members: int, row_weights: Any, mask: Any, *, name: str) -> tuple[Data, int]:
    """Checks the data. Returns them with zeros in masked rows, and the number of rows."""
    x, y = check_pair(data, name=name)
    x, y = from_foreign_tree(x, "data[0]", name=name), from_foreign_tree(y, "data[1]", name=name)
    check_no_batch((x, y))
    num_rows = check_rows_of_data((x, y), num_members, argument="data", name=name, finite=False)
    kept = check_mask(name, mask, (num_rows,))
    if kept is not None:
        blank = lambda x, axis: jnp.where(_along(kept, x, axis), x, jnp.zeros((), x.dtype))
        x, y = _map_rows(lambda x, axis: blank(jnp.asarray(x), axis), (x, y))
    check_rows_of_data((x, y), num_members, argument="data", name=name)
    weights = check_row_weights(row_weights, kept, num_rows, num_members, name=name)
    return Data(x, y, weights), num_rows


def take_members(value: Any, kept: np.ndarray) -> Any:
    """Takes some members of all parts marked `Each`."""
    return _axes.map_each(lambda own: Each(tree.take(own, kept)), value)


def _map_rows(fn: Any, value: PyTree) -> Any:
    """Maps `fn(array, axis)` over all arrays, with the axis of their rows."""
    own = lambda inner: Each(jax.tree.map(lambda x: fn(x, 1), inner))
    return _axes.map_each(own, value, shared=lambda x: fn(x, 0))


def _along(mask: jax.Array, x: Any, axis: int) -> jax.Array:
    return mask.reshape((1,) * axis + mask.shape + (1,) * (x.ndim - axis - 1))
