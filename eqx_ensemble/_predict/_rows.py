"""Selects rows of arrays: on a CPU by NumPy, because JAX compiles its indexing anew for every number of rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _check


def size_of_few(num_rows: int, batch_size: int) -> int:
    """The number of rows of the program for less than a batch: a power of two, so that few programs are compiled."""
    return min(batch_size, 1 << (num_rows - 1).bit_length())


def take_rows(x: Any, rows: np.ndarray, *, axis: int) -> Any:
    """The rows of an array along an axis."""
    index = (slice(None),) * axis + (rows,)
    return _on_host(x, index) if _is_on_host(x) else x[index]


def first_rows(x: Any, count: int, *, axis: int) -> Any:
    """The first `count` rows of an array along an axis."""
    if isinstance(x, jax.Array) and x.shape[axis] == count:
        return x
    index = (slice(None),) * axis + (slice(0, count),)
    return _on_host(x, index) if _is_on_host(x) else x[index]


def weights_of(weights: Any, rows: np.ndarray) -> Any:
    """The weights for some rows; weights `(members,)` are the same for all."""
    return weights if weights is None or weights.ndim == 1 else weights[:, rows]


def row_of_zeros(x: Any, *, axis: int) -> jax.Array:
    """A row of zeros, of the shape and dtype of one row."""
    shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    if _check.is_typed_key(x):
        return jnp.broadcast_to(jax.random.key(0, impl=jax.random.key_impl(x)), shape)
    return jnp.zeros_like(x, shape=shape)  # keeps a weak type


def _is_on_host(x: Any) -> bool:
    """Whether NumPy can read an array without a copy; a weak type would be lost."""
    if not isinstance(x, jax.Array) or _check.is_traced(x) or _check.is_typed_key(x) or x.aval.weak_type:
        return False
    return x.is_fully_addressable and len(x.devices()) == 1 and all(d.platform == "cpu" for d in x.devices())


def _on_host(x: jax.Array, index: tuple) -> jax.Array:
    # A copy, so that the whole array can be freed.
    some = np.ascontiguousarray(np.asarray(x)[index])
    return jax.device_put(some, x.sharding if x.committed else None)
