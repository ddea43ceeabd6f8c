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
    """Raises unless values, if concrete, are finite and >= 0 where `mask`, and not all zero unless `all_zero`."""
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
    """Raises for the result of a search for weights, in place of its weights."""
    if hasattr(weights, "weights"):
        got = f"got {kind_text(weights)}"
        raise TypeError(
            needs_message(name, "`weights` as an array `(members,)`", got, "Pass its weights alone: `found.weights`.")
        )


def check_weight_count(weights: Any, num_members: Size, *, name: str, rows: tuple[Size, ...] = ()) -> None:
    """Raises unless weights are `None`, `(members,)`, or `(members, ...)` with leading axes of `rows`."""
    check_plain_weights(name, weights)
    shape = np.shape(weights)
    shapes = [(num_members, *rows[:i]) for i in range(len(rows) + 1)]
    if weights is None or shape in shapes:
        return
    fix = "Weights are in the order of the members."
    if len(shape) > 1 and (*shape[-1:], *shape[:-1]) in shapes:
        fix = "The axis `members` comes first: `jnp.moveaxis(weights, -1, 0)`."
    elif len(shape) > 1 and not rows:
        fix += " For weights of each row, such as a gate's, call it for one row inside `jax.vmap`."
    expected = " or ".join(map(str, shapes if len(shape) > 1 else shapes[:1]))
    raise ValueError(needs_message(name, "one weight per member", f"expected shape {expected}, got {shape}", fix))


def check_nonnegative_weights(name: str, weights: Any, *, mask: ArrayLike | None = None, all_zero: bool = True) -> None:
    """Raises unless weights are finite and not negative where `mask`, and not all zero unless `all_zero`."""
    fix = "A member of weight zero has no influence; `jax.nn.softmax` converts scores to weights."
    check_nonnegative(name, "weights", weights, fix=fix, mask=mask, all_zero=all_zero)


def check_weights(
    name: str,
    weights: ArrayLike | None,
    num_members: Size,
    dtype: jnp.dtype,
    *,
    rows: tuple[Size, ...] = (),
    mask: ArrayLike | None = None,
) -> Array | None:
    """Raises unless weights are one per member, finite, not negative and not all zero. Returns them with sum 1.

    With `rows`, the shape of the rows of the predictions, they may also differ between rows: `(members, ...)` with some
    leading axes of `rows`. Each row is divided by its own sum. Rows outside `mask` are not checked, and get equal
    weights.
    """
    if weights is None:
        return None
    check_plain_weights(name, weights)
    with np.errstate(over="ignore"):  # concrete weights are divided by their sum in float64, below
        array = check_array(name, "weights", weights)
    check_weight_count(array, num_members, name=name, rows=rows)
    if array.ndim > 1:
        return _check_row_weights(name, weights, array, dtype, mask)
    check_nonnegative_weights(name, weights, all_zero=False)
    host = concrete(weights)
    if host is not None:
        exact = host.astype(np.float64)
        return jnp.asarray(exact / exact.sum(), dtype)
    return _normalise(array, dtype)


def _check_row_weights(name: str, weights: ArrayLike, array: Array, dtype: jnp.dtype, mask: ArrayLike | None) -> Array:
    """`check_weights` for weights that differ between rows; a row counts if one of its entries does."""
    kept = None if mask is None else jnp.any(jnp.asarray(mask), axis=tuple(range(array.ndim - 1, np.ndim(mask))))
    counts = kept_rows(kept)
    check_nonnegative_weights(name, weights, mask=kept)
    host = concrete(weights)
    if host is not None and counts is not None:
        empty = (host == 0).all(axis=0) & counts
        if empty.any():
            index = tuple(int(i) for i in np.argwhere(empty)[0])
            got = f"got only zeros in row {index}, the first of {int(empty.sum())} such"
            fix = "They are divided by their sum in each row: at least one member needs a nonzero weight."
            raise ValueError(needs_message(name, "`weights` that are not all zero in any row", got, fix))
        exact = np.where(counts, host.astype(np.float64), 1)
        return jnp.asarray(exact / exact.sum(axis=0), dtype)
    return _normalise(array if kept is None else jnp.where(kept[None], array, jnp.ones_like(array)), dtype)


def _normalise(array: Array, dtype: jnp.dtype) -> Array:
    converted = array.astype(dtype)
    # Members of weight zero are masked, so that the gradient of such a weight would be wrong: it is set to zero.
    converted = jnp.where(converted == 0, 0, converted)
    return converted / jnp.sum(converted, axis=0, keepdims=array.ndim > 1)
