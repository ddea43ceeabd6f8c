from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ._arrays import check_array, check_values, concrete, first_text, needs_message
from ._keys import check_key
from ._leaves import is_traced, kind_text
from ._options import check_positive_int

Split = tuple[np.ndarray, np.ndarray]
Labels = tuple[list[Any], np.ndarray]


def check_draw(name: str, num_rows: Any, num_members: Any, key: Any) -> tuple[int, int]:
    """How many rows there are and how many members draw of them, from a key."""
    rows = check_num_rows(name, num_rows)
    count = check_positive_int(num_members, "num_members", name=name)
    check_draw_key(name, key)
    return rows, count


def check_draw_key(name: str, key: Any) -> None:
    """One threefry key whose value is known."""
    check_key(key, name=name)
    if is_traced(key):
        fix = "Draw before `jax.jit` and pass the result in: rows and weights are ordinary arrays."
        raise TypeError(
            needs_message(name, "a key whose value is known, because it draws on the host", "got a traced key", fix)
        )


def check_num_rows(name: str, num_rows: Any) -> int:
    """A number of rows that 32-bit indices can count."""
    if np.ndim(num_rows) > 0:
        got = f"got an array of shape {np.shape(num_rows)}"
        raise TypeError(needs_message(name, "the number of rows as `num_rows`", got, "Pass `len(x)`."))
    rows = check_positive_int(num_rows, "num_rows", name=name)
    if rows >= 2**31:
        raise ValueError(
            needs_message(
                name, "`num_rows` below 2**31, as rows are int32", f"got {rows}", "Resample parts of the data."
            )
        )
    return rows


def check_draw_size(name: str, size: Any, num_rows: int, *, replace: bool) -> int:
    """How many rows a member draws, from a count or from a fraction of the rows."""
    if isinstance(size, float | np.floating):
        if not 0 < size <= 1:
            fix = "A count is passed as an integer: `size=100`."
            raise ValueError(needs_message(name, "a fraction `size` above 0 and at most 1", f"got {size}", fix))
        count = round(float(size) * num_rows)
        if count == 0:
            fix = "Pass a larger fraction, or a count."
            raise ValueError(needs_message(name, "a `size` of at least one row", f"got {size} of {num_rows} rows", fix))
        return count
    count = check_positive_int(size, "size", name=name)
    if not replace and count > num_rows:
        fix = "Drawing with replacement is `bootstrap`, which has no such limit."
        raise ValueError(
            needs_message(name, "`size` of at most the number of rows", f"got {count} of {num_rows} rows", fix)
        )
    return count


def check_row_labels(name: str, argument: str, labels: Any, num_rows: int) -> Labels:
    """The different labels among `(rows,)` of any discrete kind, in order, and the position there of every row's."""
    if is_traced(labels):
        fix = "Resample before `jax.jit`."
        raise TypeError(needs_message(name, f"`{argument}` whose values are known", "got a traced array", fix))
    array = np.asarray(labels)
    if array.shape != (num_rows,):
        fix = "Labels stand in the order of the rows."
        if array.shape == (num_rows, 1):
            fix = f"Pass `{argument}[:, 0]`."
        elif array.ndim == 2 and len(array) == num_rows:
            fix = f"One-hot labels? Pass `{argument}.argmax(axis=1)`."
        raise ValueError(
            needs_message(
                name, f"one label per row in `{argument}`", f"expected shape {(num_rows,)}, got {array.shape}", fix
            )
        )
    if array.dtype.kind not in "biuSUTO":
        fix = "Real-valued targets are binned first: `np.digitize(y, np.quantile(y, [0.25, 0.5, 0.75]))`."
        raise TypeError(needs_message(name, f"discrete labels in `{argument}`", f"got dtype {array.dtype}", fix))
    try:
        different, position = np.unique(array, return_inverse=True)
    except TypeError as error:
        fix = "Missing labels? Give them a label of their own."
        raise TypeError(
            needs_message(
                name, f"labels of one kind in `{argument}`", f"got objects that cannot be sorted: {error}", fix
            )
        ) from error
    return different.tolist(), position


def check_shares(name: str, names: list[Any], counts: np.ndarray, shares: np.ndarray) -> None:
    """No class is left out of a stratified draw."""
    if (shares == 0).any():
        lost = int(np.argmin(shares))
        got = f"got {shares.sum()} of {counts.sum()} rows, none of the {counts[lost]} of class {names[lost]!r}"
        raise ValueError(
            needs_message(
                name, "a `size` that leaves rows of every class", got, "Pass a larger `size`, or no `stratify`."
            )
        )


