from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._boundary import array_function, kinds, mean_of_rows
from ._binning import Binning, bin_rows, by_class, mean_gap, of_top_label
from ._groups import square_root, sum_by_segment


@array_function
def mce(
    logits: kinds.Logits,
    labels: kinds.Labels,
    *,
    num_bins: int = 15,
    binning: Binning = "width",
    weights: kinds.WeightsOfRows = None,
    row_weights: kinds.RowWeights = None,
) -> Float[Array, ""]:
    r"""Maximum calibration error of the mixture's top label, from 0 to 1.

    $\max_k |\mathrm{accuracy}_k - \mathrm{confidence}_k|$ over the bins of [`eqx_ensemble.scores.ece`][]. A bin with a
    single wrong row can determine it: use fewer bins, of equal mass.

    **Arguments:**

    As [`eqx_ensemble.scores.ece`][], without `debiased`.

    **Returns:**

    A scalar.

    ```python
    logits = jnp.log(jnp.array([[[0.8, 0.2], [0.8, 0.2], [0.6, 0.4]]]))
    ee.scores.mce(logits, jnp.array([0, 1, 0]))  # max(|0.5 - 0.8|, |1 - 0.6|) = 0.4
    ```

    ??? cite
        [Naeini et al., AAAI 2015](https://doi.org/10.1609/aaai.v29i1.9602)
    """
    bins = of_top_label(logits, labels, weights, row_weights, num_bins, binning)
    return jnp.max(jnp.abs(bins.frequency - bins.probability))  # zero in empty bins


_SINGLE = 1e-4  # tolerance for an effective number of rows that rounds to more than one


@array_function
def squared_calibration_error(
    logits: kinds.Logits,
    labels: kinds.Labels,
    *,
    num_bins: int = 15,
    binning: Binning = "mass",
    debiased: bool = True,
    weights: kinds.WeightsOfRows = None,
    row_weights: kinds.RowWeights = None,
) -> Float[Array, ""]:
    r"""Mean squared calibration error of the mixture's top label, unbiased for the given bins.

    $\sum_k \frac{n_k}{n} \left((a_k - c_k)^2 - \frac{a_k (1 - a_k)}{n_k - 1}\right)$ with the accuracy $a_k$ and the
    mean confidence $c_k$ of bin $k$. The last term is the contribution of label noise.

    **Arguments:**

    - `debiased`: whether to subtract the last term. Bins with a single row then count as zero.
    - the others: as for [`eqx_ensemble.scores.ece`][].

    **Returns:**

    A scalar, which may be negative. The l2 calibration error is `jnp.sqrt(jnp.maximum(x, 0))`.

    ```python
    logits = jnp.log(jnp.array([[[0.8, 0.2], [0.8, 0.2]]]))
    ee.scores.squared_calibration_error(logits, jnp.array([0, 1]), debiased=False)
    # 0.09
    ee.scores.squared_calibration_error(logits, jnp.array([0, 1]))  # 0.09 - 0.25 = -0.16
    ```

    ??? cite
        [Kumar et al., NeurIPS 2019](https://arxiv.org/abs/1909.10155)
    """
    bins = of_top_label(logits, labels, weights, row_weights, num_bins, binning)
    errors = (bins.frequency - bins.probability) ** 2
    if debiased:
        single = bins.effective < 1 + _SINGLE
        noise = bins.frequency * (1 - bins.frequency) / jnp.where(single, 1, bins.effective - 1)
        errors = jnp.where(single, 0 * errors, errors - noise)  # times zero: NaN stays NaN
    return jnp.sum(bins.count * errors) / jnp.sum(bins.count)


