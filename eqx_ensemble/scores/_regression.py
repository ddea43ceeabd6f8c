import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._boundary import array_function, counted_rows, kinds, mean_of_rows
from .._weighting import at_label, pairwise_mean, weighted_mean
from ._groups import square_root


@array_function
def rmse(
    predictions: kinds.Samples,
    targets: kinds.Targets,
    *,
    weights: kinds.Weights = None,
    row_weights: kinds.RowWeights = None,
) -> Float[Array, ""]:
    r"""Root mean squared error of the ensemble mean, in the unit of the target.

    $\sqrt{\frac1n \sum_i (\sum_m w_m x_{mi} - y_i)^2}$.

    **Arguments:**

    - `predictions`: `(members, *batch)`.
    - `targets`: `(*batch,)`.
    - `weights`: convex weights over members, `(members,)`.
    - `row_weights`: as for every score.

    **Returns:**

    A scalar. The gradient at a perfect fit is zero.

    ```python
    predictions, targets = jnp.array([[0.0, 1.0], [2.0, 1.0]]), jnp.array([1.0, 1.0])
    ee.scores.rmse(predictions, targets)  # 0.0
    ee.scores.mean_member_rmse(predictions, targets)  # sqrt(0.5) = 0.707
    ```
    """
    return square_root(mean_of_rows(error_of_mean(predictions, targets, weights) ** 2, row_weights))


@array_function
def mean_member_rmse(
    predictions: kinds.Samples,
    targets: kinds.Targets,
    *,
    weights: kinds.Weights = None,
    row_weights: kinds.RowWeights = None,
) -> Float[Array, ""]:
    """Mean root mean squared error of the members: this minus [`eqx_ensemble.scores.rmse`][] is the gain.

    **Arguments:**

    As [`eqx_ensemble.scores.rmse`][].

    **Returns:**

    A scalar, in the unit of the target.

    ```python
    ee.scores.mean_member_rmse(jnp.array([[0.0], [4.0]]), jnp.array([1.0]))
    # (1 + 3) / 2 = 2.0
    ```
    """
    squared = jax.vmap(mean_of_rows, in_axes=(0, None))((predictions - targets[None]) ** 2, row_weights)
    return weighted_mean(square_root(squared), weights)


@array_function
def mae(
    predictions: kinds.Samples,
    targets: kinds.Targets,
    *,
    weights: kinds.Weights = None,
    row_weights: kinds.RowWeights = None,
    reduction: kinds.Reduction = "mean",
) -> Float[Array, "..."]:
    """Mean absolute error of the ensemble mean, in the unit of the target.

    To score the members' median, pass `ee.combine.median(predictions)[None]`.

    **Arguments:**

    As [`eqx_ensemble.scores.rmse`][], and `reduction`.

    **Returns:**

    A scalar, or `(*batch,)`.

    ```python
    predictions, targets = jnp.array([[0.0, 1.0], [2.0, 1.0]]), jnp.array([1.0, 3.0])
    ee.scores.mae(predictions, targets)  # (0 + 2) / 2 = 1.0
    ```
    """
    return jnp.abs(error_of_mean(predictions, targets, weights))


@array_function
def r2(
    predictions: kinds.Samples,
    targets: kinds.Targets,
    *,
    weights: kinds.Weights = None,
    row_weights: kinds.RowWeights = None,
) -> Float[Array, ""]:
    """Coefficient of determination $R^2$ of the ensemble mean: 1 is perfect, 0 equals predicting the mean target.

    For one $R^2$ per output use `jax.vmap(ee.scores.r2, in_axes=-1)(predictions, targets)`.

    **Arguments:**

    As [`eqx_ensemble.scores.rmse`][].

    **Returns:**

    A scalar. Minus infinity, or NaN, if all targets are equal.

    ```python
    predictions, targets = jnp.array([[1.0, 2.0, 3.0]]), jnp.array([1.0, 2.0, 4.0])
    ee.scores.r2(predictions, targets)  # 1 - 1 / 4.67 = 0.786
    ```
    """
    known = True if row_weights is None else counted_rows(row_weights)
    lowest = jnp.min(targets, initial=jnp.inf, where=known)
    # Differences from one target are exactly zero for equal targets, and a common offset costs no precision.
    shifted = jnp.where(known, targets - lowest, 0)
    variance = mean_of_rows((shifted - mean_of_rows(shifted, row_weights)) ** 2, row_weights)
    return 1 - mean_of_rows(error_of_mean(predictions, targets, weights) ** 2, row_weights) / variance


def error_of_mean(
    predictions: Float[Array, " members *batch"],
    targets: Float[Array, "*batch"],
    weights: Float[Array, " members"] | None,
) -> Float[Array, "*batch"]:
    """The error of the ensemble mean."""
    return pairwise_mean(predictions - targets[None], weights)


