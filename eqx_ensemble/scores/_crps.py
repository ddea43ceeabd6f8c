from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Real

from .._check import (
    ALL_ROWS,
    CountedRows,
    RowWeightsLike,
    as_column,
    check_array,
    check_entries,
    check_function,
    check_regression,
    check_row_weights,
    check_weights,
    check_word,
    concrete,
    type_error,
    value_error,
)
from .._combination import by_order
from .._weighting import shares_in_order
from ._reduce import Reduction, reduce_rows


def check_chaining(chaining: Callable[[Array], Array] | None, lower: ArrayLike | None, upper: ArrayLike | None) -> None:
    """Raises unless either thresholds or a chaining function are given."""
    given = lower is not None or upper is not None
    if chaining is not None:
        check_function(chaining, "chaining", example="lambda z: jax.nn.softplus(z - 3)")
    if given == (chaining is not None):
        got = "got both" if given else "got neither"
        fix = "`lower=`, `upper=` or both restrict the score to a range. For all values use `scores.crps`."
        raise value_error("thresholds or `chaining`", got, fix)


def check_thresholds(
    lower: ArrayLike | None, upper: ArrayLike | None, targets: Array, rows: CountedRows
) -> tuple[Array, Array]:
    """Raises for invalid thresholds. Returns both, each a scalar or one per row, infinite if not given."""
    found = []
    for argument, value, missing in (("lower", lower, -np.inf), ("upper", upper, np.inf)):
        array = check_array(argument, missing if value is None else value)
        if not (jnp.issubdtype(array.dtype, jnp.integer) or jnp.issubdtype(array.dtype, jnp.floating)):
            got = f"got dtype {array.dtype}, shape {array.shape}"
            raise type_error(f"real numbers as `{argument}`", got, "In the unit of the targets.")
        if array.shape not in ((), targets.shape):
            got = f"expected () or {targets.shape}, got {array.shape}"
            fix = "Nothing is broadcast. One score per threshold? Use `jax.vmap`."
            raise value_error(f"`{argument}` as one number, or one per row", got, fix)
        host = concrete(missing if value is None else value)
        fix = "Leave out the threshold that does not bound anything."
        check_entries(
            f"`{argument}` without NaN",
            missing if value is None else value,
            np.isnan,
            fix,
            rows if array.ndim else ALL_ROWS,
        )
        found.append((array.astype(targets.dtype), host))
    (low, low_host), (high, high_host) = found
    if low_host is not None and high_host is not None and rows.known is not None:
        wrong = (low_host > high_host) & (rows.known if max(low_host.ndim, high_host.ndim) else True)
        if np.any(wrong):
            got = f"got `lower` {low_host[wrong].flat[0]}" if low_host.ndim else f"got `lower` {low_host}"
            raise value_error("`lower` at or below `upper`", got, "Swapped? `lower` comes first.")
    return low, high


def check_chained(chaining: Callable[[Array], Array], values: Array) -> Array:
    """Calls a chaining function; raises unless it returns floating-point values of the same shape."""
    chained = chaining(values)
    shape, dtype = getattr(chained, "shape", None), getattr(chained, "dtype", None)
    if shape != values.shape or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        got = f"got shape {shape}, dtype {dtype}, of shape {values.shape}"
        fix = "It is applied to each value: `lambda z: jnp.maximum(z, 3.0)`."
        raise value_error("`chaining` that returns a number for each value", got, fix)
    return chained.astype(values.dtype)


