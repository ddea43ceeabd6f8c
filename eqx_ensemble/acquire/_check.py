from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike

from .._check import (
    CountedRows,
    as_column,
    check_array,
    check_counted_rows,
    check_entries,
    check_positive_int,
    check_positive_scalar,
    check_same_shape,
    check_values,
    check_variance,
    check_weights,
    check_word,
    concrete,
    promote,
    type_error,
    value_error,
)

Mode = Literal["min", "max"]


class Candidates(NamedTuple):
    """Checked predictions `(members, *batch)`, of which ignored candidates are overwritten."""

    mean: Array
    variance: Array | None
    weights: Array | None
    rows: CountedRows


class Start(NamedTuple):
    """Checked arguments of a greedy choice: rows that are chosen, rows that may be picked, costs and budget."""

    chosen: Array
    may_pick: Array
    costs: Array | None
    budget: Array | None


def check_sign(mode: Mode) -> int:
    """Raises unless `mode` is "min" or "max". Returns the factor that makes larger values better."""
    check_word(mode, "mode", ("min", "max"))
    return 1 if mode == "max" else -1


def check_candidates(
    mean: ArrayLike, variance: ArrayLike | None, weights: ArrayLike | None, row_weights: ArrayLike | None
) -> Candidates:
    """Raises for invalid predictions, weights or row weights. Returns them."""
    means = check_values("mean", mean)
    if variance is None:
        variances = None
        rows = check_counted_rows(row_weights, means.shape[1:])
    else:
        variances = check_values("variance", variance)
        check_same_shape(mean=means, variance=variances)
        rows = check_counted_rows(row_weights, means.shape[1:])
        check_variance(variance, positive=False, rows=rows, weights=weights)
        means, variances = promote(means, variances)
        variances = rows.blank(variances, before=1, fill=1)
    convex = check_weights(weights, means.shape[0], means.dtype, shape=means.shape[1:], rows=rows)
    return Candidates(rows.blank(means, before=1), variances, convex, rows)


def check_best(best: ArrayLike, like: Array) -> Array:
    """Raises unless `best` is a finite number or one number per member. Returns it with the axes of `like`."""
    array = check_array("best", best)
    if not (jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)):
        fix = "It is the best value that was observed."
        raise type_error("a real number as `best`", f"got dtype {array.dtype}", fix)
    if array.shape not in ((), like.shape[:1]):
        got = f"expected shape () or {like.shape[:1]}, got {array.shape}"
        raise value_error("`best` as one number, or one per member", got, "Pass the best observed value alone.")
    host = concrete(best)
    if host is not None and not host.ndim and not np.isfinite(host):
        fix = "Nothing is observed yet? Draw the first candidates at random."
        raise value_error("a finite `best`", f"got {host}", fix)
    return as_column(array.astype(like.dtype), like.ndim) if array.ndim else array.astype(like.dtype)


def check_samples(
    predictions: ArrayLike, weights: ArrayLike | None, row_weights: ArrayLike | None
) -> tuple[Array, Array | None, CountedRows]:
    """Raises unless predictions are `(members, candidates)`, without NaN where known. Returns them as checked."""
    values = check_values("predictions", predictions)
    if values.ndim != 2:
        fix = "For several pools, map the function with `jax.vmap`."
        raise value_error("`predictions` of shape (members, candidates)", f"got shape {values.shape}", fix)
    rows = check_counted_rows(row_weights, values.shape[1:])
    convex = check_weights(weights, values.shape[0], values.dtype)
    check_no_nan_of_members("predictions", predictions, weights, rows)
    return rows.blank(values, before=1), convex, rows


def check_no_nan_of_members(argument: str, values: ArrayLike, weights: ArrayLike | None, rows: CountedRows) -> None:
    """Raises for NaN in candidates and members that count, if the values are concrete."""
    host, share = concrete(values), None if weights is None else concrete(weights)
    if host is None or rows.known is None or (weights is not None and share is None):
        return
    kept = rows.known if rows.known.ndim == 0 else as_column(rows.known, host.ndim - 1)[None]
    kept = kept if share is None else kept & as_column(share != 0, host.ndim)
    wrong = np.isnan(host.astype(np.float64)) & kept
    if wrong.any():
        fix = "Leave these candidates out by `row_weights`, or these members by `weights`: a pick needs numbers."
        raise value_error(f"`{argument}` without NaN", f"got {int(wrong.sum())} of them", fix)


def check_size(size: int, argument: str, may_pick: Array) -> int:
    """Raises unless `size` is positive, and at most the number of candidates that may be picked, if known."""
    number, host = check_positive_int(size, argument), concrete(may_pick)
    left = may_pick.shape[0] if host is None else int(host.sum())
    if number > left:
        raise value_error(f"at least `{argument}` candidates", f"got {left} for {number} picks", "Ask for fewer.")
    return number


def check_start(
    num_candidates: int,
    dtype: jnp.dtype,
    rows: CountedRows,
    chosen: ArrayLike | None,
    costs: ArrayLike | None,
    budget: ArrayLike | None,
) -> Start:
    """Raises for invalid rows that are chosen, costs or budget. Returns them."""
    may_pick = jnp.ones(num_candidates, bool) if rows.counted is None else rows.counted
    taken = _check_chosen(chosen, num_candidates, rows)
    # Padding, and traced rows that do not count, are moved beyond the last candidate, where nothing is set.
    taken = jnp.where((taken < 0) | ~may_pick[taken], num_candidates, taken)
    may_pick = may_pick.at[taken].set(False, mode="drop")
    taken = jnp.where(taken == num_candidates, -1, taken)
    if budget is not None and costs is None:
        raise value_error("`costs` with a `budget`", "got a budget alone", "Costs of one each? Pass `size` alone.")
    if costs is None:
        return Start(taken, may_pick, None, None)
    prices = check_array("costs", costs)
    if prices.shape != (num_candidates,):
        got = f"expected shape {(num_candidates,)}, got {prices.shape}"
        raise value_error("one of `costs` per candidate", got, "Nothing is broadcast.")
    wrong = lambda host: ~(np.isfinite(host.astype(np.float64)) & (host > 0))
    check_entries("finite `costs` above zero", costs, wrong, "Gains are divided by them.", rows)
    if budget is not None:
        budget = check_positive_scalar("budget", budget, dtype, fix="It is the sum of the costs of all picks.")
    return Start(taken, may_pick, rows.blank(prices.astype(dtype), fill=1), budget)


def _check_chosen(chosen: ArrayLike | None, num_candidates: int, rows: CountedRows) -> Array:
    if chosen is None:
        return jnp.zeros(0, jnp.int32)
    array = check_array("chosen", chosen)
    if array.ndim != 1 or not jnp.issubdtype(array.dtype, jnp.integer):
        got = f"got dtype {array.dtype}, shape {array.shape}"
        raise type_error("`chosen` as integer indices `(chosen,)`", got, "Such as `picks.indices`.")
    host = concrete(chosen)
    if host is not None:
        known = host[host != -1]  # the padding of `Picks.indices`
        if ((known < 0) | (known >= num_candidates)).any() or len(np.unique(known)) < len(known):
            needs = f"different indices from 0 to {num_candidates - 1} in `chosen`"
            raise value_error(needs, f"got {host.tolist()}", "-1 stands for no candidate.")
        if rows.known is not None and rows.known.ndim and not rows.known[known].all():
            fix = "Rows that are chosen are not picked again: leave `row_weights` True there."
            raise value_error("`chosen` candidates that count", f"got {known[~rows.known[known]].tolist()}", fix)
    return array.astype(jnp.int32)
