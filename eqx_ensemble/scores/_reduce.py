import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Literal, NoReturn

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Shaped

from .._caller import caller
from .._check import (
    check_array,
    check_floating,
    check_row_weights,
    concrete,
    missing_extra_message,
    promote,
    standard_promotion,
    type_error,
    value_error,
)
from .._weighting import sum_members

# Imports and calls scoringrules. Its scores take the `members` axis first, as all scores do.


def import_scoringrules() -> ModuleType:
    """Imports the optional package for a function; raises an `ImportError` with the install command."""
    try:
        import scoringrules
    except ImportError as error:
        raise ImportError(missing_extra_message(caller(), "scoringrules", "scores")) from error
    return scoringrules


@contextlib.contextmanager
def scoringrules_config() -> Iterator[None]:
    """Allows scoringrules to promote dtypes and ranks, and to read levels and weights while predictions are traced."""
    with standard_promotion(), jax.ensure_compile_time_eval():
        yield


def without_gradient(name: str, score: Callable[..., Array]) -> Callable[..., Array]:
    """The score, which raises when differentiated: scoringrules has a NaN gradient where members coincide."""
    function = jax.custom_jvp(score)

    @function.defjvp
    def refuse(primals: tuple, tangents: tuple) -> NoReturn:
        raise NotImplementedError(
            f"`{name}` has no gradient: where members coincide, that of scoringrules is NaN.\n"
            "Train on `scores.crps` of each output, and evaluate with this score."
        )

    return function


Reduction = Literal["mean", "none"]

RowWeights = Bool[Array, "*batch"] | Float[Array, "*batch"]
"""Row weights: booleans, or non-negative numbers."""

_BLOCK = 256
"""The number of rows in one partial sum."""


def reduce(
    rows: Float[Array, "*batch"], reduction: Reduction, row_weights: RowWeights | None = None
) -> Float[Array, "..."]:
    """The mean over rows, or the values of all rows, NaN for ignored ones."""
    if reduction == "none":
        return rows if row_weights is None else jnp.where(counts(row_weights), rows, jnp.nan)
    return mean_of_rows(rows, row_weights)


@partial(jax.jit, static_argnames="reduction")
def reduce_rows(
    rows: Float[Array, "*batch"], row_weights: RowWeights | None, reduction: Reduction
) -> Float[Array, "..."]:
    """Compiled `reduce`, for rows that were computed in blocks."""
    return reduce(rows, reduction, row_weights)


def mean_of_rows(rows: Float[Array, "*batch"], row_weights: RowWeights | None) -> Float[Array, ""]:
    """The weighted mean over rows."""
    if row_weights is None:
        return jnp.mean(rows)
    return jnp.sum(weigh(rows, row_weights)) / total_weight(row_weights, rows.dtype)


def weigh(rows: Float[Array, "*batch"], row_weights: RowWeights | None) -> Float[Array, "*batch"]:
    """The rows times their weights; zero for ignored rows, even if they contain NaN."""
    if row_weights is None:
        return rows
    return jnp.where(counts(row_weights), rows if row_weights.dtype == bool else rows * row_weights, 0)


def total_weight(row_weights: RowWeights, dtype: jnp.dtype) -> Float[Array, ""]:
    """The sum of the weights of all rows."""
    return jnp.sum(row_weights).astype(dtype)


def counts(row_weights: RowWeights) -> Bool[Array, "*batch"]:
    """Whether each row has a nonzero weight."""
    return row_weights if row_weights.dtype == bool else row_weights != 0


def root(values: Float[Array, "..."]) -> Float[Array, "..."]:
    """The square root, with gradient zero at zero: the gradient at a perfect fit is not NaN."""
    exact = values == 0
    return jnp.where(exact, 0, jnp.sqrt(jnp.where(exact, 1, values)))


