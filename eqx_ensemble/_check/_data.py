import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ._errors import MemberMismatchError
from ._leaves import check_in_range, is_traced, kind_text
from ._options import check_positive_int


def check_rows_of_data(
    data: Any, each: type, num_members: int, *, argument: str, name: str, finite: bool = True, least: int = 1
) -> int:
    """All arrays of a data set have the same number of rows, at least one, and hold finite numbers unless they may not.

    Arrays are `(rows, ...)`; those in a node of type `each` are `(members, rows, ...)`.
    """
    sizes: dict[int, str] = {}
    for place, x, axis in _data_leaves(data, each, argument):
        _numeric(x, place, name=name)
        check_in_range(x, name=name, path=place)
        if axis == 1 and x.shape[:1] != (num_members,):
            raise MemberMismatchError(
                f"`{name}` needs one data set per member in the `Each` of `{argument}`; at `{place}`: expected "
                f"({num_members}, rows, ...), got {x.shape}."
            )
        if x.ndim <= axis:
            raise ValueError(
                f"`{name}` needs arrays with one row per example in `{argument}`; at `{place}`: got shape {x.shape}."
            )
        sizes.setdefault(x.shape[axis], place)
        if finite:
            _finite(x, place, name=name)
    if not sizes:
        raise TypeError(f"`{name}` needs at least one array in `{argument}`, got {kind_text(data)}.")
    if len(sizes) > 1:
        listed = ", ".join(f"{rows} rows at `{place}`" for rows, place in sizes.items())
        raise ValueError(f"`{name}` needs arrays of one length in `{argument}`; got {listed}.")
    rows = next(iter(sizes))
    if rows < least:
        raise ValueError(f"`{name}` needs at least one row in `{argument}`, got none.")
    return rows


def _data_leaves(data: Any, each: type, argument: str) -> Iterator[tuple[str, Any, int]]:
    """The leaves of a data set: their place in words, they themselves, and the axis of their rows."""
    for path, node in jtu.tree_flatten_with_path(data, is_leaf=lambda x: isinstance(x, each))[0]:
        place = argument + jtu.keystr(path)
        if not isinstance(node, each):
            yield place, node, 0
            continue
        for inner, leaf in jtu.tree_flatten_with_path(node.per_member())[0]:
            yield place + jtu.keystr(inner), leaf, 1


def _numeric(x: Any, place: str, *, name: str) -> None:
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(
            f"`{name}` needs arrays in its data; at `{place}`: {kind_text(x)}.\n"
            "Convert tables and lists first, for example `np.asarray(table)`."
        )
    if isinstance(x, np.ndarray) and x.dtype.kind not in "biufcV":
        raise TypeError(f"`{name}` needs arrays of numbers; at `{place}`: dtype {x.dtype}.\nEncode labels as integers.")


def _finite(x: Any, place: str, *, name: str) -> None:
    if is_traced(x) or not jnp.issubdtype(x.dtype, jnp.floating) or _all_finite(x):
        return
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        raise ValueError(f"`{name}` needs finite numbers; the array at `{place}` holds NaN or infinite values.")
    bad = ~np.isfinite(np.asarray(x))
    first = tuple(int(i) for i in np.argwhere(bad)[0])
    raise ValueError(
        f"`{name}` needs finite numbers; the array at `{place}` holds {int(bad.sum())} NaN or infinite values, the "
        f"first at index {first}.\nMembers that see them would diverge: drop or impute those rows."
    )


def _all_finite(x: Any) -> bool:
    far = isinstance(x, jax.Array) and (not x.is_fully_addressable or any(d.platform != "cpu" for d in x.devices()))
    if far:  # stays where it is
        return bool(jnp.all(jnp.isfinite(x)))
    # A sum is not finite when an element is not; it may overflow without one, so that only then all are looked at.
    x = np.asarray(x)
    return bool(np.isfinite(x.sum(dtype=np.float64)) or np.isfinite(x).all())


def integers_in(data: Any, each: type) -> list[str]:
    """What may be class labels: the arrays of integers in a data set, with the range of their values."""
    return [
        f"`{place}` holds integers from {int(x.min())} to {int(x.max())}"
        for place, x, axis in _data_leaves(data, each, "data")
        if jnp.issubdtype(x.dtype, jnp.integer) and x.ndim - axis <= 2
    ]


def same_structure(validation: Any, data: Any) -> None:
    """The loss takes validation data apart as it does the training data."""
    expected, got = jax.tree.structure(data), jax.tree.structure(validation)
    if expected != got:
        raise TypeError(
            f"`fit` needs `validation` with the structure of `data`, because the loss takes both; expected {expected}, "
            f"got {got}.\nPass both as `(x, y)`; or give a `score` of its own."
        )


def batch_fits(batch_size: int, rows: int, *, name: str) -> None:
    """A batch is not larger than the data."""
    check_positive_int(batch_size, "batch_size", name=name)
    if batch_size > rows:
        raise ValueError(
            f"`{name}` needs `batch_size` of at most the number of rows; got {batch_size} for {rows} rows.\n"
            f"For full batches pass `batch_size={rows}`."
        )


def row_indices(rows: Any, num_members: int, num_rows: int, *, name: str) -> None:
    """Row indices `(members, n)` into the shared data."""
    if rows.ndim != 2 or not np.issubdtype(rows.dtype, np.integer):
        raise TypeError(f"`{name}` needs integer `rows` of shape (members, n), got {rows.dtype} of shape {rows.shape}.")
    if rows.shape[0] != num_members or rows.shape[1] == 0:
        raise ValueError(f"`{name}` needs `rows` of shape ({num_members}, n) with n of at least 1, got {rows.shape}.")
    outside = (rows < 0) | (rows >= num_rows)
    if outside.any():
        member, position = (int(i) for i in np.argwhere(outside)[0])
        raise IndexError(
            f"`{name}` needs `rows` from 0 to {num_rows - 1}; {int(outside.sum())} lie outside, the first is "
            f"`rows[{member}, {position}]` = {rows[member, position]}."
        )


@contextlib.contextmanager
def explained_rows(data: Any, each: type) -> Iterator[None]:
    """Adds to a member's own errors which rows `predict` hands it: most often it was given a single example."""
    try:
        yield
    except (TypeError, ValueError) as error:
        rows = dict.fromkeys(str(tuple(leaf.shape[axis + 1 :])) for _, leaf, axis in _data_leaves(data, each, "x"))
        note = f"`predict` calls a member with one row of `x`; here a row has shape {', '.join(rows)}."
        if list(rows) == ["()"]:
            note += " For a single example pass `x[None]`."
        error.add_note(note)
        raise


def no_batch_mark(data: Any, batch: type) -> None:
    """`predict` maps members over rows by itself."""
    is_batch = lambda x: isinstance(x, batch)
    if any(map(is_batch, jax.tree.leaves(data, is_leaf=is_batch))):
        raise TypeError("`predict` takes the rows as they are: pass `x` instead of `Batch(x)`.")
