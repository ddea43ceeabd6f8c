from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ._arrays import check_array, concrete, first_text, kept_rows, needs_message
from ._leaves import Size, kind_text


def check_nonnegative(
    name: str, argument: str, values: Any, *, fix: str, mask: ArrayLike | None = None, all_zero: bool = True
) -> None:
    """Finite numbers of zero or more where `mask`, all of them zero only if `all_zero`; where these are concrete."""
    host, kept = concrete(values), kept_rows(mask)
    if host is None or kept is None:
        return
    wrong = (~np.isfinite(host.astype(np.float64)) | (host < 0)) & kept
    if wrong.any():
        raise ValueError(needs_message(name, f"finite `{argument}` of zero or more", first_text(host, wrong), fix))
    if not all_zero and kept.any() and not ((host > 0) & kept).any():
        got = f"got {np.broadcast_to(kept, host.shape).sum()} zeros"
        raise ValueError(needs_message(name, f"`{argument}` that are not all zero", got, fix))


def check_plain_weights(name: str, weights: object) -> None:
    """Weights themselves, not what a search returned with them."""
    if hasattr(weights, "weights"):
        got = f"got {kind_text(weights)}"
        raise TypeError(
            needs_message(name, "`weights` as an array `(members,)`", got, "Pass its weights alone: `found.weights`.")
        )


def check_weight_count(weights: Any, num_members: Size, *, name: str) -> None:
    """Weights of the members `(members,)`, or none."""
    check_plain_weights(name, weights)
    if weights is not None and np.shape(weights) != (num_members,):
        got = f"expected shape ({num_members},), got {np.shape(weights)}"
        raise ValueError(needs_message(name, "one weight per member", got, "Weights are in the order of the members."))


def check_nonnegative_weights(name: str, weights: Any, *, mask: ArrayLike | None = None, all_zero: bool = True) -> None:
    """Weights of members, finite and not negative where `mask`; all of them zero only if `all_zero`."""
    fix = "A member of weight zero has no influence; `jax.nn.softmax` converts scores to weights."
    check_nonnegative(name, "weights", weights, fix=fix, mask=mask, all_zero=all_zero)


def check_weights(name: str, weights: ArrayLike | None, num_members: Size, dtype: jnp.dtype) -> Array | None:
    """Convex weights: one per member, finite, not negative, not all zero; divided by their sum."""
    if weights is None:
        return None
    check_plain_weights(name, weights)
    array = check_array(name, "weights", weights)
    check_weight_count(array, num_members, name=name)
    check_nonnegative_weights(name, weights, all_zero=False)
    host = concrete(weights)
    if host is not None:
        exact = host.astype(np.float64)
        return jnp.asarray(exact / exact.sum(), dtype)
    converted = array.astype(dtype)
    # What a weight of zero multiplies is blank, so that its own gradient would be wrong: it has none.
    converted = jnp.where(converted == 0, 0, converted)
    return converted / jnp.sum(converted)
