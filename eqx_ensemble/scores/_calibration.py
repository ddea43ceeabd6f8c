from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Integer, Real

from .._check import check_flag
from ._binning import Binning, bin_rows, by_class, check_bins, mean_gap, of_top_label
from ._reduce import RowWeights


def mce(
    logits: Float[ArrayLike, "members *batch classes"],
    labels: Integer[ArrayLike, "*batch"],
    *,
    num_bins: int = 15,
    binning: Binning = "width",
    weights: Real[ArrayLike, " members *rows"] | None = None,
    row_weights: Bool[ArrayLike, "*batch"] | Real[ArrayLike, "*batch"] | None = None,
) -> Float[Array, ""]:
    r"""Maximum calibration error of the mixture's top label, from 0 to 1; lower is better.

    $\max_k |\mathrm{accuracy}_k - \mathrm{confidence}_k|$ over the non-empty bins of [`eqx_ensemble.scores.ece`][].
    Bins with few rows have large gaps by chance: the score is biased upwards, far more than `ece`, and a bin with a
    single wrong row can determine it. Bins of equal mass, and fewer bins, reduce the bias.

    **Arguments:**

    As [`eqx_ensemble.scores.ece`][], without `debiased`.

    **Returns:**

    A scalar. NaN if any row of the mixture is NaN or, while tracing, a label is out of range.

    **Raises:**

    As [`eqx_ensemble.scores.nll`][], and `ValueError` for fewer than one bin.

    ```python
    # two rows of 80 % confidence, one right; one row of 60 %, right
    logits = jnp.log(jnp.array([[[0.8, 0.2], [0.8, 0.2], [0.6, 0.4]]]))
    ee.scores.mce(logits, jnp.array([0, 1, 0]))  # max(|0.5 - 0.8|, |1 - 0.6|) = 0.4
    ```

    ??? cite
        [Obtaining Well Calibrated Probabilities Using Bayesian Binning](https://doi.org/10.1609/aaai.v29i1.9602)
    """
    checked = check_bins(logits, labels, num_bins, binning, weights, row_weights)
    return _mce(*checked, num_bins, binning)


@partial(jax.jit, static_argnames=("num_bins", "binning"))
def _mce(
    logits: Float[Array, "members *batch classes"],
    labels: Integer[Array, "*batch"],
    weights: Float[Array, "members ..."] | None,
    row_weights: RowWeights | None,
    num_bins: int,
    binning: Binning,
) -> Float[Array, ""]:
    bins = of_top_label(logits, labels, weights, row_weights, num_bins, binning)
    return jnp.max(jnp.abs(bins.frequency - bins.probability))  # zero in empty bins


_SINGLE = 1e-4  # tolerance for an effective number of rows that rounds to more than one


def squared_calibration_error(
    logits: Float[ArrayLike, "members *batch classes"],
    labels: Integer[ArrayLike, "*batch"],
    *,
    num_bins: int = 15,
    binning: Binning = "mass",
    debiased: bool = True,
    weights: Real[ArrayLike, " members *rows"] | None = None,
    row_weights: Bool[ArrayLike, "*batch"] | Real[ArrayLike, "*batch"] | None = None,
) -> Float[Array, ""]:
    r"""Mean squared calibration error of the mixture's top label, unbiased for the given bins; lower is better.

    $\sum_k \frac{n_k}{n} \left((a_k - c_k)^2 - \frac{a_k (1 - a_k)}{n_k - 1}\right)$ with the accuracy $a_k$ and the
    mean confidence $c_k$ of bin $k$. The last term is the expected contribution of label noise. Without it
    (`debiased=False`), even a perfectly calibrated model has a positive error, which vanishes only with many rows.

    **Arguments:**

    - `binning`: `"mass"`, bins with equal numbers of rows, or `"width"`; see [`eqx_ensemble.scores.ece`][].
    - `debiased`: whether to subtract the expected excess. Bins with a single row then count as zero.
    - the other arguments: as for [`eqx_ensemble.scores.ece`][].

    **Returns:**

    A scalar, a squared probability; it may be negative if the model is well calibrated. The l2 calibration error is
    `jnp.sqrt(jnp.maximum(x, 0))`.

    **Raises:**

    As [`eqx_ensemble.scores.nll`][], and `ValueError` for fewer than one bin.

    ```python
    logits = jnp.log(jnp.array([[[0.8, 0.2], [0.8, 0.2]]]))
    ee.scores.squared_calibration_error(logits, jnp.array([0, 1]), debiased=False)
    # 0.3**2 = 0.09
    ee.scores.squared_calibration_error(logits, jnp.array([0, 1]))  # 0.09 - 0.25 = -0.16
    ```

    ??? cite
        [Verified Uncertainty Calibration](https://arxiv.org/abs/1909.10155)
    """
    checked = check_bins(logits, labels, num_bins, binning, weights, row_weights)
    debiased = check_flag(debiased, "debiased")
    return _squared_calibration_error(*checked, num_bins, binning, debiased)


