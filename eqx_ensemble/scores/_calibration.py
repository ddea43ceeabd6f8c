import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._boundary import Labels, Logits, RowWeights, WeightsOfRows, array_function
from ._binning import Binning, bin_rows, by_class, mean_gap, of_top_label


@array_function
def mce(
    logits: Logits,
    labels: Labels,
    *,
    num_bins: int = 15,
    binning: Binning = "width",
    weights: WeightsOfRows = None,
    row_weights: RowWeights = None,
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
    logits: Logits,
    labels: Labels,
    *,
    num_bins: int = 15,
    binning: Binning = "mass",
    debiased: bool = True,
    weights: WeightsOfRows = None,
    row_weights: RowWeights = None,
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
    logits: Logits,
    labels: Labels,
    *,
    num_bins: int = 15,
    binning: Binning = "width",
    debiased: bool = False,
    weights: WeightsOfRows = None,
    row_weights: RowWeights = None,
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
    logits: Logits,
    labels: Labels,
    *,
    num_bins: int = 15,
    binning: Binning = "width",
    debiased: bool = False,
    weights: WeightsOfRows = None,
    row_weights: RowWeights = None,
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
