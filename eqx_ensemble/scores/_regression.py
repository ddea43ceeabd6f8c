import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Real

from .._check import check_mask, check_regression, check_weights
from .._combination import by_rows
from .._weighting import blank_masked, blank_unweighted, weighted_mean
from ._check import check_some_rows
from ._reduce import masked_mean


def rmse(
    predictions: Float[ArrayLike, " members *batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    weights: Real[ArrayLike, " members"] | None = None,
    mask: Bool[ArrayLike, "*batch"] | None = None,
) -> Float[Array, ""]:
    r"""Root mean squared error of the ensemble mean, in the unit of the target; lower is better.

    $\sqrt{\frac1n \sum_i (\sum_m w_m x_{mi} - y_i)^2}$ over all entries of `*batch`.

    **Arguments:**

    - `predictions`: `(members, *batch)`.
    - `targets`: `(*batch,)`; nothing is broadcast.
    - `weights`: convex weights over members, `(members,)`; divided by their sum. A member of weight zero is left out.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.

    **Returns:**

    A scalar. Its gradient at a perfect fit is zero.

    **Raises:**

    - `TypeError` for predictions that are not floating-point.
    - `ValueError` for shapes that do not fit (targets `(n, 1)` against `(n,)` above all), no rows, and invalid weights.

    ```python
    predictions, targets = jnp.array([[0.0, 1.0], [2.0, 1.0]]), jnp.array([1.0, 1.0])
    ee.scores.rmse(predictions, targets)  # 0.0
    ee.scores.mean_member_rmse(predictions, targets)  # sqrt(0.5) = 0.707
    ```
    """
    predicted, observed, convex, kept = _check_points("scores.rmse", predictions, targets, weights, mask)
    return _rmse(by_rows(_squared_errors, predicted, observed, convex), kept)


def mean_member_rmse(
    predictions: Float[ArrayLike, " members *batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    weights: Real[ArrayLike, " members"] | None = None,
    mask: Bool[ArrayLike, "*batch"] | None = None,
) -> Float[Array, ""]:
    """Mean over members of each member's own root mean squared error; lower is better.

    The gain from combining is this minus [`eqx_ensemble.scores.rmse`][].

    **Arguments:**

    - `predictions`: `(members, *batch)`.
    - `targets`: `(*batch,)`; nothing is broadcast.
    - `weights`: convex weights over members, `(members,)`; divided by their sum. A member of weight zero is left out.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.

    **Returns:**

    A scalar, in the unit of the target.

    **Raises:**

    As [`eqx_ensemble.scores.rmse`][].

    ```python
    ee.scores.mean_member_rmse(jnp.array([[0.0], [4.0]]), jnp.array([1.0]))  # (1 + 3) / 2 = 2.0
    ```
    """
    return _mean_member_rmse(*_check_points("scores.mean_member_rmse", predictions, targets, weights, mask))


def _check_points(
    name: str, predictions: ArrayLike, targets: ArrayLike, weights: ArrayLike | None, mask: ArrayLike | None
) -> tuple[Array, Array, Array | None, Array | None]:
    predicted, observed = check_regression(name, targets, members=True, predictions=predictions)
    convex = check_weights(name, weights, predicted.shape[0], predicted.dtype)
    kept = check_mask(name, mask, observed.shape)
    check_some_rows(name, observed.shape)
    return blank_masked(predicted, kept, before=1), blank_masked(observed, kept), convex, kept


def _squared_errors(
    predictions: Float[Array, " members *batch"],
    targets: Float[Array, "*batch"],
    weights: Float[Array, " members"] | None,
) -> Float[Array, "*batch"]:
    return weighted_mean(blank_unweighted(predictions - targets[None], weights), weights) ** 2


@jax.jit
def _rmse(squares: Float[Array, "*batch"], mask: Bool[Array, "*batch"] | None) -> Float[Array, ""]:
    return _root(masked_mean(squares, mask))


@jax.jit
def _mean_member_rmse(
    predictions: Float[Array, " members *batch"],
    targets: Float[Array, "*batch"],
    weights: Float[Array, " members"] | None,
    mask: Bool[Array, "*batch"] | None,
) -> Float[Array, ""]:
    errors = blank_unweighted(predictions - targets[None], weights)
    squared = jax.vmap(masked_mean, in_axes=(0, None))(errors**2, mask)
    return weighted_mean(_root(squared), weights)


def _root(values: Float[Array, "..."]) -> Float[Array, "..."]:
    # The square root has no gradient at zero; a perfect fit must not give a NaN gradient.
    exact = values == 0
    return jnp.where(exact, 0, jnp.sqrt(jnp.where(exact, 1, values)))
