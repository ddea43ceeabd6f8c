import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Num, Real

from .._check import (
    check_fitted_members,
    check_positive_int,
    check_regression,
    check_values,
    check_weights,
    promote,
)
from .._weighting import blank_masked, blank_unweighted, known_mean, weighted_mean
from ..resample import out_of_bag
from ..resample._check import check_drawn
from ..uncertainty import Interval
from ._check import check_held_out, check_level, check_targets
from ._check_series import check_known, check_residuals, check_times, warn_of_no_residual
from ._outward import difference_up, enclose, residuals_out, rounding_of_means
from ._shortest import residuals_and_share, shortest


class Enbpi(eqx.Module):
    """Fitted EnbPI intervals of a series: call it on predictions of the same members, and update it with targets.

    **Attributes:**

    - `residuals`: targets minus predictions, oldest first, rounded down in `.lower` and up in `.upper`, each
        `(window,)`.
    - `known`: `(window,)`, whether each residual is used.
    - `share`: `(members,)`, the weights of the members in the mean prediction; they sum to one.
    - `level`: the coverage.
    """

    residuals: Interval
    known: Bool[Array, " window"]
    share: Float[Array, " members"]
    level: float = eqx.field(static=True)

    def __call__(self, predictions: Float[ArrayLike, " members *batch"]) -> Interval:
        """The intervals `(*batch,)` from all members' predictions."""
        name = "conformal.Enbpi"
        checked = check_values(name, "predictions", predictions)
        check_fitted_members(name, self.share.size, checked.shape[0])
        below, above = shortest(self.residuals, self.known, self.level)
        return _ends(*promote(checked, self.share, below, above))

    def update(
        self,
        predictions: Float[ArrayLike, " members *times"],
        targets: Real[ArrayLike, "*times"],
        *,
        mask: Bool[ArrayLike, "*times"] | None = None,
    ) -> "Enbpi":
        """The state after one time step, or several in order: new residuals replace the oldest.

        Times where `mask` is `False` have no target: they are ignored, even if they contain NaN, but also replace
        residuals. Warns if no time of the window has a target: intervals are then unbounded.
        """
        name = "conformal.Enbpi.update"
        checked, observed = check_regression(name, targets, members=True, predictions=predictions)
        check_fitted_members(name, self.share.size, checked.shape[0])
        check_times(name, checked, observed)
        known = check_known(name, mask, observed.shape)
        checked, lower, upper, share = promote(checked, *enclose(targets, observed), self.share)
        lower, upper = blank_masked(lower, known), blank_masked(upper, known)
        found = residuals_out(Interval(lower, upper), known_mean(blank_masked(checked, known, before=1), share))
        check_residuals(name, found.upper)
        window = self.known.size
        slide = lambda old, new: jnp.concatenate([old, jnp.ravel(new).astype(old.dtype)])[-window:]
        known = slide(self.known, known)
        warn_of_no_residual(name, known, "no time of the window has a target", "Pass a longer `window` to `enbpi`.")
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
    mask: Bool[ArrayLike, " rows"] | None = None,
) -> Enbpi:
    r"""EnbPI: intervals for a time series from one bagged ensemble, adapted to the latest residuals.

    Residuals are targets minus the out-of-bag mean, over the members that never drew the row. An interval is the mean
    prediction plus $[q_b, q_{1 - a + b}]$, quantiles of the residuals with $a = 1 - \mathrm{level}$ and the $b$ that
    minimises the width: for $n$ residuals the shortest interval of $\lfloor n \, \mathrm{level} \rfloor + 1$
    neighbours, which need not be symmetric. Residuals of new targets replace the oldest. The mean prediction averages
    the out-of-bag mean over rows.

    Coverage is asymptotic, for stationary, mixing errors and a consistent model, without a finite-sample guarantee.
    Short windows undercover, because quantiles of few residuals do.

    **Arguments:**

    - `held_out`: `(rows,)`, the out-of-bag prediction of every row, in temporal order: `.mean` of
        [`eqx_ensemble.resample.out_of_bag_mean`][]. Rows without one are NaN, and are ignored.
    - `targets`: `(rows,)`; nothing is broadcast.
    - `drawn`: the training rows of the members: row indices `(members, n)` or weights `(members, rows)`, as for
        [`eqx_ensemble.resample.out_of_bag`][].
    - `level`: the coverage, a Python number between 0 and 1.
    - `window`: the number of latest residuals to keep; by default the number of rows.
    - `weights`: convex weights over members, `(members,)`, as used for the out-of-bag means. Members of weight zero are
        ignored.
    - `mask`: booleans `(rows,)`; rows where it is `False` are ignored, even if they contain NaN.

    **Returns:**

    [`eqx_ensemble.conformal.Enbpi`][]: `fitted(predictions)` takes the predictions of all members, `(members, *batch)`,
    and returns `.lower` and `.upper`; `fitted.update(predictions, targets)` returns the state after these targets. Both
    work inside `jax.jit` and `jax.lax.scan`.

    **Raises:**

    - `TypeError` for predictions that are not floating-point.
    - `ValueError` for mismatched shapes, NaN in rows that a member held out, invalid weights, and a level outside
        (0, 1). Warns if no row of the window has an out-of-bag prediction: intervals are then unbounded.
    - `IndexError` for rows outside the data (where concrete).

    ```python
    y = jnp.sin(jnp.arange(60.0)) + 0.1 * jax.random.normal(key, (60,))
    rows = ee.resample.bootstrap(50, 20, key=key)
    # members that know the curve, each with an error of its own
    errors = 0.1 * jax.random.normal(key, (20, 1))
    predictions = jnp.sin(jnp.arange(60.0))[None] + errors
    held_out = ee.resample.out_of_bag_mean(predictions[:, :50], rows).mean
    fitted = ee.conformal.enbpi(held_out, y[:50], rows, level=0.9)
    lower, upper = fitted(predictions[:, 50])
    fitted = fitted.update(predictions[:, 50], y[50])
    ```

    ??? cite
        [Conformal prediction interval for dynamic time-series](https://arxiv.org/abs/2010.09107)

        ```bibtex
        @inproceedings{xu2021conformal,
            author={Chen Xu and Yao Xie},
            title={Conformal prediction interval for dynamic time-series},
            booktitle={International Conference on Machine Learning},
            year={2021},
        }
        ```
    """
    name = "conformal.enbpi"
    predicted, observed, kept = check_targets(name, targets, mask, held_out=held_out)
    check_level(name, level)
    length = predicted.size if window is None else check_positive_int(window, "window", name=name)
    unseen = out_of_bag(check_drawn(name, drawn, predicted.size), predicted.size)
    convex = check_weights(name, weights, unseen.shape[0], predicted.dtype)
    seen_by = unseen if convex is None else unseen & (convex > 0)[:, None]
    check_held_out(name, held_out, seen_by, mask, every_row=False)
    known = jnp.any(seen_by, axis=0) if kept is None else jnp.any(seen_by, axis=0) & kept
    own = jnp.ones(unseen.shape[0], predicted.dtype) if convex is None else convex
    residuals, share = residuals_and_share(predicted, observed, seen_by, own, known)
    known = known[-length:]
    reason = "no row of the window has a target and an out-of-bag prediction"
    warn_of_no_residual(name, known, reason, "Train more members, or each on fewer rows; or pass a longer `window`.")
    return Enbpi(jax.tree.map(lambda x: x[-length:], residuals), known, share, float(level))
