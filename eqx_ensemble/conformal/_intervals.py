from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from .._boundary import array_function, kinds
from .._brief import brief_doc
from .._check import concrete, first_text, value_error
from .._leaves import promote
from ..uncertainty import Interval
from ._quantile import finish, ranks, threshold


class Split(eqx.Module):
    """Fitted intervals: `fitted(predictions)`, of any shape, returns `.lower` and `.upper`.

    If they were fitted with a scale, `fitted(predictions, scale)`.

    **Attributes:**

    - `radius`: half the width of every interval, in units of its scale.
    """

    radius: Float[Array, ""]

    __pdoc__ = brief_doc

    @array_function
    def __call__(self, predictions: kinds.Points, scale: kinds.PointScale | None = None) -> Interval:
        """The interval of each row."""
        centre, radius = promote(predictions, self.radius)
        half = radius if scale is None else radius * scale.astype(centre.dtype)
        return Interval(centre - half, centre + half)


@array_function(finish=finish)
def split(
    predictions: kinds.Predicted,
    targets: kinds.Observed,
    *,
    level: float,
    scale: kinds.RowScale | None = None,
    row_weights: kinds.RowFilter = None,
) -> Split:
    r"""Intervals for any model that cover a new target with probability `level` or more, if rows are exchangeable.

    Half the width is [`eqx_ensemble.conformal.quantile`][] of the absolute errors $|y_i - x_i|$ on held-out rows; with
    a `scale`, that of $|y_i - x_i| / \sigma_i$, times the scale of the new row.

    **Arguments:**

    - `predictions`, `targets`: `(rows,)`, of held-out rows. Fit several outputs separately.
    - `scale`: `(rows,)`, positive, such as a standard deviation: intervals are wider where it is larger.

    **Returns:** [`eqx_ensemble.conformal.Split`][].

    ```python
    fitted = ee.conformal.split(jnp.zeros(9), jnp.arange(1.0, 10.0), level=0.8)
    fitted(jnp.array([5.0]))  # -3 to 13
    fitted = ee.conformal.split(
        jnp.zeros(9), jnp.arange(1.0, 10.0), level=0.8, scale=jnp.full(9, 2.0)
    )
    fitted(jnp.array([5.0]), jnp.array([1.0]))  # 1 to 9
    ```

    ??? cite
        [Lei et al., JASA 2018](https://arxiv.org/abs/1604.04173)
    """
    errors = jnp.abs(targets - predictions) / (1 if scale is None else scale)
    radius, few = threshold(errors, level, row_weights)
    return Split(_rounded_up(radius)), few  # pyright: ignore[reportReturnType]


class Cqr(eqx.Module):
    """Fitted conformalised intervals: `fitted(lower, upper)`, of any shape, returns `.lower` and `.upper`.

    Ends that cross are set to their midpoint.

    **Attributes:**

    - `below`, `above`: the outward shifts of the ends; negative if intervals are narrowed.
    """

    below: Float[Array, ""]
    above: Float[Array, ""]

    __pdoc__ = brief_doc

    @array_function
    def __call__(self, low: kinds.Points, high: kinds.Points) -> Interval:
        """The interval of each row."""
        low, high, below, above = promote(low, high, self.below, self.above)
        low, high = low - below, high + above
        middle = low / 2 + high / 2
        return Interval(jnp.where(low > high, middle, low), jnp.where(low > high, middle, high))


