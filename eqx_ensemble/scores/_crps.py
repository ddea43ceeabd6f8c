from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._boundary import Reduction, RowWeights, Samples, Targets, Threshold, Weights, array_function
from .._check import value_error
from .._weighting import shares_in_order, sum_members

Estimator = Literal["nrg", "fair"]


@array_function(in_order="samples")
def crps(
    samples: Samples,
    targets: Targets,
    *,
    estimator: Estimator = "nrg",
    weights: Weights = None,
    row_weights: RowWeights = None,
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
    return of_ordered(samples, targets, weights, estimator)


@array_function(in_order="samples")
def threshold_weighted_crps(
    samples: Samples,
    targets: Targets,
    *,
    lower: Threshold | None = None,
    upper: Threshold | None = None,
    estimator: Estimator = "nrg",
    weights: Weights = None,
    row_weights: RowWeights = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Threshold-weighted CRPS of the members' point predictions, for a range of values.

    $\int w(z) (F(z) - [z \ge y])^2 dz$ with $w$ one between the thresholds and zero elsewhere:
    [`eqx_ensemble.scores.crps`][] of $v(x_m)$ and $v(y)$, where $v$ clips. Unlike the CRPS of rows with extreme
    targets, it is proper.

    **Arguments:**

    - `lower`, `upper`: the thresholds at which $v$ clips, one number each.
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
    if (lower is None) and (upper is None):
        fix = "`lower=`, `upper=` or both restrict the score to a range. For all values use `scores.crps`."
        raise value_error("`lower` or `upper`", "got neither", fix)
    clip = lambda x: jnp.clip(x, lower, upper).astype(x.dtype)
    return of_ordered(clip(samples), clip(targets), weights, estimator)


def check_estimator(estimator: Estimator, num_members: int, weights: Array | None) -> None:
    """Raises unless the estimator accepts these members."""
    if estimator == "fair" and num_members < 2:
        needs = 'at least two members for estimator="fair"'
        raise value_error(needs, f"got {num_members}", 'Use `estimator="nrg"`.')
    if estimator == "fair" and weights is not None:
        fix = 'Drop them, or use `estimator="nrg"`.'
        raise value_error('equally weighted members for estimator="fair"', "got `weights`", fix)


def of_ordered(
    samples: Float[Array, " members *batch"],
    targets: Float[Array, "*batch"],
    weights: Float[Array, " members *batch"] | None,
    estimator: Estimator,
) -> Float[Array, "*batch"]:
    """The score of each row, of samples that are sorted over members. A common offset cancels before the sums."""
    check_estimator(estimator, samples.shape[0], weights)
    errors = samples - targets[None]
    below = shares_in_order(errors, weights)[:-1]
    under = sum_members(below**2 * jnp.diff(jnp.minimum(errors, 0), axis=0))
    over = sum_members((1 - below) ** 2 * jnp.diff(jnp.maximum(errors, 0), axis=0))
    found = under + over + jnp.maximum(errors[0], 0) + jnp.maximum(-errors[-1], 0)
    if estimator == "fair":  # minus half the mean distance of two members, over M - 1
        found -= sum_members(below * (1 - below) * jnp.diff(errors, axis=0)) / (samples.shape[0] - 1)
    # Where differences are NaN, the score is infinite, or zero if all agree with the target.
    infinite = jnp.isinf(samples[0]) | jnp.isinf(samples[-1]) | jnp.isinf(targets)
    unknown = jnp.isnan(samples[-1]) | jnp.isnan(targets)
    exact = jnp.where((samples[0] == targets) & (samples[-1] == targets), 0, jnp.inf).astype(found.dtype)
    return jnp.where(infinite & ~unknown, exact, jnp.where(unknown, jnp.nan, found))
