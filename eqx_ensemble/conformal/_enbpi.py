from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Num, Real

from .._brief import brief_doc
from .._caller import caller
from .._check import (
    RowWeightsLike,
    check_array,
    check_counted_rows,
    check_fitted_members,
    check_positive_int,
    check_regression,
    check_values,
    check_weights,
    concrete,
    kind_text,
    promote,
    value_error,
)
from .._warnings import warn
from .._weighting import blank_unweighted, known_mean, weighted_mean
from ..resample import out_of_bag
from ..resample._engine import check_drawn
from ..uncertainty import Interval
from ._check import check_held_out, check_level, check_targets
from ._jackknife import left_out_shares
from ._outward import difference_up, enclose, residuals_out, rounding_of_means
from ._quantile import fraction

# Signed residuals of out-of-bag means, and the shortest interval that contains a fraction of them.


@jax.jit
def residuals_and_share(
    held_out: Float[Array, " rows"],
    targets: Interval,
    unseen: Bool[Array, "members rows"],
    weights: Float[Array, " members"],
    known: Bool[Array, " rows"],
) -> tuple[Interval, Float[Array, " members"]]:
    """The residuals, rounded outwards, and the members' weights in the mean of out-of-bag means over known rows."""
    lower, upper, held_out = (jnp.where(known, x, 0) for x in (*targets, held_out))
    residuals = residuals_out(Interval(lower, upper), held_out)
    share = jnp.sum(jnp.where(known[None], left_out_shares(unseen, weights), 0), axis=1)
    total = jnp.sum(share)
    return residuals, jnp.where(total == 0, weights / jnp.sum(weights), share / jnp.where(total == 0, 1, total))