@array_function
def interval_score(
    lower: kinds.Points,
    upper: kinds.Points,
    targets: kinds.Targets,
    *,
    level: float,
    row_weights: kinds.RowWeights = None,
    reduction: kinds.Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Interval (Winkler) score of central intervals: width plus a penalty for targets outside.

    $(u - l) + \frac{2}{1 - \mathrm{level}} (\max(l - y, 0) + \max(y - u, 0))$, in the unit of the target. Its
    expectation is minimised by the true quantiles.

    **Arguments:**

    - `level`: the nominal coverage of the intervals, between 0 and 1.
    - the others: as for [`eqx_ensemble.scores.coverage`][].

    **Returns:**

    A scalar, or `(*batch,)`. Infinite for unbounded intervals.

    ```python
    ee.scores.interval_score(jnp.zeros(1), jnp.ones(1), jnp.array([1.1]), level=0.8)
    # 1 + 0.1 * 2 / 0.2 = 2.0
    ```

    ??? cite
        [Gneiting and Raftery, JASA 2007](https://doi.org/10.1198/016214506000001437)
    """
    outside = jnp.maximum(lower - targets, 0) + jnp.maximum(targets - upper, 0)
    score = upper - lower + 2 / (1 - level) * outside
    infinite = jnp.isinf(lower) | jnp.isinf(upper) | jnp.isinf(targets)  # differences may be NaN
    unknown = jnp.isnan(lower) | jnp.isnan(upper) | jnp.isnan(targets)
    return jnp.where(infinite & ~unknown, jnp.inf, score)


@array_function
def pinball(
    quantiles: kinds.Points,
    targets: kinds.Targets,
    *,
    level: float,
    row_weights: kinds.RowWeights = None,
    reduction: kinds.Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Pinball (quantile) score of predictions of a single quantile.

    $\tau (y - q)$ for targets above the prediction, $(1 - \tau) (q - y)$ for targets below, with level $\tau$.

    **Arguments:**

    - `quantiles`, `targets`: of one shape `(*batch,)`, no `members` axis.
    - `level`: the level of the predicted quantile, between 0 and 1.
    - `row_weights`, `reduction`: as for every score.

    **Returns:**

    A scalar, or `(*batch,)`, in the unit of the target.

    ```python
    ee.scores.pinball(jnp.zeros(2), jnp.array([1.0, -1.0]), level=0.9)
    # (0.9 + 0.1) / 2 = 0.5
    ```

    ??? cite
        [Koenker and Bassett, Econometrica 1978](https://doi.org/10.2307/1913643)
    """
    error = targets - quantiles
    return jnp.maximum(level * error, (level - 1) * error)


@array_function
def coverage(
    lower: kinds.Points,
    upper: kinds.Points,
    targets: kinds.Targets,
    *,
    row_weights: kinds.RowWeights = None,
    reduction: kinds.Reduction = "mean",
) -> Float[Array, "..."]:
    """Fraction of targets inside their intervals, ends included; ideally equal to the level of the intervals.

    **Arguments:**

    - `lower`, `upper`, `targets`: of one shape `(*batch,)`, no `members` axis.
    - `row_weights`, `reduction`: as for every score.

    **Returns:**

    A scalar, or `(*batch,)`.

    **Raises:**

    `ValueError` for lower ends above upper ends.

    ```python
    ee.scores.coverage(jnp.zeros(2), jnp.ones(2), jnp.array([0.5, 3.0]))  # 0.5
    ```
    """
    inside = ((lower <= targets) & (targets <= upper)).astype(lower.dtype)
    unknown = jnp.isnan(lower) | jnp.isnan(upper) | jnp.isnan(targets)
    return jnp.where(unknown, jnp.nan, inside)


@array_function
def width(
    lower: kinds.Points,
    upper: kinds.Points,
    *,
    row_weights: kinds.RowWeights = None,
    reduction: kinds.Reduction = "mean",
) -> Float[Array, "..."]:
    """Width of intervals, in the unit of the target; at equal coverage, narrower is better.

    **Arguments:**

    As [`eqx_ensemble.scores.coverage`][], without `targets`.

    **Returns:**

    A scalar, or `(*batch,)`.

    ```python
    ee.scores.width(jnp.zeros(2), jnp.array([1.0, 3.0]))  # 2.0
    ```
    """
    return upper - lower


@array_function
def set_coverage(
    sets: kinds.Sets, labels: kinds.Labels, *, row_weights: kinds.RowWeights = None, reduction: kinds.Reduction = "mean"
) -> Float[Array, "..."]:
    """Fraction of labels inside their prediction sets; ideally equal to the level of the sets.

    **Arguments:**

    - `sets`: booleans `(*batch, classes)`, no `members` axis.
    - `labels`: integers `(*batch,)` from 0 to classes - 1.
    - `row_weights`, `reduction`: as for every score.

    **Returns:**

    A scalar, or `(*batch,)`.

    ```python
    sets = jnp.array([[True, True, False], [True, False, False]])
    ee.scores.set_coverage(sets, jnp.array([1, 2])), ee.scores.set_size(sets)  # 0.5, 1.5
    ```
    """
    return at_label(sets.astype(float), labels)


@array_function
def set_size(
    sets: kinds.Sets, *, row_weights: kinds.RowWeights = None, reduction: kinds.Reduction = "mean"
) -> Float[Array, "..."]:
    """Number of classes in prediction sets; at equal coverage, smaller is better.

    **Arguments:**

    As [`eqx_ensemble.scores.set_coverage`][], without `labels`.

    **Returns:**

    A scalar, or `(*batch,)`.

    ```python
    ee.scores.set_size(jnp.array([[True, True, False], [True, False, False]]))  # 1.5
    ```
    """
    return jnp.sum(sets, axis=-1).astype(float)