def check_num_folds(name: str, num_folds: Any, num_rows: int, classes: Labels | None, groups: Labels | None) -> int:
    """Folds for which there are enough rows, rows of every class, and groups."""
    count = check_positive_int(num_folds, "num_folds", name=name)
    if not 2 <= count <= num_rows:
        fix = "A fold holds a row at least, and there is a fold to test on and one to train on."
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
        fix = "Pass fewer folds; `groups` says which rows belong together, `stratify` which are of one class."
        raise ValueError(
            needs_message(name, "as many groups as folds", f"got {count} folds and {len(groups[0])} groups", fix)
        )
    return count


def check_splits(name: str, pairs: Any, num_rows: int) -> list[Split]:
    """Pairs of row indices: each part holds a row, the two have none in common, and no row is tested twice."""
    if not isinstance(pairs, Iterable):
        fix = "Pass what the splitter splits: `splitter.split(x, y)`."
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
            raise ValueError(
                needs_message(name, "test rows that differ", got, "Repeated rows belong to training only.")
            )
        both = np.intersect1d(train, unique)
        if both.size:
            got = f"got {both.size} of them in split {i}, the first is row {both[0]}"
            raise ValueError(
                needs_message(
                    name,
                    "no row in both the train and the test part of a split",
                    got,
                    "The test would be of seen rows.",
                )
            )
        checked.append((train, test))
    if not checked:
        fix = "A generator that was used up? Call `splitter.split(x, y)` anew."
        raise ValueError(needs_message(name, "at least one split", "got none", fix))
    return checked


def _indices(name: str, part: Any, words: str, num_rows: int) -> np.ndarray:
    rows = np.asarray(part)
    if rows.dtype == bool:
        raise TypeError(
            needs_message(name, "integer row indices", f"got booleans as the {words}", "Pass `np.flatnonzero(mask)`.")
        )
    if rows.ndim != 1 or rows.size == 0:
        fix = "Every split needs rows to train on and rows to test on."
        raise ValueError(
            needs_message(name, "row indices `(n,)`, at least one", f"got shape {rows.shape} as the {words}", fix)
        )
    if rows.dtype.kind not in "iu":
        fix = "Pass the rows' positions, not their labels."
        raise TypeError(needs_message(name, "integer row indices", f"got dtype {rows.dtype} as the {words}", fix))
    _in_range(name, rows, num_rows, f" of the {words}")
    return rows


def check_one_length(name: str, lengths: list[int], uneven: Any) -> None:
    """Training parts differ by a row at most, or it was said what to do about it."""
    choices = ("trim", "repeat")
    if uneven is not None and (not isinstance(uneven, str) or uneven not in choices):
        raise ValueError(
            needs_message(
                name, "`uneven` to be 'trim' or 'repeat'", f"got {uneven!r}", "`None` refuses lengths that differ much."
            )
        )
    short, long = min(lengths), max(lengths)
    if uneven is None and long - short > 1:
        fix = (
            '`uneven="trim"` leaves rows of the longer ones out, `uneven="repeat"` repeats rows of the shorter ones; '
            "with either, weights `in_train` train on exactly the rows of each split."
        )
        raise ValueError(
            needs_message(name, "training sets of one length, give or take a row", f"got {short} to {long} rows", fix)
        )


def check_held_out(
    name: str, predictions: ArrayLike, shape: tuple[int, ...] | None = None, axes: str = "rows"
) -> Array:
    """Predictions `(members, rows, ...)`, in the dtype that is computed in."""
    array = check_values(name, "predictions", predictions)
    if array.ndim < 2:
        fix = "One member? Add a leading axis: `predictions[None]`."
        raise ValueError(
            needs_message(name, "`predictions` of shape (members, rows, ...)", f"got shape {array.shape}", fix)
        )
    if shape is not None and array.shape[:2] != shape:
        fix = 'Predictions of all rows are `rows="all"`, of `folds.test` alone `rows="test"`.'
        got = f"expected ({shape[0]}, {shape[1]}, ...), got {array.shape}"
        raise ValueError(
            needs_message(name, f"`predictions` (members, {axes}, ...) of the members and rows of the folds", got, fix)
        )
    return array


def check_folds(name: str, value: Any, kind: type) -> None:
    """Folds, not one of their parts."""
    if not isinstance(value, kind):
        fix = "Of splits made elsewhere, `from_splits(splits, num_rows)` makes one."
        raise TypeError(needs_message(name, f"`folds` to be a `{kind.__name__}`", f"got {kind_text(value)}", fix))


