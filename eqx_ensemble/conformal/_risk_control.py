import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float

from .._caller import caller
from .._check import (
    CountedRows,
    RowWeightsLike,
    check_counted_rows,
    check_entries,
    check_floating,
    check_number,
    concrete,
    promote,
    value_error,
)
from .._warnings import warn
from ._outward import enclose
from ._quantile import count_of, fraction

_NO_NAN = "Leave these rows out: `row_weights`."

# The largest sum of losses that controls a risk, in exact arithmetic, and the threshold that reaches it.


def largest_total(risk: float, bound: float, num_rows: int, rows: CountedRows, dtype: jnp.dtype) -> Float[Array, ""]:
    """The largest sum of losses `S` with `(S + bound) / (n + 1) <= risk`, rounded down."""
    largest = Fraction(repr(float(bound)))
    total = lambda n: _round_down(fraction_of(risk, bound) * largest * (n + 1) - largest, dtype)
    if rows.counted is None or (count := count_of(num_rows, rows)) is not None:
        return jnp.asarray(total(num_rows if rows.counted is None else count))
    table = np.asarray([total(n) for n in range(num_rows + 1)])
    return jnp.asarray(table)[jnp.sum(rows.counted)]


def fraction_of(risk: float, bound: float) -> Fraction:
    """The risk as an intended decimal fraction of the bound."""
    return fraction(float(risk) / float(bound))


def _round_down(value: Fraction, dtype: jnp.dtype) -> np.ndarray:
    rounded = np.asarray(float(value)).astype(dtype)
    if Fraction(float(rounded)) <= value:
        return rounded
    return np.asarray(np.nextafter(rounded, np.asarray(-np.inf).astype(dtype)))


@jax.jit
def first_on_grid(
    losses: Float[Array, "rows thresholds"],
    thresholds: Float[Array, " thresholds"],
    counted: Bool[Array, " rows"] | None,
    most: Float[Array, ""],
) -> Float[Array, ""]:
    """The first threshold whose losses sum to `most` or less, infinite if none does; NaN if a loss is NaN."""
    losses = losses if counted is None else jnp.where(counted[:, None], losses, 0)
    total = jnp.sum(losses, axis=0)
    found = jnp.min(jnp.where(total <= most, thresholds, jnp.inf))
    return jnp.where(jnp.any(jnp.isnan(total)), jnp.nan, found)


@jax.jit
def first_step(
    steps: Float[Array, "rows steps"],
    drops: Float[Array, "rows steps"],
    counted: Bool[Array, " rows"] | None,
    most: Float[Array, ""],
) -> Float[Array, ""]:
    """The first step above which the drops sum to `most` or less; minus infinity if all drops do."""
    heights = drops if counted is None else jnp.where(counted[:, None], drops, 0)
    at = jnp.where(heights == 0, -jnp.inf, steps)
    spoilt = jnp.any(jnp.isnan(heights)) | jnp.any(jnp.isnan(at))
    at, heights = jax.lax.sort((jnp.ravel(at), jnp.ravel(heights)), num_keys=1)
    # The remaining sum of losses at minus infinity, and at each step.
    left = jnp.append(jax.lax.cumsum(heights, reverse=True), 0)
    found = jnp.min(jnp.where(left <= most, jnp.append(-jnp.inf, at), jnp.inf))
    return jnp.where(spoilt, jnp.nan, found)


def check_risk(risk: float, bound: float) -> None:
    """Raises unless `0 < risk < bound`."""
    check_number(bound, "bound")
    check_number(risk, "risk")
    if not 0 < risk < bound:
        fix = "The bound is the largest loss that a row can have; any threshold has a risk of at most that."
        raise value_error("a `risk` between 0 and `bound`", f"got {risk} and {bound}", fix)


