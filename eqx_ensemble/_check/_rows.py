"""How much each row counts: `row_weights`, booleans or numbers, as checks and compiled computations take them."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Real

from ._arrays import Shape, check_array, concrete, first_text, type_error, value_error
from ._options import check_word

RowWeightsLike = Bool[ArrayLike, "*batch"] | Real[ArrayLike, "*batch"]
"""One boolean or one number per row."""


class CountedRows(NamedTuple):
    """Row weights as arrays, booleans or numbers, and the rows that count, which are not of weight zero.

    `weights` and `counted` are `None` if all rows count alike. `known` is `counted` on the host, for checks, which
    skip the values of arrays if it is `None`: it cannot be read while tracing.
    """

    weights: Array | None = None
    counted: Array | None = None
    known: np.ndarray | None = np.ones((), bool)

    def blank(self, values: Array, *, before: int = 0, fill: ArrayLike = 0) -> Array:
        """The values, overwritten in ignored rows; `before` is the number of axes before those of the rows."""
        if self.counted is None:
            return values
        shape = (1,) * before + self.counted.shape + (1,) * (values.ndim - before - self.counted.ndim)
        return jnp.where(jnp.reshape(self.counted, shape), values, fill)

    def known_along(self, ndim: int) -> "CountedRows":
        """For checks of arrays whose first axes are those of the rows: `known` with `ndim` axes."""
        if self.known is None or self.known.ndim == 0:
            return self
        return self._replace(known=self.known.reshape(self.known.shape + (1,) * (ndim - self.known.ndim)))


ALL_ROWS = CountedRows()


_SUM = "of a function without the argument"


def check_row_weights(
    row_weights: ArrayLike | None,
    shape: Shape,
    dtype: jnp.dtype | None = None,
    *,
    reduction: Any = _SUM,
    none_counts: bool = False,
) -> CountedRows:
    """Raises unless there is one boolean or non-negative number per row, and one that counts. Returns them as arrays.

    With a `dtype`, numbers are relative: scaled to a maximum below two. A `reduction` is `"mean"`, which needs a row,
    or `"none"`. `none_counts` allows that no row counts.
    """
    if reduction is not _SUM:
        check_word(reduction, "reduction", ("mean", "none"))
    if reduction == "mean" and math.prod(shape) == 0:
        fix = "Was every row filtered out?"
        raise value_error("at least one row to average over", f"got rows of shape {shape}", fix)
    if row_weights is None:
        return ALL_ROWS
    with np.errstate(over="ignore"):  # of float64 weights, which are scaled where concrete
        array = check_array("row_weights", row_weights)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        got = f"got dtype {array.dtype}, shape {array.shape}"
        raise type_error("real numbers or booleans as `row_weights`", got, "True counts, False does not.")
    if array.shape != shape:
        fix = "Nothing is broadcast. Weights of members are `weights`."
        if array.ndim < len(shape) and array.shape == shape[: array.ndim]:
            fix = "Several entries per row? Pass `jnp.broadcast_to(row_weights[:, None], targets.shape)`."
        got = f"expected shape {shape}, got {array.shape}"
        raise value_error("one of `row_weights` per row", got, fix)
    host = concrete(row_weights)
    if array.dtype == bool:
        if host is not None and host.size and not host.any() and not none_counts:
            fix = "True keeps a row: are they inverted?"
            raise value_error("`row_weights` that leave a row", f"got {host.size} times False", fix)
        return CountedRows(array, array, host)
    fix = "A row of weight zero does not count; a weight of two counts a row twice."
    check_nonnegative("row_weights", row_weights, fix=fix, all_zero=none_counts or math.prod(shape) == 0)
    if dtype is None:
        return CountedRows(array, array != 0, None if host is None else host != 0)
    if host is not None:
        exact = host.astype(np.float64)
        # By a power of two: integer weights remain exact.
        scaled = np.ldexp(exact, 1 - np.frexp(exact.max(initial=0))[1]).astype(dtype)
        return CountedRows(jnp.asarray(scaled), jnp.asarray(scaled != 0), scaled != 0)
    converted = array.astype(dtype)
    # Values of weight zero are overwritten, so the gradient of such a weight would be wrong: it is set to zero.
    converted = jnp.where(converted == 0, 0, converted)
    exponent = jnp.frexp(jax.lax.stop_gradient(jnp.max(converted, initial=0)))[1]
    weights = jnp.ldexp(converted, 1 - exponent)
    return CountedRows(weights, weights != 0, None)


def check_counted_rows(row_weights: ArrayLike | None, shape: Shape, *, none_counts: bool = False) -> CountedRows:
    """`check_row_weights` for computations that count rows: booleans, or zeros and ones if they can be read."""
    fix = "Rows are counted, not weighted: pass booleans, such as `row_weights > 0`."
    array: Any = None if row_weights is None else check_array("row_weights", row_weights)
    if array is not None and array.dtype != bool and array.shape == shape:
        host = concrete(row_weights)
        if host is None:
            raise type_error("boolean `row_weights`", f"got a traced array of dtype {array.dtype}", fix)
        if (wrong := (host != 0) & (host != 1)).any():
            raise value_error("`row_weights` of zeros and ones", first_text(host, wrong), fix)
        row_weights = host.astype(bool)
    return check_row_weights(row_weights, shape, none_counts=none_counts)


def check_entries(
    needs: str, values: Any, is_wrong: Callable[[np.ndarray], np.ndarray], fix: str, rows: CountedRows = ALL_ROWS
) -> None:
    """Raises for the first wrong one of the values in rows that count, if they can be read."""
    host = concrete(values)
    if host is not None and rows.known is not None and (wrong := is_wrong(host) & rows.known).any():
        raise value_error(needs, first_text(host, wrong), fix)


def check_nonnegative(
    argument: str, values: Any, *, fix: str, rows: CountedRows = ALL_ROWS, all_zero: bool = True
) -> None:
    """Raises unless values, if concrete, are finite and >= 0 in rows that count, and not all zero unless `all_zero`."""
    is_wrong = lambda host: ~np.isfinite(host.astype(np.float64)) | (host < 0)
    check_entries(f"finite `{argument}` of zero or more", values, is_wrong, fix, rows)
    host, known = concrete(values), rows.known
    if not all_zero and host is not None and known is not None and known.any() and not ((host > 0) & known).any():
        got = f"got {np.broadcast_to(known, host.shape).sum()} zeros"
        raise value_error(f"`{argument}` that are not all zero", got, fix)


def check_no_nan(argument: str, values: ArrayLike, rows: CountedRows = ALL_ROWS) -> None:
    """Raises for NaN in rows that count, if the values are concrete."""
    host = concrete(values)
    if host is None or rows.known is None:
        return
    wrong = np.isnan(host.astype(np.float64)) & rows.known
    if wrong.any():
        fix = "Leave these rows out: `row_weights=~jnp.isnan(...)`."
        raise value_error(f"`{argument}` without NaN", f"got {int(wrong.sum())} of them", fix)
