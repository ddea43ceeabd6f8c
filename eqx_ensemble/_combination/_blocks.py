"""Rows in blocks that fit a cache: on a CPU, XLA's sums over a leading axis jump between cache lines."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .. import _check

_BYTES = 2**20  # of predictions in a block


def pays(predictions: PyTree) -> bool:
    """Whether these are concrete arrays on one CPU device: compilers for other devices do not need blocks."""
    leaves = jax.tree.leaves(predictions)
    here = not any(_check.is_traced(x) or len(x.devices()) > 1 for x in leaves)
    return bool(leaves) and here and all(device.platform == "cpu" for x in leaves for device in x.devices())


def by_blocks(fn: Callable[[PyTree], PyTree], predictions: PyTree, *, event_ndim: int) -> PyTree:
    """`fn(predictions)` of arrays `(members, rows, ...)`, if it treats rows independently and returns `(rows, ...)`.

    The last `event_ndim` axes belong to one row, such as the classes of logits: without an axis before them there is
    one row.
    """
    leaves = jax.tree.leaves(predictions)
    if not leaves or any(x.ndim < 2 + event_ndim or x.shape[1] != leaves[0].shape[1] for x in leaves):
        return fn(predictions)
    rows, bytes_of_all = leaves[0].shape[1], sum(x.size * x.dtype.itemsize for x in leaves)
    size = max(_BYTES * rows // max(bytes_of_all, 1), 1)
    out = jax.tree.leaves(jax.eval_shape(fn, predictions))
    if rows < 2 * size or any(x.shape[:1] != (rows,) for x in out):
        return fn(predictions)
    count = rows // size
    block = lambda start, size: jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, 1), predictions)
    blocks = jax.lax.map(lambda i: fn(block(i * size, size)), jnp.arange(count))
    whole = jax.tree.map(lambda x: x.reshape(count * size, *x.shape[2:]), blocks)
    if count * size == rows:
        return whole
    rest = fn(block(count * size, rows - count * size))
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y]), whole, rest)
