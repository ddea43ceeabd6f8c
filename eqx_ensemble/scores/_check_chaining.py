from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from .._check import check_array, check_function, concrete, first_text, kept_rows, needs_message


def check_chaining(
    name: str, chaining: Callable[[Array], Array] | None, lower: ArrayLike | None, upper: ArrayLike | None
) -> None:
    """Raises unless either thresholds or a chaining function are given."""
    given = lower is not None or upper is not None
    if chaining is not None:
        check_function(chaining, "chaining", name=name, example="lambda z: jax.nn.softplus(z - 3)")
    if given == (chaining is not None):
        got = "got both" if given else "got neither"
        fix = "`lower=`, `upper=` or both restrict the score to a range. For all values use `scores.crps`."
        raise ValueError(needs_message(name, "thresholds or `chaining`", got, fix))


def check_thresholds(
    name: str, lower: ArrayLike | None, upper: ArrayLike | None, targets: Array, known: ArrayLike | None
) -> tuple[Array, Array]:
    """Raises for invalid thresholds. Returns both, each a scalar or one per row, infinite if not given."""
    found = []
    for argument, value, missing in (("lower", lower, -np.inf), ("upper", upper, np.inf)):
        array = check_array(name, argument, missing if value is None else value)
        if not (jnp.issubdtype(array.dtype, jnp.integer) or jnp.issubdtype(array.dtype, jnp.floating)):
            got = f"got dtype {array.dtype}, shape {array.shape}"
            raise TypeError(needs_message(name, f"real numbers as `{argument}`", got, "In the unit of the targets."))
        if array.shape not in ((), targets.shape):
            got = f"expected () or {targets.shape}, got {array.shape}"
            fix = "Nothing is broadcast. One score per threshold? Use `jax.vmap`."
            raise ValueError(needs_message(name, f"`{argument}` as one number, or one per row", got, fix))
        host, kept = concrete(missing if value is None else value), kept_rows(known)
        if host is not None and kept is not None and (wrong := np.isnan(host) & (kept if host.ndim else True)).any():
            fix = "Leave out the threshold that does not bound anything."
            raise ValueError(needs_message(name, f"`{argument}` without NaN", first_text(host, wrong), fix))
        found.append((array.astype(targets.dtype), host, kept))
    (low, low_host, kept), (high, high_host, _) = found
    if low_host is not None and high_host is not None and kept is not None:
        wrong = (low_host > high_host) & (kept if max(low_host.ndim, high_host.ndim) else True)
        if np.any(wrong):
            got = f"got `lower` {low_host[wrong].flat[0]}" if low_host.ndim else f"got `lower` {low_host}"
            raise ValueError(needs_message(name, "`lower` at or below `upper`", got, "Swapped? `lower` comes first."))
    return low, high


def check_chained(name: str, chaining: Callable[[Array], Array], values: Array) -> Array:
    """Calls a chaining function; raises unless it returns floating-point values of the same shape."""
    chained = chaining(values)
    shape, dtype = getattr(chained, "shape", None), getattr(chained, "dtype", None)
    if shape != values.shape or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        got = f"got shape {shape}, dtype {dtype}, of shape {values.shape}"
        fix = "It is applied to each value: `lambda z: jnp.maximum(z, 3.0)`."
        raise ValueError(needs_message(name, "`chaining` that returns a number for each value", got, fix))
    return chained.astype(values.dtype)
