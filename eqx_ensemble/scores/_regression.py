from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Real

from .._check import check_interval, check_reduction, check_regression, check_weights
from .._weighting import blank_unweighted, weighted_mean
from ._reduce import Reduction, reduce


def rmse(
    predictions: Float[ArrayLike, " members *batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    weights: Real[ArrayLike, " members"] | None = None,
) -> Float[Array, ""]:
    r"""Root mean squared error of the ensemble mean, in the unit of the target; lower is better.

    $\sqrt{\frac1n \sum_i (\sum_m w_m x_{mi} - y_i)^2}$ over all entries of `*batch`.

    **Arguments:**

    - `predictions`: `(members, *batch)`.
    - `targets`: `(*batch,)`; nothing is broadcast.
    - `weights`: convex weights over members, `(members,)`; divided by their sum. A member of weight zero is left out.

    **Returns:**

    A scalar. At a perfect fit its gradient is zero.

    **Raises:**

    - `TypeError` for predictions that are not floating-point.
    - `ValueError` for shapes that do not fit (targets `(n, 1)` against `(n,)` above all), no rows, and unfit weights.

    ```python
    import jax.numpy as jnp
    from eqx_ensemble import scores

    predictions, targets = jnp.array([[0.0, 1.0], [2.0, 1.0]]), jnp.array([1.0, 1.0])
    scores.rmse(predictions, targets)  # 0.0
    scores.mean_member_rmse(predictions, targets)  # sqrt(0.5) = 0.707
    ```
    """
    return _rmse(*_checked("scores.rmse", predictions, targets, weights))


def mean_member_rmse(
    predictions: Float[ArrayLike, " members *batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    weights: Real[ArrayLike, " members"] | None = None,
) -> Float[Array, ""]:
    """Mean over members of each member's own root mean squared error; lower is better.

    What `rmse` gains over this is the gain from combining.

    **Arguments:**

    - `predictions`: `(members, *batch)`.
    - `targets`: `(*batch,)`; nothing is broadcast.
    - `weights`: convex weights over members, `(members,)`; divided by their sum. A member of weight zero is left out.

    **Returns:**

    A scalar, in the unit of the target.

    **Raises:**

    As [`eqx_ensemble.scores.rmse`][].

    ```python
    import jax.numpy as jnp
    from eqx_ensemble import scores

    scores.mean_member_rmse(jnp.array([[0.0], [4.0]]), jnp.array([1.0]))  # (1 + 3) / 2 = 2.0
    ```
    """
    return _mean_member_rmse(*_checked("scores.mean_member_rmse", predictions, targets, weights))


def coverage(
    lower: Float[ArrayLike, "*batch"],
    upper: Float[ArrayLike, "*batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    """Share of the targets that lie in their interval, ends included; best close to the interval's level.

    **Arguments:**

    - `lower`, `upper`: the ends, as [`eqx_ensemble.uncertainty.gaussian_interval`][] returns them; no `members` axis.
    - `targets`: of the same shape; nothing is broadcast.
    - `reduction`: `"mean"` over all entries, or `"none"` for 1.0 (inside) or 0.0 (outside) per entry.

    **Returns:**

    A scalar, or `(*batch,)`. Where an end or the target is NaN the entry is NaN, not outside.

    **Raises:**

    - `TypeError` for ends that are not floating-point.
    - `ValueError` for shapes that differ, and for a lower end above its upper end (where concrete).

    ```python
    import jax.numpy as jnp
    from eqx_ensemble import scores

    scores.coverage(jnp.zeros(2), jnp.ones(2), jnp.array([0.5, 3.0]))  # 0.5
    ```
    """
    fn = "scores.coverage"
    low, high, observed = check_regression(fn, targets, members=False, lower=lower, upper=upper)
    check_interval(fn, lower, upper)
    check_reduction(fn, reduction, observed.shape)
    return _coverage(low, high, observed, reduction)


def _checked(
    fn: str, predictions: ArrayLike, targets: ArrayLike, weights: ArrayLike | None
) -> tuple[Array, Array, Array | None]:
    predicted, observed = check_regression(fn, targets, members=True, predictions=predictions)
    convex = check_weights(fn, weights, predicted.shape[0], predicted.dtype)
    check_reduction(fn, "mean", observed.shape)
    return predicted, observed, convex


@jax.jit
def _rmse(
    predictions: Float[Array, " members *batch"],
    targets: Float[Array, "*batch"],
    weights: Float[Array, " members"] | None,
) -> Float[Array, ""]:
    errors = blank_unweighted(predictions - targets[None], weights)
    return _root(jnp.mean(weighted_mean(errors, weights) ** 2))


@jax.jit
def _mean_member_rmse(
    predictions: Float[Array, " members *batch"],
    targets: Float[Array, "*batch"],
    weights: Float[Array, " members"] | None,
) -> Float[Array, ""]:
    errors = blank_unweighted(predictions - targets[None], weights)
    return weighted_mean(_root(jnp.mean(errors**2, axis=tuple(range(1, errors.ndim)))), weights)


@partial(jax.jit, static_argnames="reduction")
def _coverage(
    lower: Float[Array, "*batch"], upper: Float[Array, "*batch"], targets: Float[Array, "*batch"], reduction: Reduction
) -> Float[Array, "..."]:
    inside = ((lower <= targets) & (targets <= upper)).astype(lower.dtype)
    unknown = jnp.isnan(lower) | jnp.isnan(upper) | jnp.isnan(targets)
    return reduce(jnp.where(unknown, jnp.nan, inside), reduction)


def _root(values: Float[Array, "..."]) -> Float[Array, "..."]:
    # The square root has no gradient at zero; a perfect fit must not turn a training step into NaN.
    exact = values == 0
    return jnp.where(exact, 0, jnp.sqrt(jnp.where(exact, 1, values)))
