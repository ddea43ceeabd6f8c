from typing import Literal

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Real

from .._brief import brief_doc
from .._check import RowWeightsLike, check_floating_arrays, check_word, promote
from ..uncertainty import Interval
from ._check import check_level, check_scales, check_targets
from ._outward import difference_up, distance_up, quotient_up
from ._quantile import fraction, rank_of, value_at_rank_jit


class Cqr(eqx.Module):
    """Fitted conformalised intervals: `fitted(lower, upper)`, of any shape, returns `.lower` and `.upper`.

    Ends that cross are set to their midpoint.

    **Attributes:**

    - `below`, `above`: the outward shifts of the ends; negative if intervals are narrowed.
    """

    below: Float[Array, ""]
    above: Float[Array, ""]

    __pdoc__ = brief_doc

    def __call__(self, lower: Float[ArrayLike, "*batch"], upper: Float[ArrayLike, "*batch"]) -> Interval:
        """The interval of each row."""
        low, high = check_floating_arrays(lower=lower, upper=upper)
        low, high, below, above = promote(low, high, self.below, self.above)
        low, high = low - below, high + above
        middle = low / 2 + high / 2
        return Interval(jnp.where(low > high, middle, low), jnp.where(low > high, middle, high))


def cqr(
    lower: Float[ArrayLike, " rows"],
    upper: Float[ArrayLike, " rows"],
    targets: Real[ArrayLike, " rows"],
    *,
    level: float,
    ends: Literal["together", "each"] = "together",
    row_weights: RowWeightsLike | None = None,
) -> Cqr:
    r"""Conformalised quantile regression: intervals whose ends are corrected for coverage of `level` or more.

    With `"together"` both `ends` move by [`eqx_ensemble.conformal.quantile`][] of $\max(l_i - y_i, y_i - u_i)$. With
    `"each"`, each end moves by the quantile of its own error, at level $(1 + \mathrm{level}) / 2$: targets are then
    below, and likewise above, with probability at most $(1 - \mathrm{level}) / 2$; intervals are wider.

    **Arguments:**

    - `lower`, `upper`: `(rows,)`, two predicted quantiles, which may cross, or the result of
        [`eqx_ensemble.uncertainty.gaussian_interval`][].
    - the others: as for [`eqx_ensemble.conformal.split`][].

    **Returns:** [`eqx_ensemble.conformal.Cqr`][].

    ```python
    lower, upper, targets = jnp.zeros(9), jnp.ones(9), jnp.arange(1.0, 10.0)
    fitted = ee.conformal.cqr(lower, upper, targets, level=0.8)
    fitted(jnp.array([0.0]), jnp.array([2.0]))  # -7 to 9
    ```

    ??? cite
        [Romano et al., NeurIPS 2019](https://arxiv.org/abs/1905.03222)
    """
    low, high, observed, rows = check_targets(targets, row_weights, lower=lower, upper=upper)
    check_level(level)
    check_word(ends, "ends", ("together", "each"))
    low, high, lowest, highest = (rows.blank(x) for x in (low, high, *observed))
    wanted = fraction(level) if ends == "together" else (1 + fraction(level)) / 2
    rank = rank_of(wanted, low.size, rows)
    below, above = difference_up(low, lowest), difference_up(highest, high)
    if ends == "together":
        margin = value_at_rank_jit(jnp.maximum(below, above), rows.counted, rank)
        return Cqr(margin, margin)
    return Cqr(value_at_rank_jit(below, rows.counted, rank), value_at_rank_jit(above, rows.counted, rank))


class Split(eqx.Module):
    """Fitted intervals: `fitted(predictions)`, of any shape, returns `.lower` and `.upper`.

    **Attributes:**

    - `radius`: half the width of every interval.
    """

    radius: Float[Array, ""]

    __pdoc__ = brief_doc

    def __call__(self, predictions: Float[ArrayLike, "*batch"]) -> Interval:
        """The interval of each row."""
        (centre,) = check_floating_arrays(predictions=predictions)
        centre, radius = promote(centre, self.radius)
        return Interval(centre - radius, centre + radius)


class Normalised(eqx.Module):
    """Fitted intervals with a scale: `fitted(predictions, scale)`, of any shape, returns `.lower` and `.upper`.

    **Attributes:**

    - `factor`: half the width of an interval, divided by its scale.
    """

    factor: Float[Array, ""]

    __pdoc__ = brief_doc

    def __call__(self, predictions: Float[ArrayLike, "*batch"], scale: Float[ArrayLike, "*batch"]) -> Interval:
        """The interval of each row."""
        centre, scales = check_floating_arrays(predictions=predictions, scale=scale)
        check_scales(scale)
        centre, scales, factor = promote(centre, scales, self.factor)
        return Interval(centre - factor * scales, centre + factor * scales)


def split(
    predictions: Float[ArrayLike, " rows"],
    targets: Real[ArrayLike, " rows"],
    *,
    level: float,
    row_weights: RowWeightsLike | None = None,
) -> Split:
    """Intervals of constant width that cover a new target with probability `level` or more, for any model.

    Half the width is [`eqx_ensemble.conformal.quantile`][] of the absolute errors $|y_i - x_i|$ on held-out rows.

    **Arguments:**

    - `predictions`, `targets`: `(rows,)`, of held-out rows. Fit several outputs separately.

    **Returns:** [`eqx_ensemble.conformal.Split`][].

    ```python
    fitted = ee.conformal.split(jnp.zeros(9), jnp.arange(1.0, 10.0), level=0.8)
    fitted(jnp.array([5.0]))  # -3 to 13
    ```

    ??? cite
        [Lei et al., JASA 2018](https://arxiv.org/abs/1604.04173)
    """
    centre, observed, rows = check_targets(targets, row_weights, predictions=predictions)
    check_level(level)
    centre, *ends = (rows.blank(x) for x in (centre, *observed))
    rank = rank_of(fraction(level), centre.size, rows)
    return Split(value_at_rank_jit(distance_up(Interval(*ends), centre), rows.counted, rank))


def normalised(
    predictions: Float[ArrayLike, " rows"],
    scale: Float[ArrayLike, " rows"],
    targets: Real[ArrayLike, " rows"],
    *,
    level: float,
    row_weights: RowWeightsLike | None = None,
) -> Normalised:
    r"""Intervals whose width is proportional to a scale of each row, with coverage `level` or more.

    As [`eqx_ensemble.conformal.split`][], with the quantile of $|y_i - x_i| / \sigma_i$.

    **Arguments:**

    - `scale`: `(rows,)`, positive, such as a standard deviation.
    - the others: as for [`eqx_ensemble.conformal.split`][].

    **Returns:** [`eqx_ensemble.conformal.Normalised`][].

    ```python
    fitted = ee.conformal.normalised(
        jnp.zeros(9), jnp.full(9, 2.0), jnp.arange(1.0, 10.0), level=0.8
    )
    fitted(jnp.array([5.0]), jnp.array([1.0]))  # 1 to 9
    ```

    ??? cite
        [Lei et al., JASA 2018](https://arxiv.org/abs/1604.04173)
    """
    centre, scales, observed, rows = check_targets(targets, row_weights, predictions=predictions, scale=scale)
    check_scales(scale, rows)
    check_level(level)
    scales = rows.blank(scales, fill=1)
    centre, *ends = (rows.blank(x) for x in (centre, *observed))
    rank = rank_of(fraction(level), centre.size, rows)
    relative = quotient_up(distance_up(Interval(*ends), centre), scales)
    return Normalised(value_at_rank_jit(relative, rows.counted, rank))
