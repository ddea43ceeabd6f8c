"""Checks of data that are read on demand."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from ..._axes import Each
from ..._axes._check_rows import check_rows_of_data
from ..._check import check_positive_int, kind_text
from ..._check._options import MOST_STEPS
from ..._foreign import from_foreign_tree
from ..._leaf_text import leaf_text
from ..._pytree import PyTree

_READ = "Return a PyTree of arrays with the rows of the argument, in its order."


def check_num_rows(num_rows: Any, *, name: str) -> int:
    """Raises unless `num_rows` is a valid number of rows for a function. Returns it."""
    if num_rows is None:
        raise TypeError(f"`{name}` needs `num_rows` with a function: how many rows it can read.")
    check_positive_int(num_rows, "num_rows", name=name)
    _check_countable(num_rows, name=name)
    return int(num_rows)


def _check_countable(num_rows: int, *, name: str) -> None:
    if num_rows > MOST_STEPS:
        raise ValueError(
            f"`{name}` needs at most {MOST_STEPS} rows, because row orders count in 32 bits; got {num_rows}.\n"
            "Let a row hold several examples."
        )


def check_stored_arrays(source: Any, num_rows: Any, *, name: str) -> int:
    """Raises unless the source holds arrays of one length. Returns the length."""
    fix = "Pass arrays, or a function `read(rows)` and `num_rows`."
    if isinstance(source, Iterator):
        raise TypeError(
            f"`{name}` needs a source that gives any rows, got {kind_text(source)}, which gives batches in its own "
            "order.\nPass batches to `fit` as they are."
        )
    sizes: dict[int, str] = {}
    for path, x in jtu.tree_leaves_with_path(source, is_leaf=lambda x: isinstance(x, Each)):
        where = f"source{jtu.keystr(path)}"
        if isinstance(x, Each):
            raise TypeError(
                f"`{name}` needs rows that all members share; `{where}` is an `Each`.\n"
                "Pass one source, and to `fit` the `rows` of each member."
            )
        shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
        if not isinstance(shape, tuple) or dtype is None or isinstance(x, Mapping):
            raise TypeError(f"`{name}` needs arrays in its source; at `{where}`: {kind_text(x)}.\n{fix}")
        if not shape:
            raise ValueError(f"`{name}` needs arrays with one row per example; at `{where}`: got shape ().")
        sizes.setdefault(int(shape[0]), where)
    if not sizes:
        raise TypeError(f"`{name}` needs at least one array in its source, got {kind_text(source)}.\n{fix}")
    if len(sizes) > 1:
        listed = ", ".join(f"{size} rows at `{where}`" for size, where in sizes.items())
        raise ValueError(f"`{name}` needs arrays of one length; got {listed}.")
    found = next(iter(sizes))
    if found == 0:
        raise ValueError(f"`{name}` needs at least one row, got none.")
    if num_rows is not None and num_rows != found:
        raise ValueError(f"`{name}` needs `num_rows` with a function only; got {num_rows} for arrays of {found} rows.")
    _check_countable(found, name=name)
    return found


def check_batch_read(batch: Any, count: int, like: PyTree, *, name: str) -> PyTree:
    """Raises unless a batch has `count` rows, in the shapes and dtypes of `like` if given. Returns the batch."""
    batch = from_foreign_tree(batch, "batch", name=name)
    batch = jax.tree.map(np.asarray, batch, is_leaf=lambda x: isinstance(x, list))
    check_rows_of_data(batch, 1, argument="batch", name=name, finite=False, least=0)
    for path, x in jtu.tree_leaves_with_path(batch):
        if x.shape[0] != count:
            raise ValueError(
                f"`{name}` needs one row for each row requested; at `batch{jtu.keystr(path)}`: expected "
                f"{count} rows, got {x.shape[0]}.\n{_READ}"
            )
    if like is not None:
        _check_like(batch, like, name=name)
    return batch


def _check_like(batch: PyTree, like: PyTree, *, name: str) -> None:
    if jax.tree.structure(batch) != jax.tree.structure(like):
        raise ValueError(
            f"`{name}` needs batches of one structure; expected {jax.tree.structure(like)}, got "
            f"{jax.tree.structure(batch)}."
        )
    for (path, x), first in zip(jtu.tree_leaves_with_path(batch), jax.tree.leaves(like), strict=True):
        if (x.shape[1:], x.dtype) != (first.shape[1:], first.dtype):
            raise ValueError(
                f"`{name}` needs rows of one shape and dtype; at `batch{jtu.keystr(path)}`: expected "
                f"{leaf_text(first[:1])}, got {leaf_text(x[:1])}.\nPad rows, or convert them."
            )


def check_no_scan(scan: Any, *, name: str) -> None:
    """Raises for `scan`: a step is one compiled call on a batch."""
    if scan is not None:
        raise TypeError(
            f"`{name}` takes `scan` only for data in arrays; with a `RowReader` each batch is a separate compiled call."
        )


def mapped_part_message(shape: tuple[int, ...]) -> str:
    """The message that a part of a memory-mapped array would be sent by value."""
    return (
        f"`train.RowReader` pickles memory-mapped arrays by file name; the array of shape {shape} is a view of part of "
        "a file, and would be pickled by value.\n"
        "Pass the complete array, and choose `rows`; or give `fleet.fit` a function that makes the reader on a worker."
    )
