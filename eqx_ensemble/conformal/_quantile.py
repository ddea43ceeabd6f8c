import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int32, Real

from .._check import CountedRows, RowWeightsLike, check_array, check_counted_rows, check_nonnegative, check_row_weights
from ._check import check_level, check_rows, warn_of_infinite

# The rank of the quantile among the sorted scores, in exact arithmetic.


def fraction(level: float) -> Fraction:
    """The intended decimal fraction: 0.9 is 9/10, which floats cannot represent."""
    return Fraction(float(level)).limit_denominator(10**9)


def rank_of(level: Fraction, num_rows: int, rows: CountedRows, *, infinite: int = 0) -> Int32[Array, ""]:
    r"""$\lceil (n + 1) \mathrm{level} \rceil$ for the $n$ rows that count; warns if no finite score has this rank."""
    count = count_of(num_rows, rows)
    if count is not None:
        warn_of_infinite(_rank(level, count), count, infinite, level)
    return rank_among(level, num_rows, rows)


def rank_among(level: Fraction, num_rows: int, rows: CountedRows) -> Int32[Array, ""]:
    """`rank_of` without the warning."""
    if rows.counted is None or (count := count_of(num_rows, rows)) is not None:
        return jnp.asarray(_rank(level, num_rows if rows.counted is None else count), jnp.int32)
    return jnp.asarray(ranks_by_count(level, num_rows))[jnp.sum(rows.counted)]


def ranks_by_count(level: Fraction, num_rows: int) -> np.ndarray:
    """The rank for every number of rows from 0 to `num_rows`."""
    return np.asarray([_rank(level, kept) for kept in range(num_rows + 1)], np.int32)