@array_function(finish=finish)
def cqr(
    low: kinds.Predicted,
    high: kinds.Predicted,
    targets: kinds.Observed,
    *,
    level: float,
    ends: Literal["together", "each"] = "together",
    row_weights: kinds.RowFilter = None,
) -> Cqr:
    r"""Conformalised quantile regression: intervals corrected to cover exchangeable targets with probability `level`.

    With `"together"` both `ends` move by [`eqx_ensemble.conformal.quantile`][] of $\max(l_i - y_i, y_i - u_i)$. With
    `"each"`, each end moves by the quantile of its own error, at level $(1 + \mathrm{level}) / 2$: targets are then
    below, and likewise above, with probability at most $(1 - \mathrm{level}) / 2$; intervals are wider.

    **Arguments:**

    - `low`, `high`: `(rows,)`, two predicted quantiles, which may cross, or the result of
        [`eqx_ensemble.uncertainty.gaussian_interval`][].
    - the others: as for [`eqx_ensemble.conformal.split`][].

    **Returns:** [`eqx_ensemble.conformal.Cqr`][].

    ```python
    low, high, targets = jnp.zeros(9), jnp.ones(9), jnp.arange(1.0, 10.0)
    fitted = ee.conformal.cqr(low, high, targets, level=0.8)
    fitted(jnp.array([0.0]), jnp.array([2.0]))  # -7 to 9
    ```

    ??? cite
        [Romano et al., NeurIPS 2019](https://arxiv.org/abs/1905.03222)
    """
    below, above = low - targets, targets - high
    if ends == "together":
        margin, few = threshold(jnp.maximum(below, above), level, row_weights)
        margin = _rounded_up(margin)
        return Cqr(margin, margin), few  # pyright: ignore[reportReturnType]
    (first, few), (second, _) = (threshold(x, (1 + level) / 2, row_weights) for x in (below, above))
    return Cqr(_rounded_up(first), _rounded_up(second)), few  # pyright: ignore[reportReturnType]


def _rounded_up(error: Float[Array, ""]) -> Float[Array, ""]:
    """More than rounding may have taken: the end that the error determines does not fall short of its target."""
    return error + 4 * jnp.finfo(error.dtype).eps * jnp.abs(error)


def by_fold(predictions: Float[Array, "members ..."], num_folds: int) -> Float[Array, "folds ..."]:
    """The mean over the members of each fold: member `i` belongs to fold `i % folds`."""
    if predictions.shape[0] % num_folds:
        got = f"fitted on {num_folds}, got {predictions.shape[0]}"
        fix = "Pass the predictions of all fitted members, in order."
        raise value_error("predictions of equally many members for each fold", got, fix)
    return jnp.mean(jnp.reshape(predictions, (-1, num_folds, *predictions.shape[1:])), axis=0)


class JackknifePlus(eqx.Module):
    """Fitted jackknife+ intervals: `fitted(predictions)` takes all members' predictions `(members, *batch)`,
    and returns `.lower` and `.upper` `(*batch,)`.

    If more members predict than were fitted, member `i` belongs to fold `i % folds`, and those of a fold are averaged.

    **Attributes:**

    - `residuals`: `(rows,)`, held-out absolute errors; infinite for rows that do not count.
    - `share`: `(members, rows)`, the weights of the members that held the row out.
    - `rank`: the rank of the values at the interval ends.
    """

    residuals: Float[Array, " rows"]
    share: Float[Array, "members rows"]
    rank: Int32[Array, ""]

    __pdoc__ = brief_doc

    @array_function
    def __call__(self, predictions: kinds.Members) -> Interval:
        """The interval of each row."""
        each, residuals, share = promote(by_fold(predictions, self.share.shape[0]), self.residuals, self.share)
        used, last = jnp.any(share > 0, axis=1), residuals.size - 1
        flat = jnp.where(used[:, None], each.reshape(each.shape[0], -1), 0)
        offset = flat[jnp.argmax(used)]  # in sums of large products its rounding would differ between rows

        def ends(of_row: Float[Array, " members"]) -> tuple[Array, Array]:
            centre = jnp.matmul(jnp.where(used, of_row, 0), share, precision=jax.lax.Precision.HIGHEST)
            at_rank = lambda x: jnp.sort(x)[jnp.minimum(self.rank - 1, last)]
            beyond = self.rank > residuals.size
            lower, upper = at_rank(residuals - centre), at_rank(residuals + centre)
            return jnp.where(beyond, -jnp.inf, -lower), jnp.where(beyond, jnp.inf, upper)

        found = jax.lax.map(ends, (flat - offset[None]).T, batch_size=256)
        return Interval(*(jnp.reshape(x + offset, each.shape[1:]) for x in found))


