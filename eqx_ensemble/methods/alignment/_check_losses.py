from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._check import check_floating, check_number, is_traced, kind_text, needs_message, promote
from ..._leaf_text import leaf_text


def check_position(value: Any, *, name: str) -> None:
    """Raises unless `value` is one finite real number; the value of a traced one is not checked."""
    if isinstance(value, jax.Array | np.ndarray):
        if value.shape or not jnp.issubdtype(value.dtype, jnp.number) or jnp.iscomplexobj(value):
            raise TypeError(f"`{name}` needs `position` to be one number, got {leaf_text(value)}.")
        value = 0.0 if is_traced(value) else value.item()
    check_number(value, "position", name=name)


def check_loss(value: Any) -> jax.Array:
    """Raises unless `value` is one real number. Returns it in at least float32."""
    found = value if isinstance(value, jax.Array | np.ndarray | np.generic) else np.asarray(value)
    if found.shape != () or not (jnp.issubdtype(found.dtype, jnp.floating) or found.dtype.kind in "iu"):
        got = kind_text(value) if found.dtype.kind == "O" else leaf_text(found)
        raise TypeError(
            f"`methods.alignment.connectivity` needs `fn` to return one real number, got {got}.\n"
            "For example `jnp.mean(errors)`."
        )
    return promote(jnp.asarray(found))[0]


def check_losses(losses: Any, *, name: str) -> jax.Array:
    """Raises unless `losses` are `(*batch, points)`, at least three points. Returns them in the dtype to compute in."""
    array = check_floating(name, "losses", losses)
    if array.ndim < 1 or array.shape[-1] < 3:
        needs, fix = (
            "`losses` of shape (*batch, points), of at least three points",
            "`connectivity` returns such losses.",
        )
        raise ValueError(needs_message(name, needs, f"got shape {array.shape}", fix))
    return promote(array)[0]