def check_drawn(name: str, values: ArrayLike, num_rows: int, *, num_members: int | None = None) -> Array:
    """Rows `(members, n)`, which are integers, or weights `(members, rows)`, which are not."""
    array = check_array(name, "drawn", values)
    if num_members is not None and array.shape[:1] != (num_members,):
        got = f"expected {num_members} members as in `predictions`, got shape {array.shape}"
        raise ValueError(
            needs_message(
                name, "rows or weights of the members that predict", got, "Members stand in one order in both."
            )
        )
    if jnp.issubdtype(array.dtype, jnp.integer):
        return check_rows(name, values, num_rows)
    if array.ndim != 2 or array.shape[1] != num_rows or array.shape[0] == 0:
        fix = "Integers are taken as rows `(members, n)`, all other numbers as weights `(members, rows)`."
        raise ValueError(
            needs_message(
                name, f"weights of shape (members, {num_rows})", f"got {array.dtype} of shape {array.shape}", fix
            )
        )
    host = concrete(values)
    if host is not None and host.dtype != bool:
        host = host.astype(np.float64)
        wrong = ~np.isfinite(host) | (host < 0)
        if wrong.any():
            raise ValueError(
                needs_message(
                    name, "finite weights of zero or more", first_text(host, wrong), "A row of weight zero is not seen."
                )
            )
    return array


def check_rows(name: str, values: ArrayLike, num_rows: int) -> Array:
    """Row indices `(members, n)`; a range check where concrete."""
    array = check_array(name, "rows", values)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        fix = "Weights say themselves how often a row counts: they need no counting."
        raise TypeError(
            needs_message(name, "integer rows (members, n)", f"got {array.dtype} of shape {array.shape}", fix)
        )
    if array.ndim != 2 or 0 in array.shape:
        fix = "One member? Add a leading axis: `rows[None]`."
        raise ValueError(
            needs_message(name, "rows of shape (members, n), at least one", f"got shape {array.shape}", fix)
        )
    host = concrete(values)
    if host is not None:
        _in_range(name, host, num_rows, "")
    return array


def _in_range(name: str, rows: np.ndarray, num_rows: int, words: str) -> None:
    wrong = (rows < 0) | (rows >= num_rows)
    if wrong.any():
        fix = "Rows count from 0; `num_rows` is the length of the data that they index."
        raise IndexError(needs_message(name, f"rows from 0 to {num_rows - 1}", first_text(rows, wrong) + words, fix))


def drawn_rows(drawn: Any, rows: Any) -> Any:
    """What members were trained on: what is given, or the rows that `fit` was given."""
    if drawn is None and rows is None:
        raise TypeError(
            "`Run.out_of_bag` needs to know what the members were trained on: `fit` was given no `rows`.\n"
            "Pass their weights `(members, rows)` as `drawn`; without either, every member saw every row."
        )
    return rows if drawn is None else drawn


def folds_of_members(num_folds: int, num_members: int, *, name: str) -> None:
    """One fold per member."""
    if num_folds != num_members:
        raise ValueError(f"`{name}` needs one fold per member, got {num_folds} folds and {num_members} members.")


def no_copies(revived: list[Any], *, name: str) -> None:
    """Nobody goes on with weights that another member's rows have trained."""
    copied = [event for event in revived if event.donor is not None]
    if copied:
        words = ", ".join(f"{event.member} of {event.donor}" for event in copied)
        raise ValueError(
            f"`{name}` cannot tell what members have seen: some became copies of others ({words}), which trained on "
            "other rows.\nLet members that diverge start afresh, with `on_diverge=train.Revive(make)`, or freeze them."
        )


def rows_of_folds(num_rows: int, folds: Any, rows: Any, *, name: str) -> None:
    """The folds are those of the data, and no member trained on its own."""
    expected = folds.in_test.shape[1]
    if num_rows != expected:
        raise ValueError(
            f"`{name}` needs all rows of the data that the folds are of: expected {expected}, got {num_rows}."
        )
    if rows is None:
        return
    for member, (seen, tested) in enumerate(zip(np.asarray(rows), np.asarray(folds.in_test), strict=True)):
        if tested[seen].any():
            raise ValueError(
                f"`{name}` was given other folds than `fit`: the member at place {member} trained on "
                f"{int(tested[np.unique(seen)].sum())} rows that it would be tested on."
            )