def _finish_left_out(out: tuple[JackknifePlus, Array], given: dict[str, Any]) -> JackknifePlus:
    host = concrete(out[0].residuals)
    if host is not None and (wrong := np.isnan(host)).any():
        fix = "Did members diverge? Exclude their rows with `row_weights`, or retrain them."
        raise value_error(
            "`held_out` predictions without NaN in rows that a member held out", first_text(host, wrong), fix
        )
    return finish(out, given)


@array_function(finish=_finish_left_out)
def jackknife_plus(
    held_out: kinds.HeldOut,
    targets: kinds.Observed,
    unseen: kinds.Unseen,
    *,
    level: float,
    weights: kinds.Weights = None,
    row_weights: kinds.RowFilter = None,
) -> JackknifePlus:
    r"""Jackknife+ and CV+: intervals from one run on folds or bootstraps, without a calibration set.

    Let $R_i$ be the absolute error for row $i$ of the members that were not trained on it, and $\mu_{-i}(x)$ their mean
    prediction for a new $x$. With $k = \lceil (n + 1) \, \mathrm{level} \rceil$, the upper end is the $k$-th smallest
    $\mu_{-i}(x) + R_i$, and the lower end the $k$-th largest $\mu_{-i}(x) - R_i$. It covers a new,
    exchangeable target with probability at least $2 \, \mathrm{level} - 1$, minus a term that vanishes for many folds
    or rows; in practice with `level`.

    **Arguments:**

    - `held_out`: `(rows,)`, one output at a time: `.held_out.mean` of [`eqx_ensemble.methods.cross_fit`][] (CV+), or
        `.mean` of [`eqx_ensemble.resample.held_out_mean`][] (jackknife+ after bootstrap).
    - `unseen`: `(members, rows)`, the rows that each member was not trained on: `folds.in_test` of
        [`eqx_ensemble.resample.folds`][], or [`eqx_ensemble.resample.out_of_bag`][]. The error of a row that no member
        held out is infinite, which widens the intervals: train a few dozen members on bootstraps.
    - `weights`: `(members,)`, as used for the held-out means.
    - the others: as for [`eqx_ensemble.conformal.split`][].

    **Returns:** [`eqx_ensemble.conformal.JackknifePlus`][].

    ```python
    y, folds = jnp.linspace(-1, 1, 100), ee.resample.folds(100, 10, key=key)
    predictions = y[None] + 0.1 * jax.random.normal(key, (10, 100))  # of all members
    held_out = ee.resample.held_out_mean(predictions, folds.in_test).mean
    fitted = ee.conformal.jackknife_plus(held_out, y, folds.in_test, level=0.9)
    lower, upper = fitted(predictions)
    ```

    ??? cite
        [Barber et al., AoS 2021](https://arxiv.org/abs/1905.02928); after bootstrap: [Kim et al., NeurIPS
        2020](https://arxiv.org/abs/2002.09025)
    """
    share = shares_unseen(unseen, weights, held_out.dtype)
    counted = jnp.ones(targets.shape, bool) if row_weights is None else row_weights
    finite = counted & jnp.any(share > 0, axis=0)
    residuals = jnp.where(finite, jnp.abs(targets - held_out), jnp.inf)
    rank = ranks(level, targets.size)[jnp.sum(counted)]
    return JackknifePlus(residuals, share, rank), rank > jnp.sum(finite, dtype=rank.dtype)  # pyright: ignore[reportReturnType]


def shares_unseen(
    unseen: Bool[Array, "members rows"], weights: Float[Array, " members"] | None, dtype: jnp.dtype
) -> Float[Array, "members rows"]:
    """The normalised weights of the members that held each row out; zero for rows without such a member."""
    own = unseen.astype(dtype) * (1 if weights is None else weights[:, None])
    total = jnp.sum(own, axis=0, keepdims=True)
    return own / jnp.where(total == 0, 1, total)
