import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._check import is_key, is_member_array, is_traced
from .._foreign import from_foreign
from .._leaf_text import leaf_text


def check_tree_weights(weights: Any, count: int, *, name: str, mean: bool = False) -> list | jax.Array:
    """Raises unless there is one finite real weight per tree, checked on the host.

    **Returns:** a list of Python ints and floats; a traced vector unchanged and unchecked.
    """
    values = _values(weights, name)
    if len(values) != count:
        raise ValueError(f"`{name}` needs one weight per tree; got {count} trees and {len(values)} weights.")
    if is_traced(values):
        return values
    for i, value in enumerate(values):
        if not isinstance(value, (int, float)):
            raise TypeError(f"`{name}` needs real weights; weight {i} is {value!r}.")
        if not math.isfinite(value):
            raise ValueError(f"`{name}` needs finite weights; weight {i} is {value}.")
    if mean and math.fsum(values) == 0:
        raise ValueError(f"`{name}` divides by the sum of the weights, which is 0: {values}.")
    return values


def _values(weights: Any, name: str) -> Any:
    weights = from_foreign(weights, "weights", name=name)
    if isinstance(weights, (list, tuple)):
        if any(is_traced(w) for w in weights):
            with jax.numpy_dtype_promotion("standard"):
                return jnp.stack([jnp.asarray(w) for w in weights])
        return [_number(w.tolist()) if is_member_array(w) else _number(w) for w in weights]
    if not is_member_array(weights) or weights.ndim == 0:
        kind = leaf_text(weights) if is_member_array(weights) else f"`{type(weights).__name__}`"
        raise TypeError(f"`{name}` needs a list or a one-dimensional array of weights, one per tree; got {kind}.")
    if weights.ndim > 1:
        raise ValueError(f"`{name}` needs one weight per tree, in a one-dimensional array; got {leaf_text(weights)}.")
    if is_traced(weights):
        return weights
    return [_number(value) for value in np.asarray(weights).tolist()]


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value


def check_summable(leaf: Any, path: str, *, name: str) -> None:
    """Raises for typed PRNG keys, which cannot be added."""
    if is_key(leaf):
        raise TypeError(
            f"`{name}` cannot add PRNG keys; `{path}` is {leaf_text(leaf)}.\n"
            "Take the keys out first (`equinox.partition`), or sum their trees without them."
        )


def check_weights_fit(weights: list, dtype: Any, path: str, *, name: str) -> None:
    """Raises for integer weights that overflow the integer type in which the leaf at `path` is summed."""
    if not jnp.issubdtype(dtype, jnp.integer):
        return
    limits = jnp.iinfo(dtype)
    wrong = [w for w in weights if not limits.min <= w <= limits.max]
    if wrong:
        raise ValueError(
            f"`{name}`: weight {wrong[0]} does not fit {jnp.dtype(dtype).name}, in which `{path}` is summed."
        )