def sum_by_segment(
    values: Shaped[Array, " rows"], segment: Int[Array, " rows"], num_segments: int, *, in_order: bool = False
) -> Shaped[Array, " segments"]:
    """The sum of each segment, from partial sums: small numbers are then not added to very large ones.

    With few segments, of blocks of rows; with many, of a tree over the rows sorted by segment (`in_order`: they are).
    """
    if values.size <= _BLOCK or jnp.issubdtype(values.dtype, jnp.integer):
        return jax.ops.segment_sum(values, segment, num_segments)
    if num_segments <= _BLOCK:
        num_blocks = -(-values.size // _BLOCK)
        block = segment + num_segments * (jnp.arange(values.size, dtype=segment.dtype) // _BLOCK)
        sums = jax.ops.segment_sum(values, block, num_segments * num_blocks)
        return sum_members(jnp.reshape(sums, (num_blocks, num_segments)))  # pairwise
    if not in_order:
        order = jnp.argsort(segment)
        values, segment = values[order], segment[order]
    # `where`, not a product: a NaN stays in its segment.
    join = lambda a, b: (jnp.where(a[1] == b[1], a[0] + b[0], b[0]), b[1])
    running, _ = jax.lax.associative_scan(join, (values, segment))
    every = jnp.arange(num_segments, dtype=segment.dtype)
    last = jnp.searchsorted(segment, every, side="right") - 1
    return jnp.where(segment[last] == every, running[last], 0)


def ties(ranked: Shaped[Array, " rows"]) -> tuple[Int[Array, " rows"], Int[Array, " rows"]]:
    """The first and the last row equal to each of the sorted rows."""
    group = running_sum(jnp.append(False, ranked[1:] != ranked[:-1]).astype(jnp.int32))
    # Scattered, not `cummax` and `cummin`, which take many passes.
    row, ends = jnp.arange(ranked.size, dtype=jnp.int32), jnp.full(ranked.size + 1, ranked.size, jnp.int32)
    first = ends.at[group].min(row, indices_are_sorted=True)
    return first[group], first[group + 1] - 1


def running_sum(values: Shaped[Array, " rows"]) -> Shaped[Array, " rows"]:
    """The cumulative sum, pairwise: on a CPU, `jnp.cumsum` takes twice as long."""
    # Without the barrier, XLA computes the last additions once for each reader.
    return jax.lax.optimization_barrier(jax.lax.associative_scan(jnp.add, values))


def check_ranking(scores: ArrayLike, positives: ArrayLike, row_weights: ArrayLike | None) -> tuple[Array, Array, Array]:
    """Raises unless there are positive and negative rows. Returns scores, positives and row weights, flattened."""
    values, truth = check_floating("scores", scores), check_array("positives", positives)
    if truth.dtype != jnp.bool_:
        fix = "For example `labels == 1`, or `jnp.arange(n) >= num_inside`."
        raise type_error("boolean `positives`", f"got dtype {truth.dtype}", fix)
    _same_rows("scores", values, "positives", truth)
    (values,) = promote(values)
    rows = check_row_weights(row_weights, values.shape, values.dtype)
    weights = jnp.ones(values.shape, values.dtype) if rows.weights is None else rows.weights.astype(values.dtype)
    known, host = rows.known, concrete(positives)
    if known is not None and host is not None:
        for kind, found in (("positive", host), ("negative", ~host)):
            if not (known & found).any():
                raise value_error(
                    "positive and negative rows",
                    f"got no {kind} row that counts",
                    "Ranking scores need both kinds of rows.",
                )
    return jnp.ravel(values), jnp.ravel(truth), jnp.ravel(weights)


def check_selection(
    uncertainty: ArrayLike, losses: ArrayLike, row_weights: ArrayLike | None
) -> tuple[Array, Array, Array]:
    """Raises for invalid arguments. Returns uncertainties, losses and row weights, flattened."""
    values, array = check_floating("uncertainty", uncertainty), check_array("losses", losses)
    _same_rows("uncertainty", values, "losses", array)
    if values.size == 0:
        raise value_error("at least one row", f"got shape {values.shape}", "Was every row filtered out?")
    values, array = promote(values, array)
    rows = check_row_weights(row_weights, values.shape, values.dtype)
    counted = jnp.ones(values.shape, bool) if rows.weights is None else rows.weights
    return jnp.ravel(values), jnp.ravel(array), jnp.ravel(counted)


def _same_rows(argument: str, values: Array, other: str, array: Array) -> None:
    if array.shape != values.shape:
        got = f"got `{argument}` {values.shape}, `{other}` {array.shape}"
        fix = "Nothing is broadcast. One score per member? Use `jax.vmap`."
        raise value_error(f"`{argument}` and `{other}` of one shape", got, fix)
