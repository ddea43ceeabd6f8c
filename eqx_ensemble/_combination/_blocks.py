"""Rows in blocks that fit a cache: on a CPU, XLA's sums over a leading axis jump between cache lines."""

import functools as ft
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .. import _check

_BYTES = 2**18  # of predictions in a block


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
    return _in_blocks(lambda predictions, _: fn(predictions), predictions, ())


def by_rows(
    fn: Callable[[PyTree, PyTree, PyTree], PyTree],
    members: PyTree,
    rows: PyTree = (),
    shared: PyTree = None,
    *,
    event_ndim: int = 0,
) -> PyTree:
    """`fn(members, rows, shared)`, compiled, of functions that treat rows independently; in blocks where this pays.

    `members` are arrays `(members, *batch, ...)`, of which the last `event_ndim` axes belong to one row; `rows` are
    arrays `(*batch,)`. The result is a tree of arrays `(*batch, ...)`.
    """
    first = jax.tree.leaves(members)[0]
    large = first.size * first.dtype.itemsize > 2 * _BYTES
    return _by_rows(fn, members, rows, shared, event_ndim=event_ndim, in_blocks=large and pays((members, rows)))


@ft.partial(jax.jit, static_argnames=("fn", "event_ndim", "in_blocks"))
def _by_rows(
    fn: Callable, members: PyTree, rows: PyTree, shared: PyTree, *, event_ndim: int, in_blocks: bool
) -> PyTree:
    if not in_blocks:
        return fn(members, rows, shared)
    first = jax.tree.leaves(members)[0]
    batch = first.shape[1 : first.ndim - event_ndim]
    flat = jax.tree.map(lambda x: x.reshape(x.shape[0], -1, *x.shape[1 + len(batch) :]), members)
    out = _in_blocks(lambda m, r: fn(m, r, shared), flat, jax.tree.map(jnp.ravel, rows))
    return jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), out)


def _in_blocks(fn: Callable[[PyTree, PyTree], PyTree], members: PyTree, rows: PyTree) -> PyTree:
    """`fn(members, rows)` of arrays `(members, rows, ...)` and `(rows,)`, block after block."""
    leaves = jax.tree.leaves(members)
    num_rows, bytes_of_all = leaves[0].shape[1], sum(x.size * x.dtype.itemsize for x in leaves)
    size = max(_BYTES * num_rows // max(bytes_of_all, 1), 1)
    out = jax.tree.leaves(jax.eval_shape(fn, members, rows))
    if num_rows < 2 * size or any(x.shape[:1] != (num_rows,) for x in out):
        return fn(members, rows)
    cut = lambda tree, axis, start, size: jax.tree.map(
        lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, axis), tree
    )
    block = lambda start, size: fn(cut(members, 1, start, size), cut(rows, 0, start, size))
    count, rest = divmod(num_rows, size)
    blocks = jax.lax.map(lambda i: block(i * size, size), jnp.arange(count))
    whole = jax.tree.map(lambda x: x.reshape(count * size, *x.shape[2:]), blocks)
    if not rest:
        return whole
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y]), whole, block(count * size, rest))
