from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._boundary import array_function, kinds
from .._brief import brief_doc
from .._caller import caller
from .._check import check_fitted_members, check_level, check_number, concrete, value_error
from .._leaves import promote
from .._warnings import warn
from .._weighting import known_mean
from ..uncertainty import Interval
from ._intervals import shares_unseen
from ._quantile import fraction


class Aci(eqx.Module):
    """The state of adaptive conformal inference between two steps of a series.

    **Attributes:**

    - `level`: the level of the next prediction, which may leave [0, 1].
    - `target`: the long-run coverage.
    - `rate`: the step size of the level.
    """

    level: Float[Array, ""]
    target: Float[Array, ""]
    rate: Float[Array, ""]

    __pdoc__ = brief_doc

    @array_function
    def quantile(self, scores: kinds.Scores, *, row_weights: kinds.RowFilter = None) -> Float[Array, ""]:
        """The bound of the next score: the conformal quantile of recent `scores` `(rows,)` at the current level.

        Infinite at a level of 1 or more, and for too few scores; minus infinity at a level of 0 or less.
        """
        count = jnp.asarray(scores.size if row_weights is None else jnp.sum(row_weights), self.level.dtype)
        # A rank that is exceeded only by rounding of the level counts as reached.
        rank = jnp.ceil((count + 1) * self.level * (1 - 4 * jnp.finfo(self.level.dtype).eps))
        ordered = jnp.sort(scores if row_weights is None else jnp.where(row_weights, scores, jnp.inf))
        found = ordered[jnp.clip(rank, 1, scores.size).astype(jnp.int32) - 1]
        found = jnp.where((rank > count) | (self.level >= 1), jnp.inf, jnp.where(self.level <= 0, -jnp.inf, found))
        return jnp.where(jnp.isnan(ordered[-1]) | jnp.isnan(self.level), jnp.nan, found)

    @array_function
    def update(self, covered: kinds.Covered) -> "Aci":
        """The state after a step; `covered` is whether the target was covered, or the fraction of covered targets."""
        missing = self.target - covered.astype(self.level.dtype)
        return Aci(self.level + self.rate * missing, self.target, self.rate)


def aci(*, level: float, rate: float = 0.005) -> Aci:
    r"""Adaptive conformal inference: long-run coverage for any series, exchangeable or not.

    After each step the level changes by $\gamma (\mathrm{target} - \mathrm{covered})$. After $T$ steps

    $$\left| \tfrac{1}{T} \sum_t \mathrm{covered}_t - \mathrm{target} \right| \le
    \frac{\max(\mathrm{target}, 1 - \mathrm{target}) + \gamma}{\gamma T}$$

    for every series and model, if predictions contain everything at levels of 1 or more, and nothing at levels of 0 or
    less. A large rate adapts fast, but gives some unbounded or empty predictions.

    **Arguments:**

    - `level`: the target coverage, between 0 and 1.
    - `rate`: $\gamma$, a positive number; the authors use 0.005.

    **Returns:** [`eqx_ensemble.conformal.Aci`][], the initial state. For several series use `jax.vmap`.

    ```python
    errors = jnp.abs(jax.random.normal(key, (60,)))
    state = ee.conformal.aci(level=0.9, rate=0.05)
    for i in range(50, 60):
        bound = state.quantile(errors[i - 50 : i])
        state = state.update(errors[i] <= bound)
    ```

    ??? cite
        [Gibbs and Candès, NeurIPS 2021](https://arxiv.org/abs/2106.00170)
    """
    check_level(level)
    if check_number(rate, "rate", least=0) == 0:
        raise ValueError(f"`{caller()}` needs `rate` to be above zero, got {rate!r}.")
    start = jnp.asarray(level, float)
    return Aci(start, start, jnp.asarray(rate, float))


def _finish(out: "Enbpi", _: dict[str, Any]) -> "Enbpi":
    host = concrete(out.residuals)
    if host is not None and np.isnan(host).all():
        fix = "Train more members, or each on fewer rows; or pass a longer `window`."
        warn(f"`{caller()}`: no time of the window has a target and a prediction; intervals are unbounded. {fix}")
    return out


