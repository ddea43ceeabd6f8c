import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from .._check import check_array, concrete, kind_text, needs_message
from .._warnings import warn


def check_outcome(name: str, covered: ArrayLike) -> Array:
    """Raises unless `covered` is a scalar from 0 to 1. Returns it as an array."""
    array = check_array(name, "covered", covered)
    if array.shape != () or jnp.issubdtype(array.dtype, jnp.complexfloating):
        fix = "Several targets at one step? Pass the mean of their outcomes. Several series? `jax.vmap` over states."
        raise ValueError(needs_message(name, "one outcome as `covered`", f"got {kind_text(array)}", fix))
    host = concrete(covered)
    if host is not None and not 0 <= host <= 1:
        fix = "Pass whether the target was in its set: `(lower <= target) & (target <= upper)`."
        raise ValueError(needs_message(name, "`covered` from 0 to 1", f"got {host}", fix))
    return array


def check_times(name: str, predictions: Array, targets: Array) -> None:
    """Raises unless predictions are `(members,)` or `(members, times)`."""
    if targets.ndim > 1:
        fix = "The window of residuals belongs to one series: one state for each, with `jax.vmap`."
        raise ValueError(
            needs_message(name, "`predictions` (members,) or (members, times)", f"got shape {predictions.shape}", fix)
        )


def check_known(name: str, mask: ArrayLike | None, times: tuple[int, ...]) -> Array:
    """Raises unless `mask` has one boolean per time; all may be `False`. Returns it as an array."""
    if mask is None:
        return jnp.ones(times, bool)
    array = check_array(name, "mask", mask)
    if array.dtype != bool or array.shape != times:
        got = f"expected booleans {times}, got {array.dtype} {array.shape}"
        raise ValueError(needs_message(name, "one boolean of `mask` for each time", got, "True keeps a target."))
    return array


def check_residuals(name: str, residuals: Array) -> None:
    """Raises for NaN; checked where concrete."""
    host = concrete(residuals)
    if host is not None and np.isnan(host).any():
        got = f"got {int(np.isnan(host).sum())} residuals that are NaN"
        fix = "No target at that time? Pass `mask=False`. Did members diverge? Give them a weight of zero."
        raise ValueError(needs_message(name, "predictions and targets without NaN", got, fix))


def warn_of_no_residual(name: str, known: Array, reason: str, fix: str) -> None:
    """Warns if no residual of the window is known; checked where concrete."""
    host = concrete(known)
    if host is not None and not np.any(host):
        warn(f"`{name}`: {reason}; every interval is unbounded. {fix}")
