import math
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, Integer

from .._boundary import array_function, kinds
from .._caller import caller
from .._check import concrete, value_error
from .._warnings import warn


def fraction(level: float) -> Fraction:
    """The intended decimal fraction: 0.9 is 9/10, which floats cannot represent."""
    return Fraction(level).limit_denominator(10**9)


def ranks(level: float, num_rows: int) -> Int32[Array, " counts"]:
    """The ranks `ceil((n + 1) level)` for 0 to `num_rows` rows, in exact arithmetic."""
    exact, one_more = fraction(level), np.arange(1, num_rows + 2)
    return jnp.asarray(np.maximum(-(-one_more * exact.numerator // exact.denominator), 1), jnp.int32)


def threshold(
    scores: Float[Array, " rows"],
    level: float,
    row_weights: Bool[Array, " rows"] | None = None,
    groups: Integer[Array, " rows"] | None = None,
    num_groups: int = 1,
) -> tuple[Float[Array, "..."], Bool[Array, "..."]]:
    """The conformal quantile of each group, or of all rows, and whether there are too few rows.

    NaN if a score is NaN.
    """
    own = jnp.zeros(scores.shape, jnp.int32) if groups is None else groups.astype(jnp.int32)
    counted = (own >= 0) & (own < num_groups)
    counted = counted if row_weights is None else counted & row_weights
    own, ordered = jax.lax.sort((jnp.where(counted, own, num_groups), scores), num_keys=2)
    start = jnp.searchsorted(own, jnp.arange(num_groups + 1, dtype=jnp.int32)).astype(jnp.int32)
    start, end = start[:-1], start[1:]
    rank = ranks(level, scores.size)[end - start]
    few = rank > end - start
    found = jnp.where(few, jnp.inf, ordered[jnp.minimum(start + rank, scores.size) - 1])
    spoilt = (end > start) & jnp.isnan(ordered[jnp.maximum(end - 1, 0)])  # NaN is last
    found = jnp.where(spoilt, jnp.nan, found)
    return (found[0], few[0]) if groups is None else (found, few)


def finish(out: tuple[Any, Array], given: dict[str, Any]) -> Any:
    """The first of what a body returned; warns of too few rows by the second, and of a share of errors as `level`."""
    fitted, few = out
    level = given["level"]
    if level < 0.5:
        warn(
            f"`{caller()}` got `level={level:g}`, the share of rows to cover: most are left out.\nFor an error rate "
            f"of {level:g} pass `level={1 - level:g}`."
        )
    host = concrete(few)
    if host is not None and host.any():
        exact = fraction((1 + level) / 2 if given.get("ends") == "each" else level)
        who = f"{host.sum()} of {host.size} groups, the first is {np.argmax(host)}, have" if host.ndim else "there are"
        enough = f"{math.ceil(exact / (1 - exact))} rows or more{' of each' if host.ndim else ''}"
        fix = f"Hold out {enough}"
        if "unseen" in given:
            left_out = "leave out rows that no member held out (`row_weights=unseen.any(axis=0)`)"
            fix = f"Train more members, {left_out}, take {enough}"
        warn(
            f"`{caller()}`: {who} too few rows for level {level:g}: intervals are infinite, and sets whole.\n"
            f"{fix}, or ask for a lower level."
        )
    return fitted


@array_function(finish=finish)
def quantile(
    scores: kinds.Scores,
    *,
    level: float,
    groups: kinds.RowGroups | None = None,
    num_groups: int = 1,
    row_weights: kinds.RowFilter = None,
) -> Float[Array, "..."]:
    r"""The conformal quantile: an upper bound for a new score that holds with probability `level` or more.

    The $\lceil (n + 1) \, \mathrm{level} \rceil$-th smallest of $n$ scores, or infinity, with a warning, if this rank
    exceeds $n$. If the new score is exchangeable with these and there are no ties, it is at or below the quantile with
    probability $\lceil (n + 1) \, \mathrm{level} \rceil / (n + 1)$; for given scores, this probability has a Beta
    distribution.

    **Arguments:**

    - `scores`: `(rows,)`, one nonconformity score per held-out row; higher is more unusual.
    - `level`: read as a decimal fraction.
    - `groups`: integers `(rows,)` from 0 to num_groups - 1, also known for new rows: then the quantile of the rows of
        each group, which bounds new scores of this group (Mondrian conformal prediction).
    - `num_groups`: the number of groups.

    **Returns:** a scalar; with groups, `(groups,)`.

    ```python
    ee.conformal.quantile(jnp.arange(1.0, 10.0), level=0.9)  # of 1, ..., 9 the ninth, 9
    errors, groups = jnp.arange(18.0), jnp.arange(18) % 2
    radius = ee.conformal.quantile(errors, level=0.8, groups=groups, num_groups=2)
    radius  # [14, 15], for new rows `radius[groups]`
    ```

    ??? cite
        [Lei et al., JASA 2018](https://arxiv.org/abs/1604.04173); groups: [Vovk, Machine Learning
        2013](https://arxiv.org/abs/1209.2673)
    """
    return threshold(scores, level, row_weights, groups, num_groups)  # pyright: ignore[reportReturnType]


@array_function
def weighted_quantile(
    scores: kinds.Scores,
    ratios: kinds.Ratios,
    new_ratios: kinds.NewRatios,
    *,
    level: float,
) -> Float[Array, "*batch"]:
    r"""The conformal quantile under covariate shift, for new rows with a different distribution of inputs.

    The smallest score $s$ with $\sum_i w_i [s_i \le s] \ge \mathrm{level} \, (\sum_i w_i + w_\mathrm{new})$, where a
    ratio $w$ is that of the density of the input among new rows to that among held-out rows, up to a common factor;
    infinity if no score satisfies it.

    **Arguments:**

    - `ratios`: `(rows,)`, of the held-out rows; zero for rows to ignore.
    - `new_ratios`: `(*batch,)`, of new rows.
    - the others: as for [`eqx_ensemble.conformal.quantile`][].

    **Returns:** one quantile per new row, `(*batch,)`.

    ```python
    scores = jnp.arange(1.0, 10.0)
    ratios = jnp.where(scores > 5, 3.0, 1.0)
    # 7: its ratios reach half of 18
    ee.conformal.weighted_quantile(scores, ratios, jnp.ones(1), level=0.5)
    ```

    ??? cite
        [Tibshirani et al., NeurIPS 2019](https://arxiv.org/abs/1904.06019)
    """
    ordered, own = jax.lax.sort((jnp.where(ratios > 0, scores, jnp.inf), ratios), num_keys=1)
    reached = jnp.cumsum(own)
    # A level that is missed only by rounding of a sum counts as reached.
    rounding = 4 * math.log2(2 * scores.size) * jnp.finfo(scores.dtype).eps
    wanted = level * (1 - rounding) * (reached[-1] + new_ratios)
    found = jnp.append(ordered, jnp.inf)[jnp.searchsorted(reached, jnp.ravel(wanted))]
    return jnp.where(jnp.any(jnp.isnan(ordered)), jnp.nan, found.reshape(new_ratios.shape))


def _finish(out: Array, given: dict[str, Any]) -> Array:
    host = concrete(out)
    if host is not None and host == np.inf:
        fix = "Hold out more rows, add thresholds of lower losses, or allow a higher risk."
        warn(f"`{caller()}`: no threshold has a risk of {given['risk']:g} or less; the result is infinite. {fix}")
    return out


@array_function(finish=_finish)
def risk_control(
    losses: kinds.BoundedLosses,
    thresholds: kinds.Thresholds,
    *,
    risk: float,
    bound: float = 1.0,
    row_weights: kinds.RowFilter = None,
) -> Float[Array, ""]:
    r"""Conformal risk control: the smallest threshold at which the expected loss of a new row is at most `risk`.

    For losses $L_i(\lambda) \le B$ that do not increase with the threshold, such as the fraction of labels missed by
    sets that grow with it, the result is the smallest $\lambda$ of the grid with

    $$\frac{\sum_i L_i(\lambda) + B}{n + 1} \le \mathrm{risk}.$$

    Of losses that do increase, the largest from each threshold on is taken.

    **Arguments:**

    - `losses`: `(rows, thresholds)`, the loss of each held-out row at each threshold.
    - `thresholds`: `(thresholds,)`.
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
    if not 0 < risk < bound:
        raise value_error("a `risk` between 0 and `bound`", f"got {risk} and {bound}", "It is an expected loss.")
    order = jnp.argsort(thresholds)
    largest = jax.lax.cummax(losses[:, order], axis=1, reverse=True)
    # The largest sum of losses that qualifies, for each number of rows, in exact arithmetic.
    exact, num_rows = fraction(risk / bound), losses.shape[0]
    most = (np.arange(1, num_rows + 2) * exact.numerator - exact.denominator) / exact.denominator * bound
    count = num_rows if row_weights is None else jnp.sum(row_weights)
    total = jnp.sum(largest, axis=0)  # zero for rows that do not count
    fits = total <= jnp.asarray(most, losses.dtype)[count]
    return jnp.where(jnp.any(jnp.isnan(total)), jnp.nan, jnp.min(jnp.where(fits, thresholds[order], jnp.inf)))