class Enbpi(eqx.Module):
    """Fitted EnbPI intervals of a series: `fitted(predictions)` takes all members' predictions `(members, *batch)`, and
    returns `.lower` and `.upper` `(*batch,)`.

    **Attributes:**

    - `residuals`: `(window,)`, targets minus predictions, oldest first; NaN where one of them is not known.
    - `share`: `(members,)`, their weights in the mean prediction.
    - `level`: the coverage.
    """

    residuals: Float[Array, " window"]
    share: Float[Array, " members"]
    level: float = eqx.field(static=True)

    __pdoc__ = brief_doc

    @array_function
    def __call__(self, predictions: kinds.Samples) -> Interval:
        """The interval of each row."""
        check_fitted_members(self.share.size, predictions.shape[0])
        each, residuals, share = promote(predictions, self.residuals, self.share)
        exact, size = fraction(self.level), residuals.size
        table = np.arange(size + 1) * exact.numerator // exact.denominator
        count = jnp.sum(~jnp.isnan(residuals))
        # The shortest interval of neighbours; NaN is last.
        ordered, first = jnp.sort(residuals), jnp.arange(size)
        last = first + jnp.asarray(table)[count]
        width = ordered[jnp.minimum(last, size - 1)] - ordered
        best = jnp.argmin(jnp.where(last < count, width, jnp.inf))
        centre = known_mean(each, share)
        below = jnp.where(count == 0, -jnp.inf, ordered[best])
        above = jnp.where(count == 0, jnp.inf, ordered[jnp.minimum(last[best], size - 1)])
        return Interval(centre + below, centre + above)

    @array_function(finish=_finish)
    def update(self, predictions: kinds.Samples, targets: kinds.Targets) -> "Enbpi":
        """The state after one time step, or several in order: new residuals replace the oldest.

        `predictions` are `(members,)` or `(members, times)`. A target of NaN, one that is missing, also replaces one.
        """
        check_fitted_members(self.share.size, predictions.shape[0])
        if targets.ndim > 1:
            fix = "The window of residuals belongs to one series: one state for each, with `jax.vmap`."
            raise value_error("`predictions` (members,) or (members, times)", f"got shape {predictions.shape}", fix)
        each, observed, share = promote(predictions, targets, self.share)
        new = jnp.ravel(observed - known_mean(each, share)).astype(self.residuals.dtype)
        residuals = jnp.concatenate([self.residuals, new])[-self.residuals.size :]
        return Enbpi(residuals, self.share, self.level)


@array_function(finish=_finish)
def enbpi(
    held_out: kinds.HeldOut,
    targets: kinds.RowTargets,
    unseen: kinds.Unseen,
    *,
    level: float,
    window: int | None = None,
    weights: kinds.Weights = None,
) -> Enbpi:
    r"""EnbPI: intervals for a time series from one bagged ensemble, adapted to the latest residuals.

    An interval is the mean prediction plus the shortest interval of $\lfloor n \, \mathrm{level} \rfloor + 1$ of $n$
    sorted residuals, targets minus out-of-bag means. Coverage is asymptotic, for stationary, mixing errors and a
    consistent model; short windows undercover.

    **Arguments:**

    - `held_out`: `(rows,)`, in temporal order, `.mean` of [`eqx_ensemble.resample.held_out_mean`][]. NaN where every
        member was trained on the row.
    - `targets`: `(rows,)`; NaN where missing.
    - `unseen`: `(members, rows)`, the result of [`eqx_ensemble.resample.out_of_bag`][].
    - `window`: the number of latest residuals to keep; by default the number of rows.
    - `weights`: `(members,)`, as used for the held-out means.

    **Returns:** [`eqx_ensemble.conformal.Enbpi`][].

    ```python
    y, rows = jnp.sin(jnp.arange(60.0)), ee.resample.bootstrap(50, 20, key=key)
    predictions = y[None] + 0.1 * jax.random.normal(key, (20, 60))  # of all members
    unseen = ee.resample.out_of_bag(rows, 50)
    held_out = ee.resample.held_out_mean(predictions[:, :50], unseen).mean
    fitted = ee.conformal.enbpi(held_out, y[:50], unseen, level=0.9)
    lower, upper = fitted(predictions[:, 50])
    fitted = fitted.update(predictions[:, 50], y[50])
    ```

    ??? cite
        [Xu and Xie, ICML 2021](https://arxiv.org/abs/2010.09107)
    """
    shares = shares_unseen(unseen, weights, held_out.dtype)
    residuals = jnp.where(jnp.any(shares > 0, axis=0), targets - held_out, jnp.nan)
    # The members' weights in the mean of out-of-bag means over known rows.
    share = jnp.sum(jnp.where(jnp.isnan(residuals)[None], 0, shares), axis=1)
    equal = jnp.full(share.shape, 1 / share.size, share.dtype) if weights is None else weights
    total = jnp.sum(share)
    share = jnp.where(total > 0, share / jnp.where(total > 0, total, 1), equal)
    return Enbpi(residuals[-(window or targets.size) :], share, level)
