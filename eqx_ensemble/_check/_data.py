from typing import Any

import jax
import numpy as np

from ._errors import MemberMismatchError
from ._leaves import is_traced
from ._marks import array_leaves, positive_int


def rows_of_data(data: Any, each: Any, *, argument: str, name: str, finite: bool = True) -> int:
    """All arrays of a data set have the same number of rows, at least one, and hold finite numbers unless they may not.

    `data` is the tree of shared arrays `(rows, ...)`, `each` the list of trees of arrays `(members, rows, ...)`.
    """
    sizes: dict[int, str] = {}
    for tree, axis in [(data, 0), *((tree, 1) for tree in each)]:
        for path, x in array_leaves(tree):
            if x.ndim <= axis:
                raise ValueError(
                    f"`{name}` needs arrays with one row per example in `{argument}`; at `{path}`: got shape {x.shape}."
                )
            sizes.setdefault(x.shape[axis], path)
            if finite:
                _finite(x, path, argument=argument, name=name)
    if not sizes:
        raise TypeError(f"`{name}` needs at least one array in `{argument}`, got {type(data).__name__} without arrays.")
    if len(sizes) > 1:
        listed = ", ".join(f"{rows} rows at `{path}`" for rows, path in sizes.items())
        raise ValueError(f"`{name}` needs arrays of one length in `{argument}`; got {listed}.")
    rows = next(iter(sizes))
    if rows == 0:
        raise ValueError(f"`{name}` needs at least one row in `{argument}`, got none.")
    return rows


def _finite(x: Any, path: str, *, argument: str, name: str) -> None:
    if is_traced(x) or not np.issubdtype(x.dtype, np.floating):
        return
    # A sum is not finite when an element is not; it may overflow without one, so that only then all are looked at.
    array = np.asarray(x)
    if np.isfinite(array.sum(dtype=np.float64)):
        return
    bad = ~np.isfinite(array)
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"`{name}` needs finite numbers in `{argument}`; the array at `{path}` holds {int(bad.sum())} NaN or "
            f"infinite values, the first at index {first}.\nEvery member would diverge: drop or impute those rows."
        )


def numeric_data(data: Any, *, argument: str, name: str) -> None:
    """Every leaf of a data set is an array of numbers."""
    for path, x in jax.tree_util.tree_flatten_with_path(data)[0]:
        where = jax.tree_util.keystr(path) or "(the value)"
        if not isinstance(x, jax.Array | np.ndarray):
            raise TypeError(
                f"`{name}` needs arrays in `{argument}`; at `{where}`: a {type(x).__name__}.\n"
                "Convert tables and lists first, for example `np.asarray(table)`."
            )
        if isinstance(x, np.ndarray) and x.dtype.kind not in "biufcV":
            raise TypeError(
                f"`{name}` needs arrays of numbers in `{argument}`; at `{where}`: dtype {x.dtype}.\n"
                "Encode labels as integers."
            )


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
    positive_int(batch_size, "batch_size", name=name)
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
    if rows.min() < 0 or rows.max() >= num_rows:
        raise IndexError(f"`{name}` needs `rows` in [0, {num_rows}), got {rows.min()} to {rows.max()}.")


def data_members(tree: Any, num_members: int, *, argument: str, name: str) -> None:
    """Data of the members' own has one data set per member."""
    for path, x in array_leaves(tree):
        if x.shape[0] != num_members:
            raise MemberMismatchError(
                f"`{name}` needs one data set per member in the `Each` of `{argument}`; at `{path}`: expected "
                f"({num_members}, rows, ...), got {x.shape}."
            )


def prediction_rows(nodes: list[Any], each: type, num_members: int) -> int:
    """The number of rows on which all inputs of `predict` agree."""
    if any(type(node).__name__ == "Batch" for node in nodes):
        raise TypeError("`predict` takes the rows as they are: pass `x` instead of `Batch(x)`.")
    shared = [node for node in nodes if not isinstance(node, each)]
    own = [node.per_member() for node in nodes if isinstance(node, each)]
    numeric_data((shared, own), argument="x", name="predict")
    for tree in own:
        data_members(tree, num_members, argument="x", name="predict")
    return rows_of_data(shared, own, argument="x", name="predict", finite=False)
