"""How much each row and each member counts, as checks and compiled computations take it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike

from .._check import check_array, concrete, first_text, type_error, value_error
from .._leaves import kind_text


class Rows(NamedTuple):
    """Row weights as an array, and the rows that are not of weight zero: `None` if all rows count alike.

    `known` is `counted` on the host, for checks of values; `None` if it cannot be read.
    """

    weights: Array | None = None
    counted: Array | None = None
    known: np.ndarray | None = np.ones((), bool)


ALL_ROWS = Rows()


def check_row_weights(
    row_weights: ArrayLike | None, shape: tuple[Any, ...], dtype: Any = None, *, only_count: bool = False
) -> Rows:
    """Raises unless there is one boolean or non-negative number per row, and one that counts.

    Numbers are relative: with a `dtype`, they are scaled to a maximum below two. With `only_count` they are zeros and
    ones.
    """
    if row_weights is None:
        return ALL_ROWS
    with np.errstate(over="ignore"):  # of float64 weights, which are scaled where concrete
        array: Any = check_array("row_weights", row_weights)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        got = f"got dtype {array.dtype}, shape {array.shape}"
        raise type_error("real numbers or booleans as `row_weights`", got, "True counts, False does not.")
    if array.shape != shape:
        fix = "Nothing is broadcast. Members are weighted by `weights`."
        if array.ndim < len(shape) and array.shape == shape[: array.ndim]:
            fix = "Several entries per row? Pass `jnp.broadcast_to(row_weights[:, None], targets.shape)`."
        raise value_error("one of `row_weights` per row", f"expected shape {shape}, got {array.shape}", fix)
    host = concrete(row_weights)
    if only_count and array.dtype != bool:
        fix = "Rows are counted, not weighted: pass booleans, such as `row_weights > 0`."
        if host is None:
            raise type_error("boolean `row_weights`", f"got a traced array of dtype {array.dtype}", fix)
        if (wrong := (host != 0) & (host != 1)).any():
            raise value_error("`row_weights` of zeros and ones", first_text(host, wrong), fix)
        host = host.astype(bool)
        array = jnp.asarray(host)
    if host is not None:
        fix = "A row of weight zero does not count; a weight of two counts a row twice."
        _check_not_negative("row_weights", host, np.ones((), bool), fix)
        if host.size and not host.any():
            fix = "True keeps a row: is the mask inverted?"
            raise value_error("`row_weights` that keep at least one row", f"got {host.size} times {host.flat[0]}", fix)
    if array.dtype == bool:
        return Rows(array, array, host)
    if dtype is None:
        return Rows(array, array != 0, None if host is None else host != 0)
    # Values of weight zero are overwritten, so the gradient of such a weight would be wrong: it is set to zero.
    given: Any = jnp.where(array == 0, 0, array).astype(dtype) if host is None else host.astype(np.float64)
    xp = jnp if host is None else np
    # By a power of two: integer weights remain exact.
    largest = jax.lax.stop_gradient(jnp.max(given, initial=0)) if host is None else given.max(initial=0)
    weights = xp.ldexp(given, 1 - xp.frexp(largest)[1]).astype(dtype)
    return Rows(jnp.asarray(weights), jnp.asarray(weights != 0), None if host is None else np.asarray(weights != 0))


def check_weights(
    weights: ArrayLike | None, num_members: Any, dtype: Any, *, shape: tuple[Any, ...] = (), rows: Rows = ALL_ROWS
) -> Array | None:
    """Raises unless weights are one per member, finite, not negative and not all zero. Returns them with sum 1.

    With a `shape`, that of the rows of the predictions, they may also differ between rows: `(members, ...)` with some
    of its leading axes. Each row is divided by its own sum. Rows that do not count are not checked, and get equal
    weights.
    """
    if weights is None:
        return None
    if hasattr(weights, "weights"):  # the result of a search for weights
        got = f"got {kind_text(weights)}"
        raise type_error("`weights` as an array `(members,)`", got, "Pass its weights alone: `found.weights`.")
    with np.errstate(over="ignore"):  # concrete weights are divided by their sum in float64, below
        array = check_array("weights", weights)
    _check_count(array.shape, num_members, shape)
    over_entries = lambda x: x if x is None or x.ndim == 0 else x.any(axis=tuple(range(array.ndim - 1, x.ndim)))
    counted, known, host = over_entries(rows.counted), over_entries(rows.known), concrete(weights)
    if array.ndim == 1:
        counted, known = None, np.ones((), bool)
    if host is not None and known is not None:
        fix = "A member of weight zero has no influence; `jax.nn.softmax` converts scores to weights."
        _check_not_negative("weights", host, known, fix)
        if (empty := (host == 0).all(axis=0) & known).any():
            row = tuple(np.argwhere(empty)[0].tolist())
            got = (
                f"got only zeros in row {row}, the first of {int(empty.sum())} such"
                if row
                else f"got {host.size} zeros"
            )
            needs = "`weights` that are not all zero in any row" if row else "`weights` that are not all zero"
            raise value_error(needs, got, "They are divided by their sum: at least one member needs a nonzero weight.")
        exact = np.where(known, host.astype(np.float64), 1)
        return jnp.asarray(exact / exact.sum(axis=0), dtype)
    given = (array if counted is None else jnp.where(counted[None], array, jnp.ones_like(array))).astype(dtype)
    # Members of weight zero are overwritten, so that the gradient of such a weight would be wrong: it is set to zero.
    given = jnp.where(given == 0, 0, given)
    return given / jnp.sum(given, axis=0, keepdims=array.ndim > 1)


def _check_count(got: tuple[Any, ...], num_members: Any, rows: tuple[Any, ...]) -> None:
    """Raises unless weights are `(members,)`, or `(members, ...)` with leading axes of `rows`."""
    shapes = [(num_members, *rows[:i]) for i in range(len(rows) + 1)]
    if got in shapes:
        return
    fix = "Weights follow the order of the members. Rows are weighted by `row_weights`."
    if len(got) > 1 and (*got[-1:], *got[:-1]) in shapes:
        fix = "The axis `members` comes first: `jnp.moveaxis(weights, -1, 0)`."
    elif len(got) > 1 and not rows:
        fix += " For other weights in each row, such as a gate's, map the function over rows with `jax.vmap`."
    expected = " or ".join(map(str, shapes if len(got) > 1 else shapes[:1]))
    raise value_error("one weight per member", f"expected shape {expected}, got {got}", fix)


def _check_not_negative(argument: str, host: np.ndarray, known: Any, fix: str) -> None:
    if (wrong := ~(np.isfinite(host.astype(np.float64)) & (host >= 0)) & known).any():
        raise value_error(f"finite `{argument}` of zero or more", first_text(host, wrong), fix)
