"""Rows in blocks that a cache holds: on a CPU, XLA's sums over a leading axis read memory across its lines."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .. import _check

_BYTES = 2**20  # of predictions in a block


def pays(predictions: PyTree) -> bool:
    """Whether these are concrete arrays of one CPU device: a compiler elsewhere has its own way."""
    leaves = jax.tree.leaves(predictions)
    here = not any(_check.is_traced(x) or len(x.devices()) > 1 for x in leaves)
    return bool(leaves) and here and all(device.platform == "cpu" for x in leaves for device in x.devices())


def by_blocks(name: Callable[[PyTree], PyTree], predictions: PyTree, *, event_ndim: int) -> PyTree:
    """`fn(predictions)` of arrays `(members, rows, ...)`, where it treats rows apart and gives arrays `(rows, ...)`.

    The last `event_ndim` axes belong to one row, such as the classes of logits: without an axis before them there is
    one row, which is never cut.
    """
    leaves = jax.tree.leaves(predictions)
    if not leaves or any(x.ndim < 2 + event_ndim or x.shape[1] != leaves[0].shape[1] for x in leaves):
        return name(predictions)
    rows, bytes_of_all = leaves[0].shape[1], sum(x.size * x.dtype.itemsize for x in leaves)
    size = max(_BYTES * rows // max(bytes_of_all, 1), 1)
    out = jax.tree.leaves(jax.eval_shape(name, predictions))
    if rows < 2 * size or any(x.shape[:1] != (rows,) for x in out):
        return name(predictions)
    count = rows // size
    block = lambda start, size: jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, 1), predictions)
    blocks = jax.lax.map(lambda i: name(block(i * size, size)), jnp.arange(count))
    whole = jax.tree.map(lambda x: x.reshape(count * size, *x.shape[2:]), blocks)
    if count * size == rows:
        return whole
    rest = name(block(count * size, rows - count * size))
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y]), whole, rest)
