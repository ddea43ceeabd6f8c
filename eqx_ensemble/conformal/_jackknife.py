import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int32, Num, Real

from .._brief import brief_doc
from .._check import CountedRows, RowWeightsLike, check_fitted_members, check_values, check_weights, promote
from ..resample import Folds, out_of_bag
from ..resample._engine import check_drawn, check_folds
from ..uncertainty import Interval
from ._check import check_held_out, check_level, check_members_of_folds, check_rows_of_folds, check_targets
from ._outward import difference_up, distance_up, rounding_of_means
from ._quantile import fraction, rank_of, value_at_rank

_CHUNK = 256
"""The number of new rows compared with all held-out rows at a time."""


def fit_left_out(
    held_out: Array,
    targets: Interval,
    unseen: Bool[Array, "folds rows"],
    weights: Array | None,
    rows: CountedRows,
    level: float,
    infinite: int,
) -> tuple[Array, Array, Array, Array]:
    """Residuals, weights of the members that held each row out, the rank of the quantile, and which rows count."""
    rank = rank_of(fraction(level), held_out.size, rows, infinite=infinite)
    counted = jnp.ones(held_out.shape, bool) if rows.counted is None else rows.counted
    held_out, *ends = (rows.blank(x) for x in (held_out, *targets))
    return *_residuals_and_shares(held_out, Interval(*ends), unseen, weights), rank, counted


@jax.jit
def _residuals_and_shares(
    held_out: Float[Array, " rows"],
    targets: Interval,
    unseen: Bool[Array, "folds rows"],
    weights: Float[Array, " folds"] | None,
) -> tuple[Float[Array, " rows"], Float[Array, "folds rows"]]:
    share = left_out_shares(unseen, jnp.ones(unseen.shape[0], held_out.dtype) if weights is None else weights)
    in_all = ~jnp.any(share > 0, axis=0)
    return jnp.where(in_all, jnp.inf, distance_up(targets, held_out)), share


def left_out_shares(unseen: Bool[Array, "folds rows"], weights: Float[Array, " folds"]) -> Float[Array, "folds rows"]:
    """The normalised weights of the members that held each row out; zero for rows without such a member."""
    share = jnp.where(unseen, weights[:, None], 0)
    total = jnp.sum(share, axis=0)
    return share / jnp.where(total == 0, 1, total)[None]


@jax.jit
def intervals(
    predictions: Float[Array, " times folds *batch"],
    residuals: Float[Array, " rows"],
    share: Float[Array, "folds rows"],
    rank: Int32[Array, ""],
    counted: Bool[Array, " rows"],
) -> Interval:
    """Quantiles over held-out rows of the prediction by members that held the row out, plus or minus its residual.

    Rounded outwards, also by the rounding of means over several members.
    """
    mean = jnp.mean(predictions, axis=0)
    flat = jnp.reshape(mean, (mean.shape[0], -1))
    used = jnp.any(share > 0, axis=1)
    flat = jnp.where(used[:, None], flat, 0)
    num_averaged = predictions.shape[0] * jnp.max(jnp.sum(share > 0, axis=0))

    def ends(of_row: Float[Array, " folds"]) -> tuple[Array, Array]:
        # A common offset is subtracted first: in sums of large products its rounding would differ between rows.
        offset = jnp.sum(jnp.where(used, of_row, 0)) / jnp.sum(used).astype(of_row.dtype)
        # The ends, of which the lower is negated: both are rounded up in each step.
        offsets = jnp.stack([-offset, offset])
        differences = difference_up(jnp.stack([-of_row, of_row]), jnp.broadcast_to(offsets[:, None], (2, of_row.size)))
        left_out = jnp.matmul(differences, share, precision=jax.lax.Precision.HIGHEST)
        at_rows = difference_up(jnp.broadcast_to(residuals, left_out.shape), -left_out)
        found = jax.vmap(value_at_rank, in_axes=(0, None, None))(at_rows, counted, rank)
        lower, upper = difference_up(found, -offsets) + rounding_of_means(of_row, num_averaged)
        return -lower, upper

    lower, upper = jax.lax.map(ends, flat.T, batch_size=_CHUNK)
    return Interval(jnp.reshape(lower, mean.shape[1:]), jnp.reshape(upper, mean.shape[1:]))


class CvPlus(eqx.Module):
    """Fitted CV+ intervals: `fitted(predictions)` takes those of all members, `(members, *batch)`, and returns
    `.lower` and `.upper` `(*batch,)`.

    Member `i` belongs to fold `i % folds`; several members per fold are averaged.

    **Attributes:**

    - `residuals`, `counted`: `(rows,)`, held-out absolute errors, and which rows count.
    - `share`: `(folds, rows)`, the weights of the folds that held the row out.
    - `rank`: the rank of the values at the interval ends.
    """

    residuals: Float[Array, " rows"]
    share: Float[Array, "folds rows"]
    rank: Int32[Array, ""]
    counted: Bool[Array, " rows"]

    __pdoc__ = brief_doc

    def __call__(self, predictions: Float[ArrayLike, " members *batch"]) -> Interval:
        """The interval of each row."""
        checked = check_values("predictions", predictions)
        times = check_members_of_folds(self.share.shape[0], checked.shape[0])
        by_fold = jnp.reshape(checked, (times, self.share.shape[0], *checked.shape[1:]))
        return intervals(*promote(by_fold, self.residuals, self.share), self.rank, self.counted)


