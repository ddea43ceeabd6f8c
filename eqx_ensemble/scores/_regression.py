from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Real

from .._check import RowWeightsLike, as_column, check_regression, check_row_weights, check_weights
from .._combination import pays_if_large
from .._weighting import blank_unweighted, known_mean, sum_members, weighted_mean
from ._reduce import Reduction, RowWeights, counts, mean_of_rows, reduce, root, total_weight, weigh

_GROUP = 8  # members whose errors are added in registers
_LANES = 1024
_BLOCK = 128  # sums of each lane


def rmse(
    predictions: Float[ArrayLike, " members *batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: RowWeightsLike | None = None,
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
    arrays = check_points(predictions, targets, weights, row_weights)
    return _rmse(*arrays, in_groups=pays_if_large(arrays[0], arrays[1:]))


def mean_member_rmse(
    predictions: Float[ArrayLike, " members *batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: RowWeightsLike | None = None,
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
    arrays = check_points(predictions, targets, weights, row_weights)
    return _mean_member_rmse(*arrays, one_by_one=pays_if_large(arrays[0], arrays[1:]))


def check_points(
    predictions: ArrayLike,
    targets: ArrayLike,
    weights: ArrayLike | None,
    row_weights: ArrayLike | None,
    reduction: Reduction = "mean",
) -> tuple[Array, Array, Array | None, Array | None]:
    """Raises for invalid arguments. Returns point predictions, targets, weights of members and of rows."""
    predicted, observed = check_regression(targets, members=True, predictions=predictions)
    convex = check_weights(weights, predicted.shape[0], predicted.dtype)
    rows = check_row_weights(row_weights, observed.shape, predicted.dtype, reduction=reduction)
    return rows.blank(predicted, before=1), rows.blank(observed), convex, rows.weights


@partial(jax.jit, static_argnames="in_groups")
def _rmse(
    predictions: Float[Array, " members *batch"],
    targets: Float[Array, "*batch"],
    weights: Float[Array, " members"] | None,
    row_weights: RowWeights | None,
    *,
    in_groups: bool,
) -> Float[Array, ""]:
    error = error_of_mean(predictions, targets, weights, in_groups=in_groups)
    return root(mean_of_rows(error**2, row_weights))


def error_of_mean(
    predictions: Float[Array, " members *batch"],
    targets: Float[Array, "*batch"],
    weights: Float[Array, " members"] | None,
    *,
    in_groups: bool,
) -> Float[Array, "*batch"]:
    """The error of the ensemble mean."""
    if in_groups:
        return _mean_error_in_groups(predictions, targets, weights)
    return weighted_mean(blank_unweighted(predictions - targets[None], weights), weights)


def _mean_error_in_groups(
    predictions: Float[Array, " members *batch"],
    targets: Float[Array, "*batch"],
    weights: Float[Array, " members"] | None,
) -> Float[Array, "*batch"]:
    """On a CPU: groups of members in sequence, which reads memory sequentially."""
    num_members = predictions.shape[0]
    convex = jnp.full(num_members, 1 / num_members, predictions.dtype) if weights is None else weights

    def group(start: Array | int, size: int) -> Array:
        errors, own = (jax.lax.dynamic_slice_in_dim(x, start, size) for x in (predictions, convex))
        errors = errors - targets[None]
        return sum_members(blank_unweighted(errors, own) * as_column(own, errors.ndim))

    count, rest = divmod(num_members, _GROUP)
    found = jnp.zeros_like(targets)
    if count > 0:
        found = jax.lax.fori_loop(0, count, lambda i, found: found + group(i * _GROUP, _GROUP), found)
    return found + group(count * _GROUP, rest) if rest > 0 else found


@partial(jax.jit, static_argnames="one_by_one")
def _mean_member_rmse(
    predictions: Float[Array, " members *batch"],
    targets: Float[Array, "*batch"],
    weights: Float[Array, " members"] | None,
    row_weights: RowWeights | None,
    *,
    one_by_one: bool,
) -> Float[Array, ""]:
    if one_by_one:
        squared = jax.lax.map(lambda member: _mean_squared_error(member, targets, row_weights), predictions)
    else:
        errors = blank_unweighted(predictions - targets[None], weights)
        squared = jax.vmap(mean_of_rows, in_axes=(0, None))(errors**2, row_weights)
    return known_mean(root(squared), weights)


def _mean_squared_error(
    predictions: Float[Array, "*batch"], targets: Float[Array, "*batch"], row_weights: RowWeights | None
) -> Float[Array, ""]:
    """On a CPU: a thousand partial sums in parallel, because XLA does not vectorise a single sum."""
    terms = jnp.ravel(weigh((predictions - targets) ** 2, row_weights))
    count, rest = divmod(terms.size, _LANES)
    lanes = jnp.reshape(terms[: count * _LANES], (count, _LANES))
    zeros = jnp.zeros(_LANES, terms.dtype)
    # Sums of blocks are added, so that numbers are not added to very large ones.
    block = lambda first, size: jax.lax.fori_loop(0, size, lambda i, found: found + lanes[first + i], zeros)
    sums, (blocks, last) = zeros, divmod(count, _BLOCK)
    if blocks > 0:
        sums = jax.lax.fori_loop(0, blocks, lambda k, found: found + block(k * _BLOCK, _BLOCK), sums)
    if last > 0:
        sums = sums + block(blocks * _BLOCK, last)
    found = jnp.sum(sums) + jnp.sum(terms[terms.size - rest :])
    return found / (terms.size if row_weights is None else total_weight(row_weights, terms.dtype))


def mae(
    predictions: Float[ArrayLike, " members *batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: RowWeightsLike | None = None,
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
    arrays = check_points(predictions, targets, weights, row_weights, reduction)
    return _mae(*arrays, reduction, in_groups=pays_if_large(arrays[0], arrays[1:]))


def r2(
    predictions: Float[ArrayLike, " members *batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: RowWeightsLike | None = None,
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
    arrays = check_points(predictions, targets, weights, row_weights)
    return _r2(*arrays, in_groups=pays_if_large(arrays[0], arrays[1:]))


@partial(jax.jit, static_argnames=("reduction", "in_groups"))
def _mae(
    predictions: Float[Array, " members *batch"],
    targets: Float[Array, "*batch"],
    weights: Float[Array, " members"] | None,
    row_weights: RowWeights | None,
    reduction: Reduction,
    *,
    in_groups: bool,
) -> Float[Array, "..."]:
    error = error_of_mean(predictions, targets, weights, in_groups=in_groups)
    return reduce(jnp.abs(error), reduction, row_weights)


@partial(jax.jit, static_argnames="in_groups")
def _r2(
    predictions: Float[Array, " members *batch"],
    targets: Float[Array, "*batch"],
    weights: Float[Array, " members"] | None,
    row_weights: RowWeights | None,
    *,
    in_groups: bool,
) -> Float[Array, ""]:
    error = error_of_mean(predictions, targets, weights, in_groups=in_groups)
    known = True if row_weights is None else counts(row_weights)
    lowest = jnp.min(targets, initial=jnp.inf, where=known)
    # Differences from one target are exactly zero for equal targets, and a common offset costs no precision.
    shifted = jnp.where(known, targets - lowest, 0)
    variance = mean_of_rows((shifted - mean_of_rows(shifted, row_weights)) ** 2, row_weights)
    return 1 - mean_of_rows(error**2, row_weights) / variance