def check_losses(losses: ArrayLike, thresholds: ArrayLike) -> tuple[Array, Array]:
    """Raises unless losses are `(rows, thresholds)` and thresholds increase. Returns both in one dtype."""
    table, grid = check_floating("losses", losses), check_floating("thresholds", thresholds)
    if grid.ndim != 1 or table.ndim != 2 or table.shape[1] != grid.size or table.size == 0:
        got = f"got `losses` {table.shape} and `thresholds` {grid.shape}"
        fix = "A row of losses for each held-out row, one for each threshold."
        raise value_error("`losses` (rows, thresholds) and `thresholds` (thresholds,)", got, fix)
    host = concrete(thresholds)
    wrong = np.zeros(0, bool) if host is None else ~(np.diff(host.astype(np.float64)) > 0)
    if host is not None and wrong.any():
        at = int(np.argmax(wrong)) + 1
        got = f"got {host[at]} after {host[at - 1]} at index {at}"
        fix = "Sort them, and the losses with them, from the largest loss to the smallest."
        raise value_error("increasing `thresholds`", got, fix)
    first, second = promote(table, grid)
    return first, enclose(thresholds, second).upper


def check_steps(steps: ArrayLike, drops: ArrayLike) -> tuple[Array, Array]:
    """Raises unless steps and drops are floating-point `(rows, steps)`. Returns both in one dtype."""
    at, heights = check_floating("steps", steps), check_floating("drops", drops)
    if at.ndim != 2 or at.shape != heights.shape or at.size == 0:
        got = f"got `steps` {at.shape} and `drops` {heights.shape}"
        fix = "One step for each row? Pass `scores[:, None]`. Rows with fewer steps have drops of zero."
        raise value_error("`steps` and `drops` of shape (rows, steps)", got, fix)
    first, second = promote(at, heights)
    return enclose(steps, first).upper, second


def check_loss_values(losses: ArrayLike, bound: float, rows: CountedRows) -> None:
    """Raises if losses are NaN, exceed the bound or increase with the threshold; checked where concrete."""
    rows, rounding = rows.known_along(2), 1e-5 * bound
    check_entries("`losses` without NaN", losses, lambda host: np.isnan(host.astype(np.float64)), _NO_NAN, rows)
    fix = "Raise `bound`, the largest loss that a row can have."
    too_large = lambda host: host.astype(np.float64) > bound + rounding
    check_entries(f"`losses` of at most `bound` ({bound})", losses, too_large, fix, rows)
    fix = "Take the largest loss from each threshold on: `jax.lax.cummax(losses, axis=1, reverse=True)`."
    rises = lambda host: np.diff(host.astype(np.float64), axis=1, prepend=np.inf) > rounding
    check_entries("`losses` that never increase with the threshold", losses, rises, fix, rows)


def check_drop_values(steps: ArrayLike, drops: ArrayLike, bound: float, rows: CountedRows) -> None:
    """Raises for NaN, negative drops, and drops of a row that sum to more than the bound; checked where concrete."""
    at, heights, along = concrete(steps), concrete(drops), rows.known_along(2)
    if at is None or heights is None:
        return
    is_nan = lambda host: np.isnan(host.astype(np.float64))
    check_entries("`drops` without NaN", heights, is_nan, _NO_NAN, along)
    check_entries("`steps` without NaN", at, lambda host: is_nan(host) & (heights != 0), _NO_NAN, along)
    fix = "A loss may not increase with the threshold."
    check_entries("`drops` of zero or more", heights, lambda host: host < 0, fix, along)
    fix = "They add up to the loss of the row at the lowest threshold: raise `bound`, the largest loss of a row."
    needs, total = (
        f"`drops` of each row that add up to `bound` ({bound}) or less",
        heights.astype(np.float64).sum(axis=1),
    )
    check_entries(needs, total, lambda host: host > bound * (1 + 1e-5), fix, rows)


def warn_of_no_threshold(found: Array, risk: float, bound: float, num_rows: int, rows: CountedRows) -> None:
    """Warns if no threshold controls the risk; checked where concrete."""
    host, count = concrete(found), count_of(num_rows, rows)
    if host is None or count is None or host != jnp.inf:
        return
    part = fraction_of(risk, bound)
    if (count + 1) * part < 1:
        because = f"{count} rows are too few for a risk of {risk:g}"
        enough = f"Hold out {math.ceil(1 / part) - 1} rows or more, or allow" if part > 0 else "Allow"
        fix = f"{enough} a higher risk."
    else:
        because = f"no threshold has a risk of {risk:g} or less"
        fix = "Add thresholds of lower losses, hold out more rows, or allow a higher risk."
    warn(f"`{caller()}`: {because}; the threshold is infinite. {fix}")


