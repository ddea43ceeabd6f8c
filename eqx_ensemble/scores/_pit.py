from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int32, Key, Real

from .._check import (
    CountedRows,
    RowWeightsLike,
    check_counted_rows,
    check_entries,
    check_key,
    check_no_nan,
    check_positive_int,
    check_regression,
    check_row_weights,
    check_values,
    check_weights,
)
from .._combination import by_rows
from .._keys import member_keys
from .._weighting import blank_unweighted, weighted_mean
from ._gaussian import check_gaussian


def rank_histogram(
    samples: Float[ArrayLike, " members *batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    row_weights: RowWeightsLike | None = None,
    key: Any,
) -> Int32[Array, " ranks"]:
    """Histogram of the target's rank among the members, from lowest to highest; flat if calibrated.

    **Arguments:**

    - `samples`: `(members, *batch)`, equally weighted. For weights see [`eqx_ensemble.scores.pit`][].
    - `targets`: `(*batch,)`.
    - `row_weights`: booleans.
    - `key`: one random key, to break ties.

    **Returns:**

    int32 counts `(members + 1,)`.

    **Raises:**

    `ValueError` for NaN (while tracing, rows with NaN are ignored).

    ```python
    samples, targets = jnp.array([[0.0, 0.0], [2.0, 2.0]]), jnp.array([1.0, 3.0])
    ee.scores.rank_histogram(samples, targets, key=jax.random.key(0))  # [0, 1, 1]
    ```

    ??? cite
        [Hamill, MWR 2001](https://doi.org/10.1175/1520-0493(2001)129%3C0550:IORHFV%3E2.0.CO;2)
    """
    points, observed = check_regression(targets, members=True, samples=samples)
    rows = check_counted_rows(row_weights, observed.shape)
    check_no_nan("samples", samples, rows)
    check_no_nan("targets", targets, rows)
    check_key(key)
    points, observed = rows.blank(points, before=1), rows.blank(observed)
    return _rank_histogram(points, observed, rows.counted, member_keys(key, 1, purpose="rank_histogram"))


@jax.jit
def _rank_histogram(
    samples: Float[Array, " members *batch"],
    targets: Float[Array, "*batch"],
    counted: Bool[Array, "*batch"] | None,
    keys: Key[Array, "1"],
) -> Int32[Array, " ranks"]:
    kept = ~(jnp.any(jnp.isnan(samples), axis=0) | jnp.isnan(targets))
    kept = kept if counted is None else kept & counted
    below = jnp.sum(samples < targets[None], axis=0, dtype=jnp.int32)
    level = jnp.sum(samples == targets[None], axis=0, dtype=jnp.int32)
    rank = below + jax.random.randint(keys[0], targets.shape, 0, level + 1, dtype=jnp.int32)
    return jax.ops.segment_sum(jnp.ravel(kept).astype(jnp.int32), jnp.ravel(rank), samples.shape[0] + 1)


def pit(
    samples: Float[ArrayLike, " members *batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: RowWeightsLike | None = None,
    key: Any = None,
) -> Float[Array, "*batch"]:
    r"""Probability integral transform of the targets under the members' empirical distribution.

    $\sum_m w_m [x_m < y] + V \sum_m w_m [x_m = y]$, where $V$ is uniform on [0, 1] with a `key`, and one half without.
    An excess near 0 and 1 indicates an underdispersed ensemble, in the middle an overdispersed one.

    **Arguments:**

    - `samples`, `targets`, `weights`: as for [`eqx_ensemble.scores.crps`][].
    - `row_weights`: rows of `False` or zero are NaN in the result.
    - `key`: one random key, to randomise ties between targets and members, as for counts.

    **Returns:**

    `(*batch,)`, from 0 to 1. To test uniformity with few members use [`eqx_ensemble.scores.rank_histogram`][].

    ```python
    ee.scores.pit(jnp.array([[0.0], [1.0], [1.0], [4.0]]), jnp.array([1.0]))
    # 0.25 + 0.5 / 2 = 0.5
    ```

    ??? cite
        [Czado et al., Biometrics 2009](https://doi.org/10.1111/j.1541-0420.2009.01191.x)
    """
    points, observed = check_regression(targets, members=True, samples=samples)
    convex = check_weights(weights, points.shape[0], points.dtype)
    kept, share = check_row_weights(row_weights, observed.shape).counted, None
    if key is not None:
        check_key(key)
        share = jax.random.uniform(member_keys(key, 1, purpose="pit")[0], observed.shape, observed.dtype)
    return by_rows(_pit, points, (observed, share, kept), convex)


def pit_gaussian_mixture(
    mean: Float[ArrayLike, " members *batch"],
    variance: Float[ArrayLike, " members *batch"],
    targets: Real[ArrayLike, "*batch"],
    *,
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: RowWeightsLike | None = None,
) -> Float[Array, "*batch"]:
    r"""Probability integral transform of the targets under the mixture of the members' Gaussians.

    $\sum_m w_m \Phi((y - \mu_m) / \sigma_m)$, uniform on [0, 1] if the mixture is calibrated.

    **Arguments:**

    - `mean`, `variance`, `targets`: as for [`eqx_ensemble.scores.nll_gaussian_mixture`][].
    - `weights`, `row_weights`: as for [`eqx_ensemble.scores.pit`][].

    **Returns:**

    `(*batch,)`.

    ```python
    mean, variance = jnp.array([[-1.0], [1.0]]), jnp.ones((2, 1))
    ee.scores.pit_gaussian_mixture(mean, variance, jnp.array([0.0]))  # 0.5
    ```
    """
    *arrays, rows = check_gaussian(mean, variance, targets, row_weights, members=True, positive=True, weights=weights)
    convex = check_weights(weights, arrays[0].shape[0], arrays[0].dtype)
    return _pit_gaussian_mixture(*arrays, rows.counted, convex)


def check_unit_interval(values: ArrayLike, rows: CountedRows) -> None:
    """Raises unless values are from 0 to 1 or NaN in rows that count; checked where concrete."""
    fix = "They are what `scores.pit` or `scores.pit_gaussian_mixture` returns."
    check_entries("`values` from 0 to 1", values, lambda host: (host < 0) | (host > 1), fix, rows)


def pit_histogram(
    values: Float[ArrayLike, "..."],
    *,
    num_bins: int = 10,
    row_weights: Bool[ArrayLike, "..."] | Real[ArrayLike, "..."] | None = None,
) -> Int32[Array, " bins"]:
    """Histogram of a probability integral transform in bins of equal width; flat if calibrated.

    **Arguments:**

    - `values`: as for [`eqx_ensemble.scores.quantile_calibration_error`][]; NaN is ignored.
    - `num_bins`: the number of bins, which include their upper end; the first also includes 0.
    - `row_weights`: booleans.

    **Returns:**

    int32 counts `(bins,)`.

    ```python
    ee.scores.pit_histogram(jnp.array([0.0, 0.1, 0.5, 0.9]), num_bins=2)  # [3, 1]
    ```
    """
    checked = jnp.ravel(check_values("values", values))
    rows = check_counted_rows(row_weights, jnp.shape(values))
    check_positive_int(num_bins, "num_bins")
    check_unit_interval(values, rows)
    return _pit_histogram(checked, None if rows.counted is None else jnp.ravel(rows.counted), int(num_bins))


def _pit(
    samples: Float[Array, " members *batch"],
    rows: tuple[Array, Array | None, Array | None],
    weights: Float[Array, " members"] | None,
) -> Float[Array, "*batch"]:
    targets, share, counted = rows
    below = weighted_mean((samples < targets[None]).astype(samples.dtype), weights)
    level = weighted_mean((samples == targets[None]).astype(samples.dtype), weights)
    unknown = jnp.any(jnp.isnan(blank_unweighted(samples, weights)), axis=0) | jnp.isnan(targets)
    value = jnp.where(unknown, jnp.nan, jnp.minimum(below + (0.5 if share is None else share) * level, 1))
    return value if counted is None else jnp.where(counted, value, jnp.nan)


@jax.jit
def _pit_gaussian_mixture(
    mean: Float[Array, " members *batch"],
    variance: Float[Array, " members *batch"],
    targets: Float[Array, "*batch"],
    counted: Bool[Array, "*batch"] | None,
    weights: Float[Array, " members"] | None,
) -> Float[Array, "*batch"]:
    mean, variance = blank_unweighted(mean, weights), blank_unweighted(variance, weights, fill=1.0)
    value = weighted_mean(jax.scipy.special.ndtr((targets[None] - mean) / jnp.sqrt(variance)), weights)
    return value if counted is None else jnp.where(counted, value, jnp.nan)


@partial(jax.jit, static_argnames="num_bins")
def _pit_histogram(
    values: Float[Array, " n"], counted: Bool[Array, " n"] | None, num_bins: int
) -> Int32[Array, " bins"]:
    edges = jnp.arange(1, num_bins, dtype=values.dtype) / num_bins
    known = (values >= 0) & (values <= 1)
    kept = known if counted is None else counted & known
    return jax.ops.segment_sum(kept.astype(jnp.int32), jnp.searchsorted(edges, values, side="left"), num_bins)
