from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike

from .._check import (
    CountedRows,
    as_column,
    check_array,
    check_counted_rows,
    check_entries,
    check_no_nan,
    check_positive_int,
    check_positive_scalar,
    check_scalar,
    check_values,
    check_weights,
    check_word,
    concrete,
    type_error,
    value_error,
)
from .._weighting import blank_unweighted
from ._greedy import Pool

Mode = Literal["min", "max"]


def check_sign(mode: Mode) -> int:
    """Raises unless `mode` is "min" or "max". Returns the factor that makes larger values better."""
    check_word(mode, "mode", ("min", "max"))
    return 1 if mode == "max" else -1


def check_real(argument: str, values: ArrayLike) -> Array:
    """Raises for complex numbers. Returns the array."""
    array = check_array(argument, values)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise type_error(f"real `{argument}`", f"got dtype {array.dtype}", "Take the real part, or the modulus.")
    return array


def check_best(best: ArrayLike, like: Array) -> Array:
    """Raises unless `best` is a finite number or one number per member. Returns it, to be subtracted from `like`."""
    array = check_real("best", best).astype(like.dtype)
    if array.shape not in ((), like.shape[:1]):
        got = f"expected shape () or {like.shape[:1]}, got {array.shape}"
        raise value_error("`best` as one number, or one per member", got, "Pass the best observed value alone.")
    if array.ndim:
        return as_column(array, like.ndim)
    fix = "Nothing is observed yet? Draw the first candidates at random."
    check_entries("a finite `best`", best, lambda host: ~np.isfinite(host), fix)
    return array


def check_factor(argument: str, value: ArrayLike, dtype: jnp.dtype, *, fix: str) -> Array:
    """Raises unless `value` is one number and, if concrete, finite and not negative. Returns it in `dtype`."""
    array = check_scalar(argument, value, dtype)
    check_entries(f"a finite `{argument}` of zero or more", value, lambda x: ~((x >= 0) & np.isfinite(x)), fix)
    return array


def check_samples(
    predictions: ArrayLike, weights: ArrayLike | None, row_weights: ArrayLike | None
) -> tuple[Array, Array | None, CountedRows]:
    """Raises unless predictions are `(members, candidates)`. Returns them, weights, and which candidates count."""
    values = check_values("predictions", predictions)
    check_pool_axes("predictions", values, "(members, candidates)")
    rows = check_counted_rows(row_weights, values.shape[1:])
    convex = check_weights(weights, values.shape[0], values.dtype)
    values = blank_unweighted(rows.blank(values, before=1), convex)
    check_no_nan("predictions", values)
    return values, convex, rows


def check_pool_axes(argument: str, values: Array, axes: str) -> None:
    """Raises unless predictions have the axes of one pool of candidates."""
    if values.ndim != 1 + axes.count(","):
        fix = "For several pools, map the function with `jax.vmap`."
        raise value_error(f"`{argument}` of shape {axes}", f"got shape {values.shape}", fix)


def check_pool(
    values: Array,
    rows: CountedRows,
    chosen: ArrayLike | None = None,
    costs: ArrayLike | None = None,
    budget: ArrayLike | None = None,
) -> tuple[Pool, Array]:
    """Raises for invalid costs, budget, or indices `chosen`. Returns the pool without these, and the indices."""
    dtype, shape = values.dtype, values.shape[1:2]
    pool = Pool(jnp.ones(shape, bool) if rows.counted is None else rows.counted, None, None, jnp.zeros((), dtype))
    taken = jnp.zeros(0, jnp.int32) if chosen is None else _check_chosen(chosen, shape[0], rows)
    taken = jnp.where((taken < 0) | ~pool.may_pick[taken], -1, taken)
    pool = pool.remove(taken)
    if costs is not None:
        prices = check_real("costs", costs)
        if prices.shape != shape:
            fix = "Nothing is broadcast."
            raise value_error("one of `costs` per candidate", f"expected shape {shape}, got {prices.shape}", fix)
        wrong = lambda host: ~(np.isfinite(host) & (host > 0))
        check_entries("finite `costs` above zero", costs, wrong, "Gains are divided by them.", rows)
        pool = pool._replace(costs=rows.blank(prices.astype(dtype), fill=1))
    if budget is not None:
        if costs is None:
            raise value_error("`costs` with a `budget`", "got a budget alone", "Costs of one each? Pass `size` alone.")
        fix = "It bounds the sum of the costs of all picks."
        pool = pool._replace(budget=check_positive_scalar("budget", budget, dtype, fix=fix))
    return pool, taken


def check_size(size: int, argument: str, pool: Pool) -> int:
    """Raises unless `size` is positive, and at most the number of candidates that may be picked, if known."""
    number, host = check_positive_int(size, argument), concrete(pool.may_pick)
    left = pool.may_pick.shape[0] if host is None else int(host.sum())
    if number > left:
        raise value_error(f"`{argument}` candidates or more", f"got {left}, for {number} picks", "Pick fewer.")
    return number


def _check_chosen(chosen: ArrayLike, num_candidates: int, rows: CountedRows) -> Array:
    array = check_array("chosen", chosen)
    if array.ndim != 1 or not jnp.issubdtype(array.dtype, jnp.integer):
        got = f"got dtype {array.dtype}, shape {array.shape}"
        raise type_error("`chosen` as integer indices `(chosen,)`", got, "Such as `picks.indices`.")
    host = concrete(chosen)
    known = np.zeros(0, int) if host is None else host[host != -1]  # the padding of `Picks.indices`
    if ((known < 0) | (known >= num_candidates)).any() or len(np.unique(known)) < len(known):
        needs = f"different indices from 0 to {num_candidates - 1} in `chosen`"
        raise value_error(needs, f"got {known.tolist()}", "-1 stands for no candidate.")
    if rows.known is not None and rows.known.ndim and not rows.known[known].all():
        fix = "Candidates that are chosen are not picked again: leave `row_weights` True there."
        raise value_error("`chosen` candidates that count", f"got {known[~rows.known[known]].tolist()}", fix)
    return array.astype(jnp.int32)
