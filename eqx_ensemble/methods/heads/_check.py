from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ..._check import (
    ALL_ROWS,
    CountedRows,
    check_array,
    check_entries,
    check_floating,
    check_nonnegative,
    check_scalar,
    concrete,
    first_text,
    kind_text,
    promote,
    type_error,
    value_error,
)


def check_raw(raw: ArrayLike, *, multiple: int, exact: bool, parameters: str) -> Array:
    """Raises unless the last axis of `raw` is `multiple` or, unless `exact`, a multiple of it. Returns the array."""
    array = check_floating("raw", raw)
    size = array.shape[-1] if array.ndim else 0
    if size == 0 or size % multiple or (exact and size != multiple):
        wanted = f"`raw` of shape (*batch, {multiple if exact else f'{multiple} * components'})"
        fix = f"The last axis holds {parameters}: choose the `out_size` of the last layer accordingly."
        raise value_error(wanted, f"got shape {array.shape}", fix)
    return promote(array)[0]


def check_parameters(parameters: Any, kind: type, make: str) -> None:
    """Raises unless `parameters` is a named tuple of this type; a plain tuple may have another order."""
    if not isinstance(parameters, kind):
        fix = f"It is what `methods.heads.{make}` returns."
        raise type_error(f"`parameters` of type `{kind.__name__}`", f"got {kind_text(parameters)}", fix)


def check_above(argument: str, values: ArrayLike, bound: int, *, fix: str, rows: CountedRows = ALL_ROWS) -> None:
    """Raises unless values of rows that count are above `bound` or NaN (if concrete)."""
    along = rows.known_along(np.ndim(values))
    check_entries(f"`{argument}` above {bound:g}", values, lambda host: host <= bound, fix, along)


def check_coefficient(argument: str, value: ArrayLike, dtype: jnp.dtype) -> Array:
    """Raises unless `value` is a number of at least 0; the value of a traced one is not checked. Returns an array."""
    array = check_scalar(argument, value, dtype)
    check_nonnegative(argument, value, fix="It multiplies a penalty; zero switches it off.")
    return array


def check_increasing_levels(levels: ArrayLike, quantiles: Array) -> Array:
    """Raises unless levels increase within 0 to 1 (if concrete), one per quantile. Returns them."""
    array = check_array("levels", levels)
    size = quantiles.shape[-1]
    if array.shape != (size,):
        got = f"expected ({size},), as `quantiles` are (*batch, levels) = {quantiles.shape}; got {array.shape}"
        raise value_error("one level per quantile", got, "The levels are the last axis.")
    host = concrete(levels)
    if host is not None:
        host = np.asarray(host, np.float64)
        outside = ~((0 < host) & (host < 1))
        if outside.any():
            raise value_error("`levels` between 0 and 1", first_text(host, outside), "Write 90 % as 0.9.")
        if (np.diff(host) <= 0).any():
            fix = "Sort them, and the outputs of the last layer with them."
            raise value_error("increasing `levels`", f"got {host.tolist()}", fix)
    return array.astype(quantiles.dtype)


def check_quantiles(quantiles: ArrayLike) -> Array:
    """Raises unless `quantiles` are `(*batch, levels)` with at least one level. Returns them."""
    array = check_floating("quantiles", quantiles)
    if array.ndim < 1 or array.shape[-1] < 1:
        fix = "The levels are the last axis: for one level pass `quantiles[..., None]`."
        raise value_error("`quantiles` of shape (*batch, levels)", f"got shape {array.shape}", fix)
    return promote(array)[0]
