"""What the oldest releases of JAX that the library runs on lack, or have under another name."""

from typing import Any

import jax
import jax.numpy as jnp

try:
    from jax.errors import InconclusiveDimensionOperation as InconclusiveDimensionOperation
except ImportError:  # before 0.10
    from jax.core import InconclusiveDimensionOperation as InconclusiveDimensionOperation

# Before 0.9, typed keys had no value for rows out of bounds, even where there are none.
_TAKE: dict[str, Any] = {"mode": "clip"} if jax.__version_info__ < (0, 9) else {}


def take_rows(x: jax.Array, indices: Any) -> jax.Array:
    """The rows of `x` at indices that are within its bounds, also of typed keys."""
    return jnp.take(x, indices, axis=0, **_TAKE)
