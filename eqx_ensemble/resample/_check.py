from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from .._check import (
    check_array,
    check_key,
    check_nonnegative,
    check_positive_int,
    concrete,
    first_text,
    is_traced,
    needs_message,
    type_error,
    value_error,
)

Labels = tuple[list[Any], np.ndarray]


def check_draw(num_rows: Any, num_members: Any, key: Any) -> tuple[int, int]:
    """Raises for invalid arguments of a draw. Returns the numbers of rows and members."""
    rows = check_num_rows(num_rows)
    count = check_positive_int(num_members, "num_members")
    check_draw_key(key)
    return rows, count


def check_draw_key(key: Any) -> None:
    """Raises unless `key` is one concrete threefry key."""
    check_key(key)
    if is_traced(key):
        fix = "Draw outside `jax.jit` and pass the result in: rows and weights are ordinary arrays."
        raise type_error("a concrete key, because rows are drawn on the host", "got a traced key", fix)


def check_num_rows(num_rows: Any) -> int:
    """Raises unless `num_rows` is a positive integer that fits 32-bit indices. Returns it."""
    if np.ndim(num_rows) > 0:
        got = f"got an array of shape {np.shape(num_rows)}"
        raise type_error("the number of rows as `num_rows`", got, "Pass `len(x)`.")
    rows = check_positive_int(num_rows, "num_rows")
    if rows >= 2**31:
        raise value_error("`num_rows` below 2**31, as rows are int32", f"got {rows}", "Resample the data in parts.")
    return rows


def check_draw_size(size: Any, num_rows: int, *, replace: bool) -> int:
    """Raises unless `size` is a count or a fraction of the rows. Returns the number of rows per member."""
    if isinstance(size, float | np.floating):
        if not 0 < size <= 1:
            fix = "A count is passed as an integer: `size=100`."
            raise value_error("a fraction `size` above 0 and at most 1", f"got {size}", fix)
        count = round(float(size) * num_rows)
        if count == 0:
            fix = "Pass a larger fraction, or a count."
            raise value_error("a `size` of at least one row", f"got {size} of {num_rows} rows", fix)
        return count
    count = check_positive_int(size, "size")
    if not replace and count > num_rows:
        fix = "Drawing with replacement is `bootstrap`, which has no such limit."
        raise value_error("`size` of at most the number of rows", f"got {count} of {num_rows} rows", fix)
    return count


def check_row_labels(argument: str, labels: Any, num_rows: int) -> Labels:
    """Raises unless labels are discrete `(rows,)`. Returns the distinct values, sorted, and each row's index."""
    if is_traced(labels):
        fix = "Resample before `jax.jit`."
        raise type_error(f"a concrete `{argument}`", "got a traced array", fix)
    array = np.asarray(labels)
    if array.shape != (num_rows,):
        fix = "Labels are in the order of the rows."
        if array.shape == (num_rows, 1):
            fix = f"Pass `{argument}[:, 0]`."
        elif array.ndim == 2 and len(array) == num_rows:
            fix = f"One-hot labels? Pass `{argument}.argmax(axis=1)`."
        raise value_error(f"one label per row in `{argument}`", f"expected shape {(num_rows,)}, got {array.shape}", fix)
    if array.dtype.kind not in "biuSUTO":
        fix = "Real-valued targets are binned first: `np.digitize(y, np.quantile(y, [0.25, 0.5, 0.75]))`."
        raise type_error(f"discrete labels in `{argument}`", f"got dtype {array.dtype}", fix)
    try:
        different, position = np.unique(array, return_inverse=True)
    except TypeError as error:
        fix = "Missing labels? Replace them by a label for missing values."
        raise type_error(
            f"labels of one kind in `{argument}`", f"got objects that cannot be sorted: {error}", fix
        ) from error
    return different.tolist(), position


def check_drawn(values: ArrayLike, num_rows: int, *, num_members: int | None = None) -> Array:
    """Raises unless `drawn` are integer rows `(members, n)` or other weights `(members, rows)`. Returns the array."""
    array = check_array("drawn", values)
    if num_members is not None and array.shape[:1] != (num_members,):
        got = f"expected {num_members} members as in `predictions`, got shape {array.shape}"
        raise value_error("rows or weights of the members that predict", got, "Members have the same order in both.")
    if jnp.issubdtype(array.dtype, jnp.integer):
        return check_rows(values, num_rows)
    if array.ndim != 2 or array.shape[1] != num_rows or array.shape[0] == 0:
        fix = "Integers are row indices `(members, n)`, other numbers are weights `(members, rows)`."
        raise value_error(f"weights of shape (members, {num_rows})", f"got {array.dtype} of shape {array.shape}", fix)
    check_nonnegative("drawn", values, fix="A row of weight zero is out of bag.")
    return array


def check_rows(values: ArrayLike, num_rows: int) -> Array:
    """Raises unless rows are integers `(members, n)`, in range where concrete. Returns them as an array."""
    array = check_array("rows", values)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        fix = "Pass row indices; weights do not need `counts`."
        raise type_error("integer rows (members, n)", f"got {array.dtype} of shape {array.shape}", fix)
    if array.ndim != 2 or 0 in array.shape:
        fix = "One member? Add a leading axis: `rows[None]`."
        raise value_error("rows of shape (members, n), at least one", f"got shape {array.shape}", fix)
    host = concrete(values)
    if host is not None:
        check_in_range(host, num_rows, "")
    return array


def check_in_range(rows: np.ndarray, num_rows: int, words: str) -> None:
    wrong = (rows < 0) | (rows >= num_rows)
    if wrong.any():
        fix = "Rows count from 0; `num_rows` is the length of the data that they index."
        raise IndexError(needs_message(f"rows from 0 to {num_rows - 1}", first_text(rows, wrong) + words, fix))
