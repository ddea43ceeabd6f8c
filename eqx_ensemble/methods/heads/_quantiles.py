from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Real

from ..._check import check_mask, check_regression
from ..._weighting import blank_masked
from ...scores._check import check_reduction
from ...scores._reduce import Reduction, reduce
from ._check import check_increasing_levels, check_quantiles


def pinball_loss(
    quantiles: Float[ArrayLike, "*batch levels"],
    targets: Real[ArrayLike, "*batch"],
    *,
    levels: Real[ArrayLike, " levels"],
    mask: Bool[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Loss of a head that predicts several quantiles: the mean of their pinball scores.

    $\frac1L \sum_l \max(\tau_l (y - q_l), (\tau_l - 1) (y - q_l))$, in the unit of the target. Its expectation is
    minimised by the true quantiles. Twice its value at the levels $(l - \frac12) / L$ approximates the CRPS. For one
    level it equals [`eqx_ensemble.scores.pinball`][], which needs an optional dependency.

    **Arguments:**

    - `quantiles`: those of ONE member, `(*batch, levels)`, the unchanged outputs of a last layer.
    - `targets`: `(*batch,)`; nothing is broadcast.
    - `levels`: `(levels,)`, increasing, between 0 and 1.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.
    - `reduction`: `"mean"` over all rows, or `"none"` for one value per row.

    **Returns:**

    A scalar, or `(*batch,)`.

    **Raises:**

    - `TypeError` for quantiles that are not floating-point.
    - `ValueError` for shapes that do not match, and for levels that do not increase or are outside 0 to 1 (where
        concrete).

    ```python
    levels = jnp.array([0.1, 0.5, 0.9])
    # (0.1 * 2 + 0.5 * 0 + 0.1 * 1) / 3 = 0.1
    ee.methods.heads.pinball_loss(jnp.array([[0.0, 2.0, 3.0]]), jnp.array([2.0]), levels=levels)
    ```

    ??? cite
        [Regression Quantiles](https://doi.org/10.2307/1913643)
    """
    name = "methods.heads.pinball_loss"
    checked = check_quantiles(name, quantiles)
    every_level = check_increasing_levels(name, levels, checked)
    _, observed = check_regression(name, targets, members=False, quantiles=checked[..., 0])
    kept = check_mask(name, mask, observed.shape)
    check_reduction(name, reduction, observed.shape)
    dtype = observed.dtype  # float64 where the targets are
    known = blank_masked(checked.astype(dtype), kept)
    return _loss(known, blank_masked(observed, kept), every_level.astype(dtype), kept, reduction)


def sort_quantiles(quantiles: Float[ArrayLike, "*batch levels"]) -> Float[Array, "*batch levels"]:
    """Sorts predicted quantiles, so that those of higher levels are not below those of lower levels.

    Predicted quantiles may cross. Sorting never increases the pinball loss of a row. Sort predictions, not outputs
    during training, where the loss itself corrects crossings.

    Combine members level by level: the mean of sorted quantiles is sorted. Two levels are the ends of an interval, for
    [`eqx_ensemble.conformal.cqr`][] and [`eqx_ensemble.scores.interval_score`][].

    **Arguments:**

    - `quantiles`: `(*batch, levels)`, of increasing levels, with or without a `members` axis.

    **Returns:**

    An array of the same shape. A row with a NaN is NaN at every level, because its order is unknown.

    **Raises:**

    - `TypeError` for quantiles that are not floating-point.
    - `ValueError` for a missing axis of levels.

    ```python
    ee.methods.heads.sort_quantiles(jnp.array([1.0, 3.0, 2.0]))  # [1.0, 2.0, 3.0]
    ```

    ??? cite
        [Quantile and Probability Curves without Crossing](https://doi.org/10.3982/ECTA7880)
    """
    checked = check_quantiles("methods.heads.sort_quantiles", quantiles)
    unknown = jnp.any(jnp.isnan(checked), axis=-1, keepdims=True)
    return jnp.where(unknown, jnp.nan, jnp.sort(checked, axis=-1))


@partial(jax.jit, static_argnames="reduction")
def _loss(
    quantiles: Float[Array, "*batch levels"],
    targets: Float[Array, "*batch"],
    levels: Float[Array, " levels"],
    mask: Bool[Array, "*batch"] | None,
    reduction: Reduction,
) -> Float[Array, "..."]:
    error = targets[..., None] - quantiles
    own = jnp.broadcast_to(levels, error.shape)
    return reduce(jnp.mean(jnp.where(error < 0, own - 1, own) * error, axis=-1), reduction, mask)