def _rank(level: Fraction, num_rows: int) -> int:
    return max(-(-(num_rows + 1) * level.numerator // level.denominator), 1)


def count_of(num_rows: int, rows: CountedRows) -> int | None:
    """The number of rows that count; `None` while tracing."""
    return None if rows.known is None else int(np.broadcast_to(rows.known, num_rows).sum())


def value_at_rank(
    scores: Float[Array, " rows"], counted: Bool[Array, " rows"] | None, rank: Int32[Array, ""]
) -> Float[Array, ""]:
    """The score of a rank among rows that count, infinite beyond the last; NaN if any is NaN."""
    count = scores.size if counted is None else jnp.sum(counted, dtype=jnp.int32)
    scores = scores if counted is None else jnp.where(counted, scores, jnp.inf)
    found = jnp.sort(scores)[jnp.clip(rank - 1, 0, scores.size - 1)]
    found = jnp.where(rank > count, jnp.inf, found)
    return jnp.where(jnp.any(jnp.isnan(scores)), jnp.nan, found)


value_at_rank_jit = jax.jit(value_at_rank)


@jax.jit
def pair_at_rank(
    scores: Float[Array, " rows"],
    ties: Float[Array, " rows"],
    counted: Bool[Array, " rows"] | None,
    rank: Int32[Array, ""],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """`value_at_rank` for scores whose ties are ordered by `ties`, and the value of `ties` at that rank."""
    scores = scores if counted is None else jnp.where(counted, scores, jnp.inf)
    _, in_order = jax.lax.sort((scores, ties), num_keys=2)
    return value_at_rank(scores, counted, rank), in_order[jnp.clip(rank - 1, 0, scores.size - 1)]


def quantile(
    scores: Float[ArrayLike, " rows"],
    *,
    level: float,
    row_weights: RowWeightsLike | None = None,
) -> Float[Array, ""]:
    r"""The conformal quantile: an upper bound for a new score that holds with probability `level` or more.

    The $\lceil (n + 1) \, \mathrm{level} \rceil$-th smallest of $n$ scores, or infinity, with a warning, if this rank
    exceeds $n$. If the new score is exchangeable with these and there are no ties, it is at or below the quantile with
    probability $\lceil (n + 1) \, \mathrm{level} \rceil / (n + 1)$; for given scores, this
    probability has a Beta distribution.

    **Arguments:**

    - `scores`: `(rows,)`, one nonconformity score per held-out row; higher is more unusual.
    - `level`: read as a decimal fraction.

    **Returns:** a scalar.

    ```python
    ee.conformal.quantile(jnp.arange(1.0, 10.0), level=0.9)  # of 1, ..., 9 the ninth, 9
    ```

    ??? cite
        [Lei et al., JASA 2018](https://arxiv.org/abs/1604.04173)
    """
    (checked,) = check_rows(scores=scores)
    rows = check_counted_rows(row_weights, checked.shape)
    check_level(level)
    return value_at_rank_jit(checked, rows.counted, rank_of(fraction(level), checked.size, rows))


def weighted_quantile(
    scores: Float[ArrayLike, " rows"],
    row_weights: Bool[ArrayLike, " rows"] | Real[ArrayLike, " rows"],
    new_weights: Real[ArrayLike, "*batch"],
    *,
    level: float,
) -> Float[Array, "*batch"]:
    r"""The conformal quantile under covariate shift, for new rows with a different distribution of inputs.

    The smallest score $s$ with $\sum_i w_i [s_i \le s] \ge \mathrm{level} \, (\sum_i w_i + w_\mathrm{new})$, where a
    weight is the ratio of the density of the input among new rows to that among held-out rows, up to a common factor;
    infinity if no score satisfies it.

    **Arguments:**

    - `row_weights`: finite and non-negative numbers `(rows,)`, or booleans.
    - `new_weights`: `(*batch,)`, the weights of the new rows, finite and non-negative.
    - the others: as for [`eqx_ensemble.conformal.quantile`][].

    **Returns:** one quantile per new row, `(*batch,)`.

    ```python
    scores = jnp.arange(1.0, 10.0)
    weights = jnp.where(scores > 5, 3.0, 1.0)
    # 7: its weights reach half of 18
    ee.conformal.weighted_quantile(scores, weights, jnp.ones(1), level=0.5)
    ```

    ??? cite
        [Tibshirani et al., NeurIPS 2019](https://arxiv.org/abs/1904.06019)
    """
    (checked,) = check_rows(scores=scores)
    rows = check_row_weights(row_weights, checked.shape, none_counts=True)
    new = check_array("new_weights", new_weights).astype(checked.dtype)
    fix = "The weight of an input is the ratio of its density among new rows to that among held-out rows."
    check_nonnegative("new_weights", new_weights, fix=fix)
    check_level(level)
    rank = rank_among(fraction(level), checked.size, rows)
    own = jnp.asarray(rows.weights, checked.dtype)
    return _weighted_quantile(checked, own, new, float(level), rank)


@jax.jit
def _weighted_quantile(
    scores: Float[Array, " rows"],
    row_weights: Float[Array, " rows"],
    new_weights: Float[Array, "*batch"],
    level: float | Float[Array, ""],
    rank: Int32[Array, ""],
) -> Float[Array, "*batch"]:
    counted = row_weights > 0
    scores = jnp.where(counted, scores, jnp.inf)
    ordered, reordered = jax.lax.sort((scores, row_weights), num_keys=1)
    reached = jnp.cumsum(reordered)
    # A level that is missed only by rounding of a sum counts as reached.
    slack = 1 - 4 * math.log2(2 * scores.size) * jnp.finfo(scores.dtype).eps
    wanted = jnp.asarray(level, scores.dtype) * slack * (reached[-1] + new_weights)
    index = jnp.searchsorted(reached, jnp.ravel(wanted), side="left")
    found = jnp.append(ordered, jnp.inf)[jnp.reshape(index, new_weights.shape)]
    # For many rows this slack exceeds one row: for equal weights the exact rank is used instead.
    alike = new_weights == jnp.where(counted, row_weights, jnp.inf).min()
    alike = alike & (new_weights == row_weights.max()) & (new_weights > 0)
    found = jnp.where(alike, value_at_rank(scores, counted, rank), found)
    return jnp.where(jnp.any(jnp.isnan(scores)), jnp.nan, found)