def crps(
    samples: Float[ArrayLike, " members *batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    estimator: Literal["nrg", "fair"] = "nrg",
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: RowWeightsLike | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Continuous ranked probability score of the members' point predictions as samples.

    $\sum_m w_m |x_m - y| - \frac12 \sum_{mn} w_m w_n |x_m - x_n|$, in the unit of the target. For `"fair"` the last sum
    is divided by $M (M - 1)$ instead of $M^2$: unbiased for the distribution that members are drawn from, without
    favouring larger ensembles.

    **Arguments:**

    - `samples`: `(members, *batch)`, one number per member and entry.
    - `targets`: `(*batch,)`.
    - `estimator`: `"nrg"` or `"fair"`, as in `scoringrules`; report which one was used.
    - `weights`: convex weights over members, `(members,)`. Only with `"nrg"`.
    - `row_weights`, `reduction`: as for every score.

    **Returns:**

    A scalar, or `(*batch,)`. For one member, `"nrg"` is the absolute error. Infinite where the target or a member is.

    ```python
    samples, targets = jnp.array([[0.0], [2.0]]), jnp.array([1.0])
    ee.scores.crps(samples, targets)  # 1 - 0.5 = 0.5
    ee.scores.crps(samples, targets, estimator="fair")  # 1 - 1 = 0.0
    ```

    ??? cite
        [Ferro, QJRMS 2014](https://doi.org/10.1002/qj.2270)
    """
    points, observed = check_regression(targets, members=True, samples=samples)
    convex = check_estimator(estimator, points, weights)
    rows = check_row_weights(row_weights, observed.shape, points.dtype, reduction=reduction)
    return crps_of_points(points, observed, rows, convex, estimator, reduction)


def check_estimator(estimator: str, points: Array, weights: ArrayLike | None) -> Array | None:
    """Raises unless the estimator is known and accepts these members. Returns normalised weights."""
    check_word(estimator, "estimator", ("nrg", "fair"))
    num_members = points.shape[0]
    if estimator == "fair" and num_members < 2:
        needs, got = 'at least two members for estimator="fair"', f"got {num_members}"
        raise value_error(needs, got, 'Use `estimator="nrg"`.')
    if estimator == "fair" and weights is not None:
        needs, fix = 'equally weighted members for estimator="fair"', 'Drop them, or use `estimator="nrg"`.'
        raise value_error(needs, "got `weights`", fix)
    return check_weights(weights, points.shape[0], points.dtype)


def crps_of_points(
    points: Float[Array, " members *batch"],
    observed: Float[Array, "*batch"],
    rows: CountedRows,
    convex: Float[Array, " members"] | None,
    estimator: str,
    reduction: Reduction,
) -> Float[Array, "..."]:
    """The score of checked arrays and options."""
    points, observed = rows.blank(points, before=1), rows.blank(observed)
    # Errors are sorted, not values: a large common offset of samples and targets cancels before the sums.
    each = by_order(_fair if estimator == "fair" else _energy, points, convex, centre=observed, fill=0.0)
    return reduce_rows(_with_infinite(each, points, observed, convex), rows.weights, reduction)


@jax.jit
def _with_infinite(
    each: Float[Array, "*batch"],
    points: Float[Array, " members *batch"],
    observed: Float[Array, "*batch"],
    convex: Float[Array, " members"] | None,
) -> Float[Array, "*batch"]:
    """Scores of rows with infinite members or targets, whose differences are NaN: infinite, or zero if all agree."""

    def replace() -> Array:
        ignored = False if convex is None else as_column(convex, points.ndim) == 0
        known = jnp.where(ignored, observed[None], points)
        infinite = jnp.any(jnp.isinf(known), axis=0) | jnp.isinf(observed)
        unknown = jnp.any(jnp.isnan(known), axis=0) | jnp.isnan(observed)
        exact = jnp.where(jnp.all(known == observed[None], axis=0), 0, jnp.inf)
        return jnp.where(infinite & ~unknown, exact.astype(each.dtype), each)

    # The score of such a row is not finite, so that usually the members need not be read.
    return jax.lax.cond(jnp.all(jnp.isfinite(each)), lambda: each, replace)


def _energy(
    errors: Float[Array, " members *batch"], own: Float[Array, " members *batch"] | None, _: None
) -> Float[Array, "*batch"]:
    below = shares_in_order(errors, own)[:-1]
    under = jnp.sum(below**2 * jnp.diff(jnp.minimum(errors, 0), axis=0), axis=0)
    over = jnp.sum((1 - below) ** 2 * jnp.diff(jnp.maximum(errors, 0), axis=0), axis=0)
    return under + over + jnp.maximum(errors[0], 0) + jnp.maximum(-errors[-1], 0)


def _fair(
    errors: Float[Array, " members *batch"], own: Float[Array, " members *batch"] | None, _: None
) -> Float[Array, "*batch"]:
    below = shares_in_order(errors, own)[:-1]
    distance = jnp.sum(below * (1 - below) * jnp.diff(errors, axis=0), axis=0)  # half the mean distance of two members
    return _energy(errors, own, None) - distance / (errors.shape[0] - 1)


def threshold_weighted_crps(
    samples: Float[ArrayLike, " members *batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    lower: Real[ArrayLike, "..."] | None = None,
    upper: Real[ArrayLike, "..."] | None = None,
    chaining: Callable[[Array], Array] | None = None,
    estimator: Literal["nrg", "fair"] = "nrg",
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: RowWeightsLike | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Threshold-weighted CRPS of the members' point predictions, for a range of values.

    $\int w(z) (F(z) - [z \ge y])^2 dz$: [`eqx_ensemble.scores.crps`][] of $v(x_m)$ and $v(y)$ with the chaining
    function $v$, an antiderivative of the weight $w \ge 0$. Unlike the CRPS of rows with extreme targets, it is proper.

    **Arguments:**

    - `lower`, `upper`: the thresholds, each a scalar or `(*batch,)`, at which $v$ clips.
    - `chaining`: $v$, instead of thresholds: an elementwise, nondecreasing function, such as
        `lambda z: jax.nn.softplus(z - 3)`.
    - the others: as for [`eqx_ensemble.scores.crps`][].

    **Returns:**

    A scalar, or `(*batch,)`.

    ```python
    samples, targets = jnp.array([[0.0], [4.0]]), jnp.array([1.0])
    # values above 2 only: of 2 and 4 for a target of 2, 1 - 0.5
    ee.scores.threshold_weighted_crps(samples, targets, lower=2.0)
    ```

    ??? cite
        [Allen et al., JUQ 2023](https://doi.org/10.1137/22M1532184); [Gneiting and Ranjan, JBES
        2011](https://doi.org/10.1198/jbes.2010.08110)
    """
    points, observed = check_regression(targets, members=True, samples=samples)
    convex = check_estimator(estimator, points, weights)
    rows = check_row_weights(row_weights, observed.shape, points.dtype, reduction=reduction)
    check_chaining(chaining, lower, upper)
    # Ignored rows are set to one, where most chaining functions and their gradients are finite.
    points, observed = rows.blank(points, before=1, fill=1), rows.blank(observed, fill=1)
    if chaining is None:
        low, high = check_thresholds(lower, upper, observed, rows)
        of_members = [x[None] if x.ndim else x for x in (low, high)]
        points, observed = jnp.clip(points, *of_members), jnp.clip(observed, low, high)
    else:
        points, observed = check_chained(chaining, points), check_chained(chaining, observed)
    return crps_of_points(points, observed, rows, convex, estimator, reduction)