def risk_control(
    losses: Float[ArrayLike, "rows thresholds"],
    thresholds: Float[ArrayLike, " thresholds"],
    *,
    risk: float,
    bound: float = 1.0,
    row_weights: RowWeightsLike | None = None,
) -> Float[Array, ""]:
    r"""Conformal risk control: the smallest threshold at which the expected loss of a new row is at most `risk`.

    For losses $L_i(\lambda) \le B$ that do not increase with the threshold, such as the fraction of labels missed by
    sets that grow with it, the result is the smallest $\lambda$ of the grid with

    $$\frac{\sum_i L_i(\lambda) + B}{n + 1} \le \mathrm{risk}.$$

    **Arguments:**

    - `losses`: `(rows, thresholds)`, the loss of each held-out row at each threshold.
    - `thresholds`: `(thresholds,)`, increasing.
    - `risk`: between 0 and `bound`.
    - `bound`: $B$, the largest possible loss of a row.

    **Returns:** a scalar; infinite, with a warning, if no threshold qualifies.

    ```python
    # the fraction of two true labels missed by the classes with a probability of 1 - threshold
    probabilities = jnp.linspace(0.1, 1.0, 40).reshape(20, 2)
    thresholds = jnp.linspace(0.0, 1.0, 11)
    missed = probabilities[:, :, None] < 1 - thresholds[None, None]
    ee.conformal.risk_control(missed.mean(axis=1), thresholds, risk=0.2)
    ```

    ??? cite
        [Angelopoulos et al., ICLR 2024](https://arxiv.org/abs/2208.02814)
    """
    table, grid = check_losses(losses, thresholds)
    rows = check_counted_rows(row_weights, table.shape[:1])
    check_risk(risk, bound)
    check_loss_values(losses, bound, rows)
    most = largest_total(risk, bound, table.shape[0], rows, table.dtype)
    found = first_on_grid(table, grid, rows.counted, most)
    warn_of_no_threshold(found, risk, bound, table.shape[0], rows)
    return found


def risk_control_steps(
    steps: Float[ArrayLike, "rows steps"],
    drops: Float[ArrayLike, "rows steps"],
    *,
    risk: float,
    bound: float = 1.0,
    row_weights: RowWeightsLike | None = None,
) -> Float[Array, ""]:
    r"""Conformal risk control for losses that are step functions of the threshold: exact, without a grid.

    The loss of row $i$ is $L_i(\lambda) = \sum_j d_{ij} [\lambda < s_{ij}]$: it drops by $d_{ij}$ when the threshold
    reaches $s_{ij}$.

    **Arguments:**

    - `steps`: `(rows, steps)`, the thresholds $s_{ij}$; for multi-label rows the scores of the true labels.
    - `drops`: `(rows, steps)`, $d_{ij}$, non-negative; zero for rows with fewer steps. A row's sum is at most `bound`.
    - the others: as for [`eqx_ensemble.conformal.risk_control`][].

    **Returns:** a scalar; minus infinity if all thresholds qualify.

    ```python
    # a label is missed while the threshold is below its score: as `quantile` at level 0.8
    scores = jnp.arange(1.0, 10.0)
    ee.conformal.risk_control_steps(scores[:, None], jnp.ones((9, 1)), risk=0.2)  # 8
    ```

    ??? cite
        [Angelopoulos et al., ICLR 2024](https://arxiv.org/abs/2208.02814)
    """
    at, heights = check_steps(steps, drops)
    rows = check_counted_rows(row_weights, at.shape[:1])
    check_risk(risk, bound)
    check_drop_values(steps, drops, bound, rows)
    most = largest_total(risk, bound, at.shape[0], rows, at.dtype)
    found = first_step(at, heights, rows.counted, most)
    warn_of_no_threshold(found, risk, bound, at.shape[0], rows)
    return found
