import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _check


def _step(total, weight, leaf, dtype):
    leaf = leaf.astype(dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        # Real and imaginary part apart: multiplying by `weight + 0j` would turn an infinite part into NaN.
        term = jax.lax.complex(weight * leaf.real, weight * leaf.imag)
    else:
        term = weight * leaf
    return total + term


# One small program per leaf shape, whatever the number of trees.
_add = jax.jit(_step, static_argnums=3)


def add_up(leaves: list, weights: Any, dtype: Any) -> jax.Array:
    """The weighted sum of arrays of one shape (or of Python numbers), computed in `dtype`."""
    total = np.zeros(np.shape(leaves[0]), dtype)
    for i, leaf in enumerate(leaves):
        weight = weights[i]
        # NumPy rounds a Python number once, to the right type.
        listed = isinstance(weights, list)
        weight = np.asarray(weight, _real(dtype)) if listed else weight.astype(_real(dtype))
        leaf = leaf if _check.is_member_array(leaf) else np.asarray(leaf, dtype)
        total = _add(total, weight, leaf, dtype)
    return jnp.asarray(total)


def normalise(weights: Any, dtype: Any) -> Any:
    """Weights that sum to 1: Python floats, or if traced an array of the real type of `dtype`."""
    if isinstance(weights, list):
        total = math.fsum(weights)
        return [weight / total for weight in weights]
    weights = weights.astype(_real(dtype))
    return weights / jnp.sum(weights)


def sum_dtype(leaf: Any, weights: Any) -> Any:
    """The type in which arrays like `leaf` are summed: at least 32 bits wide."""
    dtype = _check.member_dtype(leaf)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.dtype(jnp.float32) if jnp.finfo(dtype).bits < 32 else dtype
    if not _all_integer(weights):
        return _default(float)
    if dtype == np.bool_ or jnp.iinfo(dtype).bits < 32:
        return jnp.dtype(jnp.int32)
    if jnp.issubdtype(dtype, jnp.signedinteger):
        return dtype
    positive = isinstance(weights, list) and min(weights) >= 0
    return dtype if positive else _default(int)


def result_dtype(leaf: Any, weights: Any) -> Any:
    """The type of the sum of arrays like `leaf`: their own for floats."""
    dtype = _check.member_dtype(leaf)
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else sum_dtype(leaf, weights)


def number_dtype(leaves: list, weights: Any) -> Any:
    """The type of a sum of Python numbers with traced weights."""
    if any(isinstance(leaf, complex) for leaf in leaves):
        return _default(complex)
    whole = all(isinstance(leaf, int) for leaf in leaves) and _all_integer(weights)
    return _default(int if whole else float)


def _all_integer(weights: Any) -> bool:
    if isinstance(weights, list):
        return all(isinstance(weight, int) for weight in weights)
    return bool(jnp.issubdtype(weights.dtype, jnp.integer) or weights.dtype == np.bool_)


def _default(kind: type) -> Any:
    return jax.dtypes.canonicalize_dtype(np.dtype(kind))


def _real(dtype: Any) -> Any:
    return jnp.finfo(dtype).dtype if jnp.issubdtype(dtype, jnp.complexfloating) else dtype
