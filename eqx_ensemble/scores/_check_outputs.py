import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from .._check import check_array, check_nonnegative, check_number, needs_message


def check_order(name: str, order: float | int) -> float:
    """Raises unless `order` is a positive number. Returns it."""
    number = check_number(order, "order", name=name)
    if number <= 0:
        raise ValueError(needs_message(name, "`order` above zero", f"got {order}", "0.5, 1 and 2 are usual."))
    return number


def check_pair_weights(name: str, pair_weights: ArrayLike | None, out: int, dtype: jnp.dtype) -> Array | None:
    """Raises unless `pair_weights` are non-negative numbers `(out, out)`. Returns them as an array."""
    if pair_weights is None:
        return None
    array = check_array(name, "pair_weights", pair_weights)
    if array.shape != (out, out):
        got = f"expected {(out, out)}, got {array.shape}"
        raise ValueError(needs_message(name, "`pair_weights` for pairs of outputs", got, "They are `(out, out)`."))
    fix = "A pair of weight zero does not count."
    check_nonnegative(name, "pair_weights", pair_weights, fix=fix)
    return array.astype(dtype)