@array_function
def ece(
    logits: kinds.Logits,
    labels: kinds.Labels,
    *,
    num_bins: int = 15,
    binning: Binning = "width",
    debiased: bool = False,
    weights: kinds.WeightsOfRows = None,
    row_weights: kinds.RowWeights = None,
) -> Float[Array, ""]:
    r"""Expected calibration error of the mixture's top label, from 0 to 1.

    $\sum_k \frac{n_k}{n} |\mathrm{accuracy}_k - \mathrm{confidence}_k|$ over $K$ bins of rows by confidence, the
    largest probability of the mixture: the l1 norm of torchmetrics. Biased upwards for bins with few rows.

    **Arguments:**

    - `logits`, `labels`, `weights`, `row_weights`: as for [`eqx_ensemble.scores.nll`][].
    - `num_bins`: the number of bins $K$.
    - `binning`: `"width"`, bins $(k / K, (k + 1) / K]$; or `"mass"`, bins of equally many rows or equal weight, in
        which equal confidences share a bin (the adaptive error).
    - `debiased`: whether to subtract the expected excess due to label noise, under a Gaussian approximation with
        effective numbers of rows, $(\sum_i w_i)^2 / \sum_i w_i^2$. The result may be slightly negative.

    **Returns:**

    A scalar.

    ```python
    logits = jnp.log(jnp.array([[[0.8, 0.2], [0.8, 0.2]]]))
    ee.scores.ece(logits, jnp.array([0, 1]))  # |0.5 - 0.8| = 0.3
    ```

    ??? cite
        [Guo et al., ICML 2017](https://arxiv.org/abs/1706.04599); `"mass"`: [Nguyen and O'Connor, EMNLP
        2015](https://arxiv.org/abs/1508.05154); `debiased`: [Kumar et al., NeurIPS
        2019](https://arxiv.org/abs/1909.10155)
    """
    return mean_gap(of_top_label(logits, labels, weights, row_weights, num_bins, binning), debiased=debiased)


@array_function
def classwise_ece(
    logits: kinds.Logits,
    labels: kinds.Labels,
    *,
    num_bins: int = 15,
    binning: Binning = "width",
    debiased: bool = False,
    weights: kinds.WeightsOfRows = None,
    row_weights: kinds.RowWeights = None,
) -> Float[Array, ""]:
    r"""Mean over classes of the calibration error of each class's probability under the mixture of the members.

    $\sum_k \frac{n_k}{n} |\mathrm{frequency}_k - \mathrm{probability}_k|$ over bins of rows by the probability of the
    class. With many classes use bins of equal mass: the adaptive calibration error (ACE).

    **Arguments:**

    As [`eqx_ensemble.scores.ece`][].

    **Returns:**

    A scalar.

    ```python
    logits = jnp.log(jnp.array([[[0.6, 0.3, 0.1], [0.6, 0.3, 0.1]]]))
    ee.scores.classwise_ece(logits, jnp.array([0, 2]))
    # (|0.5 - 0.6| + |0 - 0.3| + |0.5 - 0.1|) / 3 = 0.267
    ```

    ??? cite
        [Kull et al., NeurIPS 2019](https://arxiv.org/abs/1910.12656)
    """
    probabilities, truth, kept = by_class(logits, labels, weights, row_weights)
    of_class = lambda p, hits: mean_gap(bin_rows(p, hits, kept, num_bins, binning), debiased=debiased)
    return jnp.mean(jax.vmap(of_class)(probabilities, truth))


@array_function
def quantile_calibration_error(
    values: kinds.UnitInterval,
    *,
    num_levels: int = 99,
    kind: Literal["absolute", "squared"] = "absolute",
    row_weights: kinds.RowWeights = None,
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
    mean: kinds.Points,
    variance: kinds.Variance,
    targets: kinds.Targets,
    *,
    num_bins: int = 15,
    row_weights: kinds.RowWeights = None,
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
    predicted = square_root(jnp.where(filled, bins.probability, 1))
    errors = jnp.abs(predicted - square_root(bins.frequency)) / predicted
    return jnp.sum(jnp.where(filled, errors, 0)) / jnp.sum(filled).astype(errors.dtype)


@array_function
def sharpness(variance: kinds.VarianceOrZero, *, row_weights: kinds.RowWeights = None) -> Float[Array, ""]:
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
    return square_root(mean_of_rows(variance, row_weights))
