from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from .._check import check_positive_scalar, check_scalar, concrete, needs_message
from .._foreign import as_numpy


def check_sketch_levels(levels: Any, *, name: str) -> tuple[float, ...]:
    """Raises unless `levels` are a list of numbers from 0 to 1. Returns them as floats."""
    found = as_numpy(levels, "levels", name=name)
    if found.ndim != 1 or found.size == 0 or found.dtype.kind not in "fiu":
        raise TypeError(f"`{name}` needs a list of `levels`, got {levels!r}.")
    if not ((found >= 0) & (found <= 1)).all():
        raise ValueError(f"`{name}` needs `levels` from 0 to 1, got {levels!r}.")
    return tuple(float(level) for level in found)


def check_known_members(name: str, num_members: Any) -> None:
    """Raises for a symbolic number of members: it decides how often a sketch is condensed."""
    if not isinstance(num_members, int):
        fix = "Pass `combine=functools.partial(ee.uncertainty.quantile, levels=...)`, or no `symbolic_members`."
        raise TypeError(needs_message(name, "a known number of members", f"got any number, `{num_members}`", fix))


def check_power(name: str, power: ArrayLike, dtype: jnp.dtype) -> Array:
    """Raises unless `power` is a positive scalar (where concrete). Returns it as an array."""
    return check_positive_scalar(
        name, "power", power, dtype, fix="1 is the geometric mean, `num_members` the plain product."
    )


def check_cut(name: str, cut: ArrayLike, dtype: jnp.dtype) -> Array:
    """Raises unless `cut` is a scalar from 0 to below 0.5 (where concrete). Returns it as an array."""
    array = check_scalar(name, "cut", cut, dtype)
    host = concrete(cut)
    if host is not None and not (0 <= host and host.astype(dtype) < 0.5):
        raise ValueError(
            needs_message(
                name,
                "a `cut` from 0 to below 0.5",
                f"got {host}",
                "10 % at each end are `cut=0.1`; for 0.5 use `median`.",
            )
        )
    return array
