from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from .._boundary import Points, RowWeights, Targets, Variance, VarianceOrZero, array_function, mean_of_rows
from ._binning import bin_rows
from ._pit import UnitInterval
from ._reduce import root, sum_by_segment


@array_function
def quantile_calibration_error(
    values: UnitInterval,
    *,
    num_levels: int = 99,
    kind: Literal["absolute", "squared"] = "absolute",
    row_weights: RowWeights = None,
) -> Float[Array, ""]:
    r"""Distance between predicted and observed quantiles.

    With the fraction $\hat p_j$ of targets at or below their predicted quantiles of level $p_j = j / (J + 1)$:
    `"absolute"` is the mean of $|\hat p_j - p_j|$; `"squared"` the sum of $(\hat p_j - p_j)^2$, which grows with $J$.

    **Arguments:**

    - `values`: the result of [`eqx_ensemble.scores.pit`][] or [`eqx_ensemble.scores.pit_gaussian_mixture`][]. Pass
        their `row_weights` again.
    - `num_levels`: $J$; report it.
    - `kind`: `"absolute"` or `"squared"`.
    - `row_weights`: as for every score.

    **Returns:**

    A scalar. For $M$ members that are samples, the resolution of levels is $1 / M$.

    **Raises:**

    `ValueError` for values outside [0, 1].

    ```python
    mean, variance = jnp.zeros((1, 1000)), jnp.full((1, 1000), 4.0)  # twice as wide
    values = ee.scores.pit_gaussian_mixture(
        mean, variance, jax.random.normal(key, (1000,))
    )
    ee.scores.quantile_calibration_error(values)  # 0.10
    ```

    ??? cite
        [Chung et al., NeurIPS 2021](https://arxiv.org/abs/2011.09588); `"squared"`: [Kuleshov et al., ICML
        2018](https://arxiv.org/abs/1807.00263)
    """
    own = jnp.ones_like(values) if row_weights is None else row_weights.astype(values.dtype)
    levels = jnp.arange(1, num_levels + 1, dtype=values.dtype) / (num_levels + 1)
    # A value counts at all levels from the first that is not below it.
    first = jnp.searchsorted(levels, jnp.ravel(values), side="left")
    at_most = jnp.cumsum(sum_by_segment(jnp.ravel(own), first, num_levels + 1))[:-1]
    gaps = at_most / jnp.sum(own) - levels
    found = jnp.mean(jnp.abs(gaps)) if kind == "absolute" else jnp.sum(gaps**2)
    return jnp.where(jnp.any(jnp.isnan(values)), jnp.nan, found)


@array_function
def ence(
    mean: Points, variance: Variance, targets: Targets, *, num_bins: int = 15, row_weights: RowWeights = None
) -> Float[Array, ""]:
    r"""Expected normalised calibration error of predicted variances.

    The mean over bins of entries, sorted by variance, of $|\mathrm{RMV} - \mathrm{RMSE}| / \mathrm{RMV}$, with the root
    mean predicted variance. It is $|1 - 1/c|$ if all standard deviations are $c$ times the true ones. With $n$ entries
    in $K$ bins it is about $\sqrt{K / (\pi n)}$ even for correct variances.

    **Arguments:**

    - `mean`, `variance`, `targets`, `row_weights`: as for [`eqx_ensemble.scores.nll_gaussian`][].
    - `num_bins`: the number of bins $K$. Entries of equal variance share a bin.

    **Returns:**

    A dimensionless scalar.

    ```python
    targets = jax.random.normal(key, (1000,))
    ee.scores.ence(jnp.zeros(1000), jnp.full(1000, 4.0), targets)  # near |1 - 1/2|
    ```

    ??? cite
        [Levi et al., Sensors 2022](https://doi.org/10.3390/s22155540)
    """
    flat = None if row_weights is None else jnp.ravel(row_weights)
    bins = bin_rows(jnp.ravel(variance), jnp.ravel((targets - mean) ** 2), flat, num_bins, "mass")
    filled = bins.count > 0
    predicted = root(jnp.where(filled, bins.probability, 1))
    errors = jnp.abs(predicted - root(bins.frequency)) / predicted
    return jnp.sum(jnp.where(filled, errors, 0)) / jnp.sum(filled).astype(errors.dtype)


@array_function
def sharpness(variance: VarianceOrZero, *, row_weights: RowWeights = None) -> Float[Array, ""]:
    """Sharpness of predicted distributions: the root mean variance, in the unit of the target.

    Of two calibrated predictions the sharper is better.

    **Arguments:**

    - `variance`: `(*batch,)`, no `members` axis, such as that of [`eqx_ensemble.combine.gaussian`][].
    - `row_weights`: as for every score.

    **Returns:**

    A scalar.

    ```python
    ee.scores.sharpness(jnp.array([1.0, 7.0]))  # sqrt(4) = 2.0
    ```

    ??? cite
        [Gneiting et al., JRSS B 2007](https://doi.org/10.1111/j.1467-9868.2007.00587.x)
    """
    return root(mean_of_rows(variance, row_weights))
