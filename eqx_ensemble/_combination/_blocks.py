"""Processes rows in blocks that fit a cache: on a CPU, XLA's sums over a leading axis have poor locality."""

import functools as ft
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jaxtyping import Array, ArrayLike

from .. import _check
from .._pytree import PyTree

_BYTES = 63 * 2**12  # of predictions in a block; not a power of two, which would map members to the same cache lines


def pays(predictions: PyTree) -> bool:
    """Whether these are concrete arrays on one CPU device: other devices do not need blocks.

    Inside a JAX transformation nothing is computed in blocks, not even for constant arrays.
    """
    leaves = [x for x in jax.tree.leaves(predictions) if isinstance(x, jax.Array)]
    return bool(leaves) and not _check.is_inside_transformation() and all(_is_on_one_cpu(x) for x in leaves)


def _is_on_one_cpu(array: Array) -> bool:
    if _check.is_traced(array) or not array.is_fully_addressable:
        return False
    # The axes of arrays with explicit shardings cannot be merged.
    explicit = isinstance(array.sharding, NamedSharding) and AxisType.Explicit in array.sharding.mesh.axis_types
    return not explicit and [device.platform for device in array.devices()] == ["cpu"]


def pays_if_large(members: PyTree, others: PyTree = ()) -> bool:
    """`pays`, for arrays that are larger than a cache."""
    first = jax.tree.leaves(members)[0]
    # In this order: the sizes of traced arrays may be symbols of `jax.export`, which cannot be compared.
    return pays((members, others)) and first.size * first.dtype.itemsize > 2 * _BYTES


def by_rows(
    fn: Callable[[PyTree, PyTree, PyTree], PyTree],
    members: PyTree,
    rows: PyTree = (),
    shared: ArrayLike | None = None,
    *,
    event_ndim: int = 0,
) -> PyTree:
    """Compiles and calls `fn(members, rows, shared)`, which treats rows independently; in blocks where this is faster.

    `members` are arrays `(members, *batch, ...)`, of which the last `event_ndim` axes belong to one row; `rows` are
    arrays `(*batch,)`. The result is a tree of arrays `(*batch, ...)`. `shared` are weights `(members,)`, or weights
    per row with some leading axes of the batch.
    """
    in_blocks = pays_if_large(members, (rows, shared))
    return _by_rows(fn, members, rows, shared, event_ndim=event_ndim, in_blocks=in_blocks)


@ft.partial(jax.jit, static_argnames=("fn", "event_ndim", "in_blocks"))
def _by_rows(
    fn: Callable, members: PyTree, rows: PyTree, shared: Array | None, *, event_ndim: int, in_blocks: bool
) -> PyTree:
    if not in_blocks:
        return fn(members, rows, shared)
    first = jax.tree.leaves(members)[0]
    batch = first.shape[1 : first.ndim - event_ndim]
    if shared is None or shared.ndim < 2:
        return _in_flat_blocks(lambda members, rows: fn(members, rows, shared), members, rows, batch)
    own = jnp.broadcast_to(_check.as_column(shared, 1 + len(batch)), (shared.shape[0], *batch))
    return _in_flat_blocks(lambda pair, rows: fn(pair[0], rows, pair[1]), (members, own), rows, batch)


def _in_flat_blocks(
    fn: Callable[[PyTree, PyTree], PyTree], members: PyTree, rows: PyTree, batch: tuple[int, ...]
) -> PyTree:
    """Merges the batch axes into one, to fill the vector registers, and computes in blocks."""
    flat = jax.tree.map(lambda x: x.reshape(x.shape[0], -1, *x.shape[1 + len(batch) :]), members)
    out = _in_blocks(fn, flat, jax.tree.map(jnp.ravel, rows))
    return jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), out)


def _in_blocks(fn: Callable[[PyTree, PyTree], PyTree], members: PyTree, rows: PyTree) -> PyTree:
    """`fn(members, rows)` for arrays `(members, rows, ...)` and `(rows,)`, one block at a time."""
    leaves = jax.tree.leaves(members)
    num_rows, bytes_of_all = leaves[0].shape[1], sum(x.size * x.dtype.itemsize for x in leaves)
    size = max(_BYTES * num_rows // max(bytes_of_all, 1), 1)
    out = jax.tree.leaves(jax.eval_shape(fn, members, rows))
    if num_rows < 2 * size or any(x.shape[:1] != (num_rows,) for x in out):
        return fn(members, rows)
    cut = lambda tree, axis, start, size: jax.tree.map(
        lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, axis), tree
    )
    block = lambda start: fn(cut(members, 1, start, size), cut(rows, 0, start, size))
    # The last block repeats rows of the one before: all blocks have one shape and are compiled once.
    count = -(-num_rows // size)
    blocks = jax.lax.map(lambda i: block(jnp.minimum(i * size, num_rows - size)), jnp.arange(count))
    return jax.tree.map(lambda x: _join(x, num_rows), blocks)


def _join(blocks: Array, num_rows: int) -> Array:
    """Joins blocks `(count, size, ...)`; the last one ends with the last row."""
    count, size, *axes = blocks.shape
    whole = blocks.reshape(count * size, *axes)
    if count * size == num_rows:
        return whole
    missing = num_rows - (count - 1) * size
    return jnp.concatenate([whole[: (count - 1) * size], blocks[-1, size - missing :]])
