import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._boundary import Reduction, RowWeights, Samples, Targets, Weights, array_function, counts, mean_of_rows
from .._weighting import pairwise_mean, weighted_mean
from ._reduce import root


@array_function
def rmse(
    predictions: Samples, targets: Targets, *, weights: Weights = None, row_weights: RowWeights = None
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
    return root(mean_of_rows(error_of_mean(predictions, targets, weights) ** 2, row_weights))


@array_function
def mean_member_rmse(
    predictions: Samples, targets: Targets, *, weights: Weights = None, row_weights: RowWeights = None
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
    return weighted_mean(root(squared), weights)


@array_function
def mae(
    predictions: Samples,
    targets: Targets,
    *,
    weights: Weights = None,
    row_weights: RowWeights = None,
    reduction: Reduction = "mean",
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
    predictions: Samples, targets: Targets, *, weights: Weights = None, row_weights: RowWeights = None
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
    known = True if row_weights is None else counts(row_weights)
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