@partial(jax.jit, static_argnames=("num_bins", "binning", "debiased"))
def _squared_calibration_error(
    logits: Float[Array, "members *batch classes"],
    labels: Integer[Array, "*batch"],
    weights: Float[Array, "members ..."] | None,
    row_weights: RowWeights | None,
    num_bins: int,
    binning: Binning,
    debiased: bool,  # noqa: FBT001
) -> Float[Array, ""]:
    bins = of_top_label(logits, labels, weights, row_weights, num_bins, binning)
    errors = (bins.frequency - bins.probability) ** 2
    if debiased:
        single = bins.effective < 1 + _SINGLE
        noise = bins.frequency * (1 - bins.frequency) / jnp.where(single, 1, bins.effective - 1)
        errors = jnp.where(single, 0 * errors, errors - noise)  # times zero: NaN stays NaN
    return jnp.sum(bins.count * errors) / jnp.sum(bins.count)


def ece(
    logits: Float[ArrayLike, "members *batch classes"],
    labels: Integer[ArrayLike, "*batch"],
    *,
    num_bins: int = 15,
    binning: Binning = "width",
    debiased: bool = False,
    weights: Real[ArrayLike, " members *rows"] | None = None,
    row_weights: Bool[ArrayLike, "*batch"] | Real[ArrayLike, "*batch"] | None = None,
) -> Float[Array, ""]:
    r"""Expected calibration error of the mixture of the members, from 0 to 1; lower is better.

    Rows are binned into $K$ bins by confidence, the largest probability of the mixture; the error is $\sum_k
    \frac{n_k}{n} |\mathrm{accuracy}_k - \mathrm{confidence}_k|$. It assesses the top label only (the l1 norm of
    torchmetrics' multi-class calibration error), depends on the bins, and is biased upwards for bins with few rows.
    `debiased` subtracts the expected excess due to label noise, under a Gaussian approximation of the accuracy of a
    bin.

    **Arguments:**

    - `logits`: logits or log-probabilities, `(members, *batch, classes)`. All batch axes are pooled.
    - `labels`: integers `(*batch,)` from 0 to classes - 1.
    - `num_bins`: the number of bins $K$.
    - `binning`: `"width"`, bins $(k / K, (k + 1) / K]$; or `"mass"`, the adaptive error: bins with equal numbers of
        rows, or equal weight; rows of equal confidence share a bin.
    - `debiased`: whether to subtract the expected excess; the result may then be slightly negative. The noise depends
        on the effective number of rows, $(\sum_i w_i)^2 / \sum_i w_i^2$: a row of weight 2 is one observation, not two.
    - `weights`: convex weights over members, `(members,)` or `(members, *rows)`; a member of weight zero is ignored.
    - `row_weights`: relative weights `(*batch,)`, or booleans; rows of zero or `False` are ignored, even if NaN.

    **Returns:**

    A scalar. NaN if any row of the mixture is NaN or, while tracing, a label is out of range.

    **Raises:**

    As [`eqx_ensemble.scores.nll`][], and `ValueError` for fewer than one bin.

    ```python
    # one member, two rows, 80 % confidence
    logits = jnp.log(jnp.array([[[0.8, 0.2], [0.8, 0.2]]]))
    ee.scores.ece(logits, jnp.array([0, 1]))  # |0.5 - 0.8| = 0.3
    ```

    ??? cite
        [On Calibration of Modern Neural Networks](https://arxiv.org/abs/1706.04599); adaptive bins after [Posterior
        calibration and exploratory analysis for natural language processing models](https://arxiv.org/abs/1508.05154);
        debiased after [Verified Uncertainty Calibration](https://arxiv.org/abs/1909.10155)
    """
    checked = check_bins(logits, labels, num_bins, binning, weights, row_weights)
    debiased = check_flag(debiased, "debiased")
    return _ece(*checked, num_bins, binning, debiased)


