import jax.numpy as jnp
from jaxtyping import Array, Float

from .._boundary import Labels, Points, Reduction, RowWeights, Sets, Targets, array_function
from .._weighting import at_label


@array_function
def interval_score(
    lower: Points,
    upper: Points,
    targets: Targets,
    *,
    level: float,
    row_weights: RowWeights = None,
    reduction: Reduction = "mean",
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
    quantiles: Points, targets: Targets, *, level: float, row_weights: RowWeights = None, reduction: Reduction = "mean"
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
    lower: Points, upper: Points, targets: Targets, *, row_weights: RowWeights = None, reduction: Reduction = "mean"
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
    lower: Points, upper: Points, *, row_weights: RowWeights = None, reduction: Reduction = "mean"
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
    sets: Sets, labels: Labels, *, row_weights: RowWeights = None, reduction: Reduction = "mean"
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
def set_size(sets: Sets, *, row_weights: RowWeights = None, reduction: Reduction = "mean") -> Float[Array, "..."]:
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
