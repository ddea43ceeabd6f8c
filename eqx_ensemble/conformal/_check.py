import math
from fractions import Fraction
from typing import Any

import numpy as np
from jax import Array
from jax.typing import ArrayLike

from .. import _check
from .._caller import caller
from .._check import (
    ALL_ROWS,
    CountedRows,
    check_counted_rows,
    check_entries,
    check_floating,
    check_logits,
    check_no_nan,
    check_regression,
    concrete,
    first_text,
    promote,
    value_error,
)
from .._warnings import warn
from ._outward import enclose


def check_rows(**arrays: ArrayLike) -> tuple[Array, ...]:
    """Raises unless arrays are floating-point `(rows,)` with at least one row. Returns them, rounded up if at all."""
    checked = promote(*(check_floating(argument, values) for argument, values in arrays.items()))
    _one_axis(next(iter(arrays)), checked[0])
    return tuple(enclose(*pair).upper for pair in zip(arrays.values(), checked, strict=True))


def check_targets(targets: ArrayLike, row_weights: ArrayLike | None, **predictions: ArrayLike) -> tuple[Any, ...]:
    """Raises unless predictions and targets are `(rows,)` with at least one row, without NaN in rows that count.

    `held_out` predictions may be NaN where no member held a row out. Returns predictions, `enclose` of the targets, and
    which rows count.
    """
    *checked, observed = check_regression(targets, members=False, **predictions)
    _one_axis(next(iter(predictions)), checked[0])
    rows = check_counted_rows(row_weights, checked[0].shape)
    for argument, values in {"targets": targets, **predictions}.items():
        if argument != "held_out":
            check_no_nan(argument, values, rows)
    return *checked, enclose(targets, observed), rows


def check_row_logits(logits: ArrayLike, *, argument: str = "logits") -> Array:
    """Raises unless logits are `(rows, classes)` with at least one row. Returns them as an array."""
    check_floating(argument, logits)
    checked = check_logits(logits, members=False)
    if checked.ndim != 2 or checked.shape[0] == 0:
        fix = "Combine the members first: `combine.mixture(logits)`. Several axes of rows? Reshape them to one."
        raise value_error(f"`{argument}` of shape (rows, classes), at least one row", f"got shape {checked.shape}", fix)
    return checked


def _one_axis(argument: str, array: Array) -> None:
    if array.ndim != 1 or array.size == 0:
        fix = (
            "The entries of a row are not exchangeable: combine members first, and fit each output separately, "
            "with `jax.vmap` over the last axis."
        )
        raise value_error(f"`{argument}` of shape (rows,), at least one row", f"got shape {array.shape}", fix)


def check_scales(scale: ArrayLike, rows: CountedRows = ALL_ROWS) -> None:
    """Raises unless scales are positive; checked where concrete."""
    fix = "Add a floor: `jnp.maximum(scale, 1e-6)`."
    check_entries("a `scale` above zero", scale, lambda host: host <= 0, fix, rows)


def check_rows_of_folds(num_rows: int, expected: int) -> None:
    """Raises unless predictions have as many rows as the folds."""
    if num_rows != expected:
        fix = "Use `row_weights` to exclude rows."
        raise value_error("predictions of all rows of the folds", f"expected {expected} rows, got {num_rows}", fix)


def check_members_of_folds(num_folds: int, num_members: int) -> int:
    """Raises unless all folds have equally many members. Returns their number per fold."""
    times, rest = divmod(num_members, num_folds)
    if rest or times == 0:
        got = f"fitted on {num_folds}, got {num_members}"
        fix = "Pass the predictions of all fitted members, in order."
        raise value_error("predictions of equally many members for each fold", got, fix)
    return times


def check_held_out(held_out: ArrayLike, unseen: Array, rows: CountedRows, *, every_row: bool) -> int:
    """Raises for NaN in rows that a member held out. Returns the number of counted rows that none held out."""
    host, held_out_by, kept = concrete(held_out), concrete(unseen), rows.known
    if host is None or held_out_by is None or kept is None:
        return 0
    never = ~held_out_by.any(axis=0) & kept
    if every_row and never.any():
        got = f"got {int(never.sum())} rows that no fold holds out, the first is row {int(np.argmax(never))}"
        raise value_error("folds that hold out every row", got, "Exclude these rows with `row_weights`.")
    wrong = np.isnan(host) & kept & ~never
    if wrong.any():
        fix = "Did members diverge? Exclude their rows with `row_weights`, or retrain them."
        raise value_error("`held_out` predictions without NaN", first_text(host, wrong), fix)
    return int(never.sum())


def check_level(level: float) -> None:
    """Raises unless `level` is a number between zero and one; warns if it looks like the share of errors."""
    _check.check_level(level)
    if level < 0.5:
        warn(
            f"`{caller()}` got `level={float(level):g}`, the share of rows to cover: most are left out.\nFor an error "
            f"rate of {float(level):g} pass `level={1 - float(level):g}`."
        )


def warn_of_infinite(rank: int, num_rows: int, infinite: int, level: Fraction) -> None:
    """Warns if there are too few rows for the level."""
    if rank <= num_rows - infinite:
        return
    if infinite:
        because = f"{infinite} of {num_rows} rows were drawn by every member, so that they have no held-out prediction"
        fix = "Train more members, or ask for a lower level."
    else:
        because = f"{num_rows} rows are too few for level {float(level):g}"
        fix = enough_rows_text(level)
    warn(f"`{caller()}`: {because}; every prediction is unbounded. {fix}")


def enough_rows_text(level: Fraction) -> str:
    """Text with the number of rows that give a finite quantile."""
    if level >= 1:
        return "Ask for a lower level."
    return f"Hold out {math.ceil(level / (1 - level))} rows or more, or ask for a lower level."


def check_num_classes(expected: int, got: int) -> None:
    """Raises unless logits have the number of classes of the fit."""
    if got != expected:
        fix = "Pass logits of the same classes, on the last axis."
        raise value_error("logits of the classes that it was fitted on", f"expected {expected}, got {got}", fix)


def check_one_fold(in_test: Array, rows: CountedRows) -> None:
    """Raises unless every row that counts is in the test part of exactly one fold; checked where concrete."""
    host, kept = concrete(in_test), rows.known
    if host is None or kept is None:
        return
    times = host.sum(axis=0)
    wrong = (times != 1) & kept
    if wrong.any():
        first = int(np.argmax(wrong))
        got = f"got {int(wrong.sum())} others, the first is row {first}, which {int(times[first])} folds hold out"
        fix = "Use `resample.folds`, or exclude these rows with `row_weights`."
        raise value_error("folds that hold out every row once", got, fix)
