"""Leaves of trees: arrays with a `members` axis, keys, tracers, and how messages show them."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

try:
    from jax.extend.core import get_opaque_trace_state
except ImportError:  # before 0.10
    from jax.core import get_opaque_trace_state  # pyright: ignore


def _state_outside() -> Any:
    """JAX's trace state outside of all transformations, from a new thread: this one may be inside one."""
    states: list[Any] = []
    thread = threading.Thread(target=lambda: states.append(get_opaque_trace_state()))
    thread.start()
    thread.join()
    return states[0]


_OUTSIDE = _state_outside()


def is_member_array(leaf: Any) -> bool:
    """Whether `leaf` can carry a `members` axis: a JAX array, or a NumPy array of a dtype that JAX supports."""
    if isinstance(leaf, jax.Array):
        return True
    if not isinstance(leaf, np.ndarray | np.generic):
        return False
    # NumPy arrays of strings, dates and objects have no JAX counterpart: they count as static data.
    return bool(jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == np.bool_)


def is_inside_transformation() -> bool:
    """Whether this runs inside `jax.jit`, `jax.vmap`, `jax.grad` or the like."""
    return get_opaque_trace_state() != _OUTSIDE


def is_traced(value: Any) -> bool:
    """Whether `value` is a tracer, so that only its shape and dtype are known."""
    return isinstance(value, Tracer)


def is_key(leaf: Any) -> bool:
    """Whether `leaf` is an array of typed PRNG keys."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def is_number(leaf: Any) -> bool:
    """Whether `leaf` is a Python number; a bool is a flag."""
    return isinstance(leaf, (int, float, complex)) and not isinstance(leaf, bool)


def member_dtype(leaf: Any) -> Any:
    """The dtype of the array `leaf` as a JAX array (64-bit NumPy data may become 32-bit)."""
    return leaf.dtype if isinstance(leaf, jax.Array) else jax.dtypes.canonicalize_dtype(leaf.dtype)


def array_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The array leaves of a tree with their paths as text."""
    return [(path_text(path), x) for path, x in jax.tree_util.tree_flatten_with_path(tree)[0] if is_member_array(x)]


def as_column(per_member: Any, ndim: int) -> Any:
    """An array `(members, ...)`, of NumPy or JAX, as `(members, ..., 1, ...)` with `ndim` axes."""
    return per_member.reshape(per_member.shape + (1,) * (ndim - per_member.ndim))


def promote(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Casts all arrays to the dtype of the computation: float64 if any of them is float64, else float32."""
    dtype = jnp.float64 if any(array.dtype == jnp.float64 for array in arrays) else jnp.float32
    return tuple(array.astype(dtype) for array in arrays)


@contextlib.contextmanager
def standard_promotion() -> Iterator[None]:
    """Enables the promotion of dtypes and ranks that optax needs; a user may have made it strict."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def path_text(path: tuple) -> str:
    """`keystr`, or `<root>` if that is empty."""
    return jax.tree_util.keystr(path) or "<root>"


def kind_text(value: Any) -> str:
    """The type of a wrong value as text: `a list`, `an int`, `None`."""
    if value is None:
        return "`None`"
    word = type(value).__name__
    return f"{'an' if word[0] in 'AEIOUaeio' else 'a'} {word}"
