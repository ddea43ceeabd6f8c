from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from .._boundary import array_function, kinds, reduce
from .._keys import member_keys
from .._weighting import pairwise_mean, reduce_members, weighted_mean


@array_function
def rank_histogram(
    samples: kinds.KnownSamples, targets: kinds.KnownTargets, *, row_weights: kinds.CountedRows = None, key: Any
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
    kept = ~(jnp.any(jnp.isnan(samples), axis=0) | jnp.isnan(targets))
    kept = kept if row_weights is None else kept & row_weights
    below = jnp.sum(samples < targets[None], axis=0, dtype=jnp.int32)
    level = jnp.sum(samples == targets[None], axis=0, dtype=jnp.int32)
    own = member_keys(key, 1, purpose="rank_histogram")[0]
    rank = below + jax.random.randint(own, targets.shape, 0, level + 1, dtype=jnp.int32)
    return jax.ops.segment_sum(jnp.ravel(kept).astype(jnp.int32), jnp.ravel(rank), samples.shape[0] + 1)


@array_function
def pit(
    samples: kinds.Samples,
    targets: kinds.Targets,
    *,
    weights: kinds.Weights = None,
    row_weights: kinds.RowWeights = None,
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
    own = None if key is None else member_keys(key, 1, purpose="pit")[0]
    share = 0.5 if own is None else jax.random.uniform(own, targets.shape, targets.dtype)
    below = pairwise_mean((samples < targets[None]).astype(samples.dtype), weights)
    level = pairwise_mean((samples == targets[None]).astype(samples.dtype), weights)
    unknown = reduce_members(jnp.logical_or, jnp.any, jnp.isnan(samples)) | jnp.isnan(targets)
    return reduce(jnp.where(unknown, jnp.nan, jnp.minimum(below + share * level, 1)), "none", row_weights)


@array_function(each_row=True)
def pit_gaussian_mixture(
    mean: kinds.Samples,
    variance: kinds.Variances,
    targets: kinds.Targets,
    *,
    weights: kinds.Weights = None,
    row_weights: kinds.RowWeights = None,
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
    value = weighted_mean(jax.scipy.special.ndtr((targets[None] - mean) / jnp.sqrt(variance)), weights)
    return reduce(value, "none", row_weights)


@array_function
def pit_histogram(
    values: kinds.UnitInterval, *, num_bins: int = 10, row_weights: kinds.CountedRows = None
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
    edges = jnp.arange(1, num_bins, dtype=values.dtype) / num_bins
    kept = (values >= 0) & (values <= 1)
    kept = kept if row_weights is None else row_weights & kept
    bins = jnp.searchsorted(edges, jnp.ravel(values), side="left")
    return jax.ops.segment_sum(jnp.ravel(kept).astype(jnp.int32), bins, num_bins)
