from collections.abc import Iterable
from typing import Any

import numpy as np

from .._check import (
    check_positive_int,
    check_word,
    kind_text,
    needs_message,
)
from ._check import Labels, check_in_range

Split = tuple[np.ndarray, np.ndarray]


def check_num_folds(name: str, num_folds: Any, num_rows: int, classes: Labels | None, groups: Labels | None) -> int:
    """Raises if there are more folds than rows, rows of a class, or groups. Returns the number of folds."""
    count = check_positive_int(num_folds, "num_folds", name=name)
    if not 2 <= count <= num_rows:
        fix = "Each fold has at least one row, and there are at least two folds."
        raise ValueError(
            needs_message(
                name, "`num_folds` from 2 to the number of rows", f"got {count} folds of {num_rows} rows", fix
            )
        )
    if classes is not None and (sizes := np.bincount(classes[1])).min() < count:
        got = f"got {count} folds and {sizes.min()} rows of class {classes[0][sizes.argmin()]!r}"
        raise ValueError(
            needs_message(name, "as many rows of every class as folds", got, "Pass fewer folds, or merge rare classes.")
        )
    if groups is not None and len(groups[0]) < count:
        fix = "Pass fewer folds; `groups` are rows that belong together, `stratify` are classes."
        raise ValueError(
            needs_message(name, "as many groups as folds", f"got {count} folds and {len(groups[0])} groups", fix)
        )
    return count


def check_splits(name: str, pairs: Any, num_rows: int) -> list[Split]:
    """Raises unless splits are pairs of nonempty, disjoint row indices, with distinct test rows. Returns them."""
    if not isinstance(pairs, Iterable):
        fix = "Pass the result of a splitter: `splitter.split(x, y)`."
        raise TypeError(
            needs_message(name, "an iterable of `(train, test)` row indices", f"got {kind_text(pairs)}", fix)
        )
    checked = []
    for i, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            got = f"got {kind_text(pair)} as split {i}"
            raise TypeError(
                needs_message(
                    name, "pairs `(train, test)` of row indices", got, "Put one split in a list: `[(train, test)]`."
                )
            )
        train = _indices(name, pair[0], f"train rows of split {i}", num_rows)
        test = _indices(name, pair[1], f"test rows of split {i}", num_rows)
        unique, times = np.unique(test, return_counts=True)
        if (times > 1).any():
            got = f"got row {unique[times > 1][0]} {times.max()} times in the test rows of split {i}"
            raise ValueError(needs_message(name, "test rows that differ", got, "Only training rows may repeat."))
        both = np.intersect1d(train, unique)
        if both.size:
            got = f"got {both.size} of them in split {i}, the first is row {both[0]}"
            raise ValueError(
                needs_message(
                    name,
                    "no row in both the train and the test part of a split",
                    got,
                    "The test rows would not be held out.",
                )
            )
        checked.append((train, test))
    if not checked:
        fix = "An exhausted generator? Call `splitter.split(x, y)` again."
        raise ValueError(needs_message(name, "at least one split", "got none", fix))
    return checked


def _indices(name: str, part: Any, words: str, num_rows: int) -> np.ndarray:
    rows = np.asarray(part)
    if rows.dtype == bool:
        raise TypeError(
            needs_message(name, "integer row indices", f"got booleans as the {words}", "Pass `np.flatnonzero(mask)`.")
        )
    if rows.ndim != 1 or rows.size == 0:
        fix = "Each split needs training rows and test rows."
        raise ValueError(
            needs_message(name, "row indices `(n,)`, at least one", f"got shape {rows.shape} as the {words}", fix)
        )
    if rows.dtype.kind not in "iu":
        fix = "Pass the rows' positions, not their labels."
        raise TypeError(needs_message(name, "integer row indices", f"got dtype {rows.dtype} as the {words}", fix))
    check_in_range(name, rows, num_rows, f" of the {words}")
    return rows


def check_one_length(name: str, lengths: list[int], uneven: Any) -> None:
    """Raises unless the lengths of training parts differ by at most one row or `uneven` is given."""
    check_word(uneven, "uneven", ("trim", "repeat", None), name=name)
    short, long = min(lengths), max(lengths)
    if uneven is None and long - short > 1:
        fix = (
            '`uneven="trim"` drops rows of the longer ones, `uneven="repeat"` repeats rows of the shorter ones; '
            "with either, weights `in_train` train on exactly the rows of each split."
        )
        raise ValueError(
            needs_message(
                name, "training sets whose lengths differ by at most one row", f"got {short} to {long} rows", fix
            )
        )