@partial(jax.jit, static_argnames="level")
def shortest(
    residuals: Interval, known: Bool[Array, " rows"], level: float
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The ends of the shortest interval of neighbours; infinite if no residual is known, NaN if a known one is NaN."""
    exact, num_rows = fraction(level), known.size
    sizes = np.asarray([n * exact.numerator // exact.denominator for n in range(num_rows + 1)], np.int32)
    count = jnp.sum(known, dtype=jnp.int32)
    # The order of the rows is the same for both ends, up to ties.
    ordered, above = (jnp.sort(jnp.where(known, ends, jnp.inf)) for ends in residuals)
    lower = jnp.arange(num_rows, dtype=jnp.int32)
    upper = lower + jnp.asarray(sizes)[count]
    ends = above[jnp.minimum(upper, num_rows - 1)]
    inside = upper < count
    first = jnp.argmin(jnp.where(inside, ends - jnp.where(inside, ordered, 0), jnp.inf))
    none = count == 0
    spoilt = jnp.any(jnp.isnan(residuals.upper) & known)
    below = jnp.where(none, -jnp.inf, jnp.where(spoilt, jnp.nan, ordered[first]))
    return below, jnp.where(none, jnp.inf, jnp.where(spoilt, jnp.nan, ends[first]))


def check_outcome(covered: ArrayLike) -> Array:
    """Raises unless `covered` is a scalar from 0 to 1. Returns it as an array."""
    array = check_array("covered", covered)
    if array.shape != () or jnp.issubdtype(array.dtype, jnp.complexfloating):
        fix = "Several targets at one step? Pass the mean of their outcomes. Several series? `jax.vmap` over states."
        raise value_error("one outcome as `covered`", f"got {kind_text(array)}", fix)
    host = concrete(covered)
    if host is not None and not 0 <= host <= 1:
        fix = "Pass whether the target was in its set: `(lower <= target) & (target <= upper)`."
        raise value_error("`covered` from 0 to 1", f"got {host}", fix)
    return array


def warn_of_no_residual(known: Array, reason: str, fix: str) -> None:
    """Warns if no residual of the window is known; checked where concrete."""
    host = concrete(known)
    if host is not None and not np.any(host):
        warn(f"`{caller()}`: {reason}; every interval is unbounded. {fix}")


class Enbpi(eqx.Module):
    """Fitted EnbPI intervals of a series: `fitted(predictions)` takes all members' predictions `(members, *batch)`, and
    returns `.lower` and `.upper` `(*batch,)`.

    **Attributes:**

    - `residuals`: targets minus predictions, oldest first, rounded down in `.lower` and up in `.upper`.
    - `known`: `(window,)`, whether each residual is used.
    - `share`: `(members,)`, their weights in the mean prediction.
    - `level`: the coverage.
    """

    residuals: Interval
    known: Bool[Array, " window"]
    share: Float[Array, " members"]
    level: float = eqx.field(static=True)

    __pdoc__ = brief_doc

    def __call__(self, predictions: Float[ArrayLike, " members *batch"]) -> Interval:
        """The interval of each row."""
        checked = check_values("predictions", predictions)
        check_fitted_members(self.share.size, checked.shape[0])
        below, above = shortest(self.residuals, self.known, self.level)
        return _ends(*promote(checked, self.share, below, above))

    def update(
        self,
        predictions: Float[ArrayLike, " members *times"],
        targets: Real[ArrayLike, "*times"],
        *,
        row_weights: RowWeightsLike | None = None,
    ) -> "Enbpi":
        """The state after one time step, or several in order: new residuals replace the oldest.

        Times where `row_weights` are `False` have no target, but also replace residuals.
        """
        checked, observed = check_regression(targets, members=True, predictions=predictions)
        check_fitted_members(self.share.size, checked.shape[0])
        if observed.ndim > 1:
            fix = "The window of residuals belongs to one series: one state for each, with `jax.vmap`."
            raise value_error("`predictions` (members,) or (members, times)", f"got shape {checked.shape}", fix)
        rows = check_counted_rows(row_weights, observed.shape, none_counts=True)
        checked, lower, upper, share = promote(checked, *enclose(targets, observed), self.share)
        lower, upper = rows.blank(lower), rows.blank(upper)
        found = residuals_out(Interval(lower, upper), known_mean(rows.blank(checked, before=1), share))
        if (host := concrete(found.upper)) is not None and (count := np.isnan(host).sum()):
            fix = "No target at that time? Pass `row_weights=False`. Did members diverge? Give them a weight of zero."
            got = f"got {count} residuals that are NaN"
            raise value_error("predictions and targets without NaN", got, fix)
        window = self.known.size
        slide = lambda old, new: jnp.concatenate([old, jnp.ravel(new).astype(old.dtype)])[-window:]
        known = slide(self.known, jnp.ones(observed.shape, bool) if rows.counted is None else rows.counted)
        warn_of_no_residual(known, "no time of the window has a target", "Pass a longer `window` to `enbpi`.")
        return Enbpi(jax.tree.map(slide, self.residuals, found), known, self.share, self.level)


@jax.jit
def _ends(
    predictions: Float[Array, " members *batch"],
    share: Float[Array, " members"],
    below: Float[Array, ""],
    above: Float[Array, ""],
) -> Interval:
    """The mean plus the ends, rounded outwards, also by the rounding of means over several members."""
    counted = blank_unweighted(predictions, share)
    centre, rounding = weighted_mean(counted, share), rounding_of_means(counted, jnp.sum(share > 0))
    end = lambda shift, middle: difference_up(difference_up(jnp.broadcast_to(shift, middle.shape), -middle), -rounding)
    return Interval(-end(-below, -centre), end(above, centre))


def enbpi(
    held_out: Float[ArrayLike, " rows"],
    targets: Real[ArrayLike, " rows"],
    drawn: Num[ArrayLike, "members n"] | Bool[ArrayLike, "members n"],
    *,
    level: float,
    window: int | None = None,
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: RowWeightsLike | None = None,
) -> Enbpi:
    r"""EnbPI: intervals for a time series from one bagged ensemble, adapted to the latest residuals.

    An interval is the mean prediction plus the shortest interval of $\lfloor n \, \mathrm{level} \rfloor + 1$ of $n$
    sorted residuals, targets minus out-of-bag means. Coverage is asymptotic, for stationary, mixing errors and a
    consistent model; short windows undercover.

    **Arguments:**

    - `held_out`, `targets`: as for [`eqx_ensemble.conformal.jackknife_plus_after_bootstrap`][], in temporal order.
    - `window`: the number of latest residuals to keep; by default the number of rows.
    - the others: as for [`eqx_ensemble.conformal.jackknife_plus_after_bootstrap`][].

    **Returns:** [`eqx_ensemble.conformal.Enbpi`][].

    ```python
    y, rows = jnp.sin(jnp.arange(60.0)), ee.resample.bootstrap(50, 20, key=key)
    predictions = y[None] + 0.1 * jax.random.normal(key, (20, 60))  # of all members
    held_out = ee.resample.out_of_bag_mean(predictions[:, :50], rows).mean
    fitted = ee.conformal.enbpi(held_out, y[:50], rows, level=0.9)
    lower, upper = fitted(predictions[:, 50])
    fitted = fitted.update(predictions[:, 50], y[50])
    ```

    ??? cite
        [Xu and Xie, ICML 2021](https://arxiv.org/abs/2010.09107)
    """
    predicted, observed, rows = check_targets(targets, row_weights, held_out=held_out)
    check_level(level)
    length = predicted.size if window is None else check_positive_int(window, "window")
    unseen = out_of_bag(check_drawn(drawn, predicted.size), predicted.size)
    convex = check_weights(weights, unseen.shape[0], predicted.dtype)
    seen_by = unseen if convex is None else unseen & (convex > 0)[:, None]
    check_held_out(held_out, seen_by, rows, every_row=False)
    known = rows.blank(jnp.any(seen_by, axis=0), fill=False)
    own = jnp.ones(unseen.shape[0], predicted.dtype) if convex is None else convex
    residuals, share = residuals_and_share(predicted, observed, seen_by, own, known)
    known = known[-length:]
    reason = "no row of the window has a target and an out-of-bag prediction"
    warn_of_no_residual(known, reason, "Train more members, or each on fewer rows; or pass a longer `window`.")
    return Enbpi(jax.tree.map(lambda x: x[-length:], residuals), known, share, float(level))