class JackknifePlus(eqx.Module):
    """Fitted jackknife+ intervals: `fitted(predictions)` takes those of all members, `(members, *batch)`, and returns
    `.lower` and `.upper` `(*batch,)`.

    `residuals`, `counted`, `share` and `rank` are those of [`eqx_ensemble.conformal.CvPlus`][], with members for folds.
    """

    residuals: Float[Array, " rows"]
    share: Float[Array, "members rows"]
    rank: Int32[Array, ""]
    counted: Bool[Array, " rows"]

    __pdoc__ = brief_doc

    def __call__(self, predictions: Float[ArrayLike, " members *batch"]) -> Interval:
        """The interval of each row."""
        checked = check_values("predictions", predictions)
        check_fitted_members(self.share.shape[0], checked.shape[0])
        return intervals(*promote(checked[None], self.residuals, self.share), self.rank, self.counted)


def cv_plus(
    held_out: Float[ArrayLike, " rows"],
    targets: Real[ArrayLike, " rows"],
    folds: Folds,
    *,
    level: float,
    row_weights: RowWeightsLike | None = None,
) -> CvPlus:
    r"""CV+: intervals from one cross-fit run, without a calibration set.

    Let $R_i$ be the absolute error for row $i$ of the members that were not trained on it, and $\mu_{-i}(x)$ their
    prediction for a new $x$. With $k = \lceil (n + 1) \, \mathrm{level} \rceil$, the upper end is the $k$-th smallest
    $\mu_{-i}(x) + R_i$, and the lower end the $k$-th largest $\mu_{-i}(x) - R_i$. It covers a new target with
    probability at least $2 \, \mathrm{level} - 1$, minus a term that vanishes for many folds or rows; in practice with
    `level`.

    **Arguments:**

    - `held_out`: `(rows,)`, `.held_out.mean` of [`eqx_ensemble.methods.cross_fit`][], one output at a time.
    - `folds`: the result of [`eqx_ensemble.resample.folds`][]; every row is held out at least once.
    - the others: as for [`eqx_ensemble.conformal.split`][].

    **Returns:** [`eqx_ensemble.conformal.CvPlus`][].

    ```python
    y, folds = jnp.linspace(-1, 1, 100), ee.resample.folds(100, 10, key=key)
    predictions = y[None] + 0.1 * jax.random.normal(key, (10, 100))  # of all members
    held_out = ee.resample.out_of_fold(predictions, folds).mean
    fitted = ee.conformal.cv_plus(held_out, y, folds, level=0.9)
    lower, upper = fitted(predictions)
    ```

    ??? cite
        [Barber et al., AoS 2021](https://arxiv.org/abs/1905.02928)
    """
    check_folds(folds)
    predicted, observed, rows = check_targets(targets, row_weights, held_out=held_out)
    check_rows_of_folds(predicted.size, folds.in_test.shape[1])
    check_level(level)
    unseen = folds.in_test
    check_held_out(held_out, unseen, rows, every_row=True)
    return CvPlus(*fit_left_out(predicted, observed, unseen, None, rows, level, 0))


def jackknife_plus_after_bootstrap(
    held_out: Float[ArrayLike, " rows"],
    targets: Real[ArrayLike, " rows"],
    drawn: Num[ArrayLike, "members n"] | Bool[ArrayLike, "members n"],
    *,
    level: float,
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: RowWeightsLike | None = None,
) -> JackknifePlus:
    r"""Jackknife+-after-bootstrap: intervals from one bagged ensemble, without a calibration set.

    As [`eqx_ensemble.conformal.cv_plus`][], where $\mu_{-i}$ is the mean of the members that never drew row $i$. The
    error of a row that all members drew is infinite, which widens the intervals: use a few dozen members. The guarantee
    is exact if the number of members is drawn from a binomial distribution.

    **Arguments:**

    - `held_out`: `(rows,)`, `.mean` of [`eqx_ensemble.resample.out_of_bag_mean`][], one output at a time; NaN for rows
        without.
    - `drawn`: row indices `(members, n)` or weights `(members, rows)`, as for [`eqx_ensemble.resample.out_of_bag`][].
    - `weights`: convex weights `(members,)`, as used for the out-of-bag means.
    - the others: as for [`eqx_ensemble.conformal.split`][].

    **Returns:** [`eqx_ensemble.conformal.JackknifePlus`][].

    ```python
    y, rows = jnp.linspace(-1, 1, 50), ee.resample.bootstrap(50, 20, key=key)
    predictions = y[None] + 0.1 * jax.random.normal(key, (20, 50))  # of all members
    held_out = ee.resample.out_of_bag_mean(predictions, rows).mean
    fitted = ee.conformal.jackknife_plus_after_bootstrap(held_out, y, rows, level=0.8)
    lower, upper = fitted(predictions)
    ```

    ??? cite
        [Kim et al., NeurIPS 2020](https://arxiv.org/abs/2002.09025)
    """
    predicted, observed, rows = check_targets(targets, row_weights, held_out=held_out)
    check_level(level)
    unseen = out_of_bag(check_drawn(drawn, predicted.size), predicted.size)
    convex = check_weights(weights, unseen.shape[0], predicted.dtype)
    seen_by = unseen if convex is None else unseen & (convex > 0)[:, None]
    infinite = check_held_out(held_out, seen_by, rows, every_row=False)
    return JackknifePlus(*fit_left_out(predicted, observed, seen_by, convex, rows, level, infinite))