def classwise_ece(
    logits: Float[ArrayLike, "members *batch classes"],
    labels: Integer[ArrayLike, "*batch"],
    *,
    num_bins: int = 15,
    binning: Binning = "width",
    debiased: bool = False,
    weights: Real[ArrayLike, " members *rows"] | None = None,
    row_weights: Bool[ArrayLike, "*batch"] | Real[ArrayLike, "*batch"] | None = None,
) -> Float[Array, ""]:
    r"""Mean over classes of the calibration error of each class's probability under the mixture of the members.

    For each class $c$, rows are binned by the probability $p_c$, which is compared with the frequency of the class:
    $\sum_k \frac{n_k}{n} |\mathrm{frequency}_k - \mathrm{probability}_k|$. From 0 to 1; lower is better. Unlike
    [`eqx_ensemble.scores.ece`][] it assesses all classes, not only the top label. With many classes, most probabilities
    are close to zero, and bins of equal mass are more informative: the adaptive calibration error (ACE).

    **Arguments:**

    As [`eqx_ensemble.scores.ece`][].

    **Returns:**

    A scalar. NaN if any row of the mixture is NaN or, while tracing, a label is out of range.

    **Raises:**

    As [`eqx_ensemble.scores.nll`][], and `ValueError` for fewer than one bin.

    ```python
    logits = jnp.log(jnp.array([[[0.6, 0.3, 0.1], [0.6, 0.3, 0.1]]]))
    ee.scores.classwise_ece(logits, jnp.array([0, 2]))
    # (|0.5 - 0.6| + |0 - 0.3| + |0.5 - 0.1|) / 3 = 0.267
    ```

    ??? cite
        [Beyond temperature scaling: Obtaining well-calibrated multiclass probabilities with Dirichlet
        calibration](https://arxiv.org/abs/1910.12656)
    """
    checked = check_bins(logits, labels, num_bins, binning, weights, row_weights)
    debiased = check_flag(debiased, "debiased")
    return _classwise_ece(*checked, num_bins, binning, debiased)


@partial(jax.jit, static_argnames=("num_bins", "binning", "debiased"))
def _ece(
    logits: Float[Array, "members *batch classes"],
    labels: Integer[Array, "*batch"],
    weights: Float[Array, "members ..."] | None,
    row_weights: RowWeights | None,
    num_bins: int,
    binning: Binning,
    debiased: bool,  # noqa: FBT001
) -> Float[Array, ""]:
    return mean_gap(of_top_label(logits, labels, weights, row_weights, num_bins, binning), debiased=debiased)


@partial(jax.jit, static_argnames=("num_bins", "binning", "debiased"))
def _classwise_ece(
    logits: Float[Array, "members *batch classes"],
    labels: Integer[Array, "*batch"],
    weights: Float[Array, "members ..."] | None,
    row_weights: RowWeights | None,
    num_bins: int,
    binning: Binning,
    debiased: bool,  # noqa: FBT001
) -> Float[Array, ""]:
    probabilities, truth, kept = by_class(logits, labels, weights, row_weights)
    of_class = lambda p, hits: mean_gap(bin_rows(p, hits, kept, num_bins, binning), debiased=debiased)
    return jnp.mean(jax.vmap(of_class)(probabilities, truth))
