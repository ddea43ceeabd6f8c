import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from .._check import (
    check_array,
    check_entries,
    check_floating,
    check_positive_scalar,
    check_row_weights,
    concrete,
    first_text,
    promote,
    value_error,
)


def check_temperature(temperature: ArrayLike, dtype: jnp.dtype) -> Array:
    """Raises unless the temperature is a positive scalar (where concrete). Returns it as an array."""
    fix = "Logits are divided by it; 1 leaves them unchanged."
    return check_positive_scalar("temperature", temperature, dtype, fix=fix)


def check_levels(levels: ArrayLike, dtype: jnp.dtype, *, ends: bool) -> tuple[Array, Array]:
    """Raises unless `levels` are valid; `ends` allows 0 and 1. Returns the levels and their distances to one."""
    array = check_array("levels", levels)
    if array.ndim > 1:
        raise value_error("`levels` as a number or `(levels,)`", f"got shape {array.shape}", "Write 90 % as 0.9.")
    host = concrete(levels)
    if host is None:
        return array.astype(dtype), 1 - array.astype(dtype)
    host = np.asarray(host, np.float64)
    inside = (0 <= host) & (host <= 1) if ends else (0 < host) & (host < 1)
    if not inside.all():
        words = "`levels` from 0 to 1" if ends else "`levels` between 0 and 1"
        raise value_error(words, first_text(host, ~inside), "Write 90 % as 0.9.")
    # The distance to one is computed in float64, because float32 rounds a level such as 1 - 1e-9 to one.
    return jnp.asarray(host, dtype), jnp.asarray(1 - host, dtype)


def check_rows_of_members(
    argument: str, values: ArrayLike, row_weights: ArrayLike | None, *, binary: bool = False
) -> tuple[Array, Array]:
    """Raises for invalid values; `binary` allows 0, 1 and NaN only. Returns `(members, rows)` and row weights."""
    array = check_array(argument, values)
    if binary and not jnp.issubdtype(array.dtype, jnp.inexact):  # booleans, and integers 0 and 1
        array = array.astype(jnp.float32)
    array = check_floating(argument, array)
    if array.ndim < 2 or array.shape[0] < 1:
        raise value_error(
            f"`{argument}` of shape (members, *batch)", f"got shape {array.shape}", "The members axis comes first."
        )
    (array,) = promote(array)
    rows = check_row_weights(row_weights, array.shape[1:], array.dtype)
    if binary and (host := concrete(values)) is not None:
        fix = "They are `scores.per_member(scores.accuracy, logits, labels, reduction='none')`."
        is_wrong = lambda exact: ~np.isin(exact, (0, 1)) & ~np.isnan(exact)
        check_entries(f"zeros and ones in `{argument}`", np.asarray(host, np.float64), is_wrong, fix, rows)
    own = jnp.ones(array.shape[1:], array.dtype) if rows.weights is None else rows.weights.astype(array.dtype)
    return jnp.reshape(rows.blank(array, before=1), (array.shape[0], -1)), jnp.ravel(own)
