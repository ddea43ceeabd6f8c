from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from .._brief import brief_repr
from .._caller import caller
from .._check import check_positive_int, check_word, kind_text, missing_extra_message, type_error, value_error
from .._keys import key_words
from ._check import Labels, check_draw_key, check_in_range, check_num_rows, check_row_labels

Split = tuple[np.ndarray, np.ndarray]


def check_num_folds(num_folds: Any, num_rows: int, classes: Labels | None, groups: Labels | None) -> int:
    """Raises if there are more folds than rows, rows of a class, or groups. Returns the number of folds."""
    count = check_positive_int(num_folds, "num_folds")
    if not 2 <= count <= num_rows:
        fix = "Each fold has at least one row, and there are at least two folds."
        raise value_error("`num_folds` from 2 to the number of rows", f"got {count} folds of {num_rows} rows", fix)
    if classes is not None and (sizes := np.bincount(classes[1])).min() < count:
        got = f"got {count} folds and {sizes.min()} rows of class {classes[0][sizes.argmin()]!r}"
        raise value_error("as many rows of every class as folds", got, "Pass fewer folds, or merge rare classes.")
    if groups is not None and len(groups[0]) < count:
        fix = "Pass fewer folds; `groups` are rows that belong together, `stratify` are classes."
        raise value_error("as many groups as folds", f"got {count} folds and {len(groups[0])} groups", fix)
    return count


def check_splits(pairs: Any, num_rows: int) -> list[Split]:
    """Raises unless splits are pairs of nonempty, disjoint row indices, with distinct test rows. Returns them."""
    if not isinstance(pairs, Iterable):
        fix = "Pass the result of a splitter: `splitter.split(x, y)`."
        raise type_error("an iterable of `(train, test)` row indices", f"got {kind_text(pairs)}", fix)
    checked = []
    for i, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            got = f"got {kind_text(pair)} as split {i}"
            raise type_error("pairs `(train, test)` of row indices", got, "Put one split in a list: `[(train, test)]`.")
        train = _indices(pair[0], f"train rows of split {i}", num_rows)
        test = _indices(pair[1], f"test rows of split {i}", num_rows)
        unique, times = np.unique(test, return_counts=True)
        if (times > 1).any():
            got = f"got row {unique[times > 1][0]} {times.max()} times in the test rows of split {i}"
            raise value_error("test rows that differ", got, "Only training rows may repeat.")
        both = np.intersect1d(train, unique)
        if both.size:
            got = f"got {both.size} of them in split {i}, the first is row {both[0]}"
            raise value_error(
                "no row in both the train and the test part of a split", got, "The test rows would not be held out."
            )
        checked.append((train, test))
    if not checked:
        fix = "An exhausted generator? Call `splitter.split(x, y)` again."
        raise value_error("at least one split", "got none", fix)
    return checked


def _indices(part: Any, words: str, num_rows: int) -> np.ndarray:
    rows = np.asarray(part)
    if rows.dtype == bool:
        raise type_error("integer row indices", f"got booleans as the {words}", "Pass `np.flatnonzero(mask)`.")
    if rows.ndim != 1 or rows.size == 0:
        fix = "Each split needs training rows and test rows."
        raise value_error("row indices `(n,)`, at least one", f"got shape {rows.shape} as the {words}", fix)
    if rows.dtype.kind not in "iu":
        fix = "Pass the rows' positions, not their labels."
        raise type_error("integer row indices", f"got dtype {rows.dtype} as the {words}", fix)
    check_in_range(rows, num_rows, f" of the {words}")
    return rows


Uneven = Literal["trim", "repeat"]


class Folds(NamedTuple):
    """The training and test rows of each member: one split of the data per member.

    - `train`: row indices `(members, train)` for `fit(..., rows=folds.train)`, as many for every member.
    - `test`: row indices `(members, test)`; shorter test parts are padded with their last row.
    - `valid`: `(members, test)`, `False` where `test` is padded.
    - `in_train`, `in_test`: booleans `(members, rows)`, the exact parts: rows that `train` drops are in `in_train`.
    """

    train: Int32[Array, "members train"]
    test: Int32[Array, "members test"]
    valid: Bool[Array, "members test"]
    in_train: Bool[Array, "members rows"]
    in_test: Bool[Array, "members rows"]

    __repr__ = brief_repr


