"""Sorts values over members or rows: with NumPy on a CPU, because XLA's sort compares scalar by scalar."""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, ArrayLike, Float, Int, Shaped

from .._check import as_column
from .._cores import num_cores, on_cores
from .._foreign import empty_aligned
from .._pytree import PyTree
from ._blocks import pays

_FEWEST_NUMBERS = 2**13  # below this size, XLA takes less than a millisecond
_BYTES = 63 * 2**14  # of values in a block; not a power of two, which would map members to the same cache lines


def by_order(
    fn: Callable[[Array, Array | None, PyTree], PyTree],
    values: Float[Array, "members ..."],
    weights: Float[Array, " members"] | None,
    shared: PyTree = None,
    *,
    centre: Float[Array, "..."] | None = None,
    fill: float = np.inf,
) -> PyTree:
    """Compiles and calls `fn(ordered, own, shared)` on values sorted over members, NaN last, and their weights.

    Without weights, `own` is `None`. Values of members of weight zero are set to `fill`; `centre`, of the shape of one
    member's values, is subtracted first. `fn` treats entries independently: its result is a tree of arrays
    `(..., *axes)`. The order of equal values is arbitrary.
    """
    sort = _by_numpy if _numpy_pays(values, (weights, shared, centre)) else _by_xla
    return sort(fn, values, weights, shared, centre, fill)


def sort_rows(key: Float[Array, " rows"], *rows: Shaped[Array, " rows"]) -> tuple[Shaped[Array, " rows"], ...]:
    """The sorted key, NaN last, and other arrays in its order; equal values stay in theirs."""
    order = np.argsort(np.asarray(key), kind="stable").astype(np.int32) if _numpy_pays(key, rows) else jnp.argsort(key)
    return _take(order, key, *rows)


@jax.jit
def _take(order: Int[ArrayLike, " rows"], *rows: Shaped[Array, " rows"]) -> tuple[Shaped[Array, " rows"], ...]:
    return tuple(row[order] for row in rows)


def _numpy_pays(values: Array, others: PyTree) -> bool:
    one_cpu = pays((values, others)) and isinstance(values.sharding, SingleDeviceSharding)
    return one_cpu and values.size >= _FEWEST_NUMBERS  # in this order: sizes of traced arrays may be symbols


@ft.partial(jax.jit, static_argnums=(0, 5))
def _by_xla(
    fn: Callable, values: Array, weights: Array | None, shared: PyTree, centre: Array | None, fill: float
) -> PyTree:
    entries = values if centre is None else values - centre[None]
    if weights is None:
        return fn(jnp.sort(entries, axis=0), None, shared)
    expanded = jnp.broadcast_to(as_column(weights, values.ndim), values.shape)
    ordered, own = jax.lax.sort((jnp.where(expanded == 0, fill, entries), expanded), dimension=0, num_keys=1)
    return fn(ordered, own, shared)


_of_order = jax.jit(lambda fn, ordered, own, shared: fn(ordered, own, shared), static_argnums=0)


def _by_numpy(
    fn: Callable, values: Array, weights: Array | None, shared: PyTree, centre: Array | None, fill: float
) -> PyTree:
    """Sorts blocks on all cores, each core one at a time, in one buffer that fits a cache."""
    columns = np.asarray(values).reshape(len(values), -1)
    middle = None if centre is None else np.asarray(centre).ravel()
    convex = None if weights is None else np.asarray(weights)
    device = values.sharding if values.committed else None
    size = min(columns.shape[1], max(_BYTES // columns[:, :1].nbytes, 1))
    # The last block repeats entries of the one before: all blocks have one shape.
    starts = [*range(0, columns.shape[1] - size, size), columns.shape[1] - size]

    def run(starts: list[int]) -> list[PyTree]:
        memory, parts = empty_aligned((len(columns), size), columns.dtype), []
        for start in starts:
            part = slice(start, start + size)
            ordered, own = _sort(memory, columns[:, part], convex, None if middle is None else middle[part], fill)
            found = _of_order(fn, *jax.device_put((ordered, own), device), shared)
            parts.append(jax.block_until_ready(found))  # the buffer can be reused
        return parts

    cores = num_cores()
    share = -(-len(starts) // cores)
    parts = sum(on_cores(run, [starts[i : i + share] for i in range(0, len(starts), share)], cores=cores), [])
    return jax.tree.map(lambda *blocks: _join(starts, blocks, values.shape[1:], device), *parts)


def _sort(
    memory: np.ndarray, columns: np.ndarray, weights: np.ndarray | None, centre: np.ndarray | None, fill: float
) -> tuple[np.ndarray, np.ndarray | None]:
    if centre is None:
        np.copyto(memory, columns)
    else:
        with np.errstate(invalid="ignore", over="ignore"):
            np.subtract(columns, centre, out=memory)
    if weights is None:
        memory.sort(axis=0)
        return memory, None
    memory[weights == 0] = fill
    order = np.argsort(memory, axis=0)
    return np.take_along_axis(memory, order, axis=0), weights[order]


def _join(starts: list[int], blocks: tuple[Array, ...], shape: tuple[int, ...], device: Any) -> Array:
    """Joins blocks at their start positions into one array on the device of the values."""
    size, *axes = blocks[0].shape
    found = empty_aligned((starts[-1] + size, *axes), blocks[0].dtype)
    for start, part in zip(starts, blocks, strict=True):
        found[start : start + size] = part
    return jax.device_put(found.reshape(*shape, *axes), device)