def folds(
    num_rows: int,
    num_folds: int,
    *,
    stratify: Any = None,
    groups: Any = None,
    uneven: Uneven | None = None,
    key: Any = None,
) -> Folds:
    """Cross-validation: member `i` is tested on fold `i`, and trained on the other folds.

    If `num_folds` does not divide `num_rows`, some training parts have one extra row, and `train` drops one of
    their rows, a different one for each member.

    **Arguments:**

    - `num_rows`: the number of rows, `len(x)`.
    - `num_folds`: the number of folds and of members, at least 2.
    - `stratify`: discrete labels `(rows,)`: class proportions are equal in all folds, up to rounding.
    - `groups`: discrete labels `(rows,)`: all rows of a group are in one fold. Both give the folds of scikit-learn's
        `StratifiedKFold`, `GroupKFold` or `StratifiedGroupKFold`.
    - `uneven`: for training parts that differ by more than one row, `"trim"` drops rows of longer
        parts, `"repeat"` repeats rows of shorter parts, both evenly spaced.
    - `key`: one key, to shuffle the rows; without it, folds are consecutive rows.

    **Returns:**

    [`eqx_ensemble.resample.Folds`][], with one member per fold.

    **Raises:**

    - `ValueError` for more folds than rows, rows of a class or groups, and for training parts that require `uneven`.
    - `ImportError` for `stratify` and `groups` without scikit-learn: `pip install 'eqx_ensemble[sklearn]'`.

    ```python
    folds = ee.resample.folds(100, 5, key=key)
    folds.train.shape  # (5, 80)
    ```
    """
    num_rows = check_num_rows(num_rows)
    classes = None if stratify is None else check_row_labels("stratify", stratify, num_rows)
    of_group = None if groups is None else check_row_labels("groups", groups, num_rows)
    num_folds = check_num_folds(num_folds, num_rows, classes, of_group)
    shuffle = None
    if key is not None:
        check_draw_key(key)
        shuffle = np.random.RandomState(key_words(key, 1, purpose="folds")[0])
    if classes is not None or of_group is not None:
        parts = _of_sklearn(num_folds, classes and classes[1], of_group and of_group[1], shuffle)
        return _folds(parts, num_rows, uneven)

    order = np.arange(num_rows) if shuffle is None else shuffle.permutation(num_rows)
    fold_of = np.empty(num_rows, np.int32)
    for i, part in enumerate(np.array_split(order, num_folds)):
        fold_of[part] = i
    parts = [(np.flatnonzero(fold_of != i), np.flatnonzero(fold_of == i)) for i in range(num_folds)]
    return _folds(parts, num_rows, uneven)


def from_splits(splits: Iterable[tuple[Any, Any]], num_rows: int, *, uneven: Uneven | None = None) -> Folds:
    """Folds from a scikit-learn splitter or any `(train, test)` row indices: one split per member.

    **Arguments:**

    - `splits`: an iterable of pairs of integer arrays `(train, test)`, such as `splitter.split(x, y)`.
    - `num_rows`: the number of rows, `len(x)`.
    - `uneven`: as in [`eqx_ensemble.resample.folds`][]; `TimeSeriesSplit` and `GroupKFold` require it.

    **Returns:**

    [`eqx_ensemble.resample.Folds`][], with one member per split.

    **Raises:**

    - `ValueError` for no splits, empty or overlapping parts, repeated test rows of a split, and training parts that
        require `uneven`.

    ```python
    from sklearn.model_selection import RepeatedStratifiedKFold

    labels = np.arange(60) % 3
    splits = RepeatedStratifiedKFold(n_splits=5, n_repeats=4).split(labels, labels)
    ee.resample.from_splits(splits, 60).train.shape  # (20, 48)
    ```
    """
    num_rows = check_num_rows(num_rows)
    return _folds(check_splits(splits, num_rows), num_rows, uneven)


def _of_sklearn(num_folds: int, classes: np.ndarray | None, groups: np.ndarray | None, shuffle: Any) -> list[Split]:
    try:
        from sklearn.model_selection import GroupKFold, StratifiedGroupKFold, StratifiedKFold
    except ImportError as error:
        raise ImportError(
            missing_extra_message(f"{caller()}(stratify=..., groups=...)", "scikit-learn", "sklearn")
        ) from error
    kind = StratifiedKFold if groups is None else GroupKFold if classes is None else StratifiedGroupKFold
    splitter = kind(num_folds, shuffle=shuffle is not None, random_state=shuffle)
    labels = groups if classes is None else classes
    return list(splitter.split(labels, labels, groups))


def _folds(splits: list[Split], num_rows: int, uneven: Uneven | None) -> Folds:
    lengths = [len(train) for train, _ in splits]
    check_word(uneven, "uneven", ("trim", "repeat", None))
    short, long = min(lengths), max(lengths)
    if uneven is None and long - short > 1:
        fix = (
            '`uneven="trim"` drops rows of the longer ones, `uneven="repeat"` repeats rows of the shorter ones; '
            "with either, weights `in_train` train on exactly the rows of each split."
        )
        raise value_error("training sets whose lengths differ by at most one row", f"got {short} to {long} rows", fix)
    length = long if uneven == "repeat" else short
    train = [part[_space_evenly(len(part), length, i / len(splits))] for i, (part, _) in enumerate(splits)]
    longest = max(len(test) for _, test in splits)
    test = [np.pad(part, (0, longest - len(part)), mode="edge") for _, part in splits]
    valid = [np.arange(longest) < len(part) for _, part in splits]
    in_train, in_test = np.zeros((2, len(splits), num_rows), bool)
    for i, (train_part, test_part) in enumerate(splits):
        in_train[i, train_part], in_test[i, test_part] = True, True
    rows = [jnp.asarray(np.stack(part).astype(np.int32)) for part in (train, test)]
    return Folds(*rows, *map(jnp.asarray, (np.stack(valid), in_train, in_test)))


def _space_evenly(length: int, wanted: int, start: float) -> np.ndarray:
    """`wanted` of `length` positions, sorted; dropped or repeated positions are evenly spaced from `start`."""
    return np.sort((np.arange(wanted) * length // wanted + int(start * length)) % length)
