"""Bins rows by probability, for calibration errors and the decomposition of the Brier score."""

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer

from .._boundary import array_function, kinds, mean_of_rows
from .._brief import brief_repr
from .._weighting import class_mixture, is_class
from ._classification import correct
from ._distributions import expected_distance
from ._groups import sum_by_segment

CheckedRowWeights = Bool[Array, "*batch"] | Float[Array, "*batch"]

Binning = Literal["width", "mass"]


class Bins(NamedTuple):
    """The inner edges of the bins, the bin of every row, and the row count, mean probability and frequency of each bin.

    The means of an empty bin are zero. With row weights, `count` is the total weight and `effective` the effective
    number of rows, (sum of weights)^2 / sum of squared weights.
    """

    edges: Float[Array, " edges"]
    index: Int[Array, " rows"]
    count: Float[Array, " bins"]
    probability: Float[Array, " bins"]
    frequency: Float[Array, " bins"]
    effective: Float[Array, " bins"]

    def __repr__(self) -> str:
        return brief_repr(self)


def bin_rows(
    probability: Float[Array, " rows"],
    hits: Float[Array, " rows"],
    row_weights: CheckedRowWeights | None,
    num_bins: int,
    binning: Binning,
) -> Bins:
    """Bins of equal width or of equal mass; rows of weight zero have an index, but add nothing."""
    own = jnp.ones_like(probability) if row_weights is None else row_weights.astype(probability.dtype)
    if binning == "width":
        edges = _of_width(num_bins, probability.dtype)
    else:
        edges = jax.lax.stop_gradient(_of_mass(probability, row_weights, num_bins))
    index = jnp.searchsorted(edges, probability, side="left", method="compare_all" if num_bins < 64 else "scan")
    total = lambda values: sum_by_segment(values * own, index, num_bins)
    count = total(jnp.ones_like(probability))
    filled = jnp.where(count == 0, 1, count)
    is_weighted = row_weights is not None and row_weights.dtype != bool
    effective = count**2 / jnp.where(count == 0, 1, total(own)) if is_weighted else count
    rough = total(probability) / filled
    # Summing equal numbers accumulates rounding errors of one sign; summing small deviations from the mean does not.
    mean = rough + total(probability - rough[index]) / filled
    return Bins(edges, index, count, mean, total(hits) / filled, effective)


def by_class(
    logits: Float[Array, "members *batch classes"],
    labels: Integer[Array, "*batch"],
    weights: Float[Array, "members ..."] | None,
    row_weights: CheckedRowWeights | None,
) -> tuple[
    Float[Array, "classes rows"], Float[Array, "classes rows"], Bool[Array, " rows"] | Float[Array, " rows"] | None
]:
    """The mixture's probabilities and one-hot labels by class, and the row weights, with all rows on one axis."""
    num_classes = logits.shape[-1]
    logs = class_mixture(logits, weights)
    probabilities = jnp.reshape(jnp.exp(logs), (-1, num_classes))
    flat = jnp.ravel(labels)
    known = is_class(flat, num_classes)
    truth = jnp.where(known[:, None], jax.nn.one_hot(flat, num_classes, dtype=probabilities.dtype), jnp.nan)
    return probabilities.T, truth.T, None if row_weights is None else jnp.ravel(row_weights)


def of_top_label(
    logits: Float[Array, "members *batch classes"],
    labels: Integer[Array, "*batch"],
    weights: Float[Array, "members ..."] | None,
    row_weights: CheckedRowWeights | None,
    num_bins: int,
    binning: Binning,
) -> Bins:
    """Bins of the confidence, the mixture's largest probability; a hit is a row with the predicted label."""
    logs = class_mixture(logits, weights)
    confidence = jnp.ravel(jnp.exp(jnp.max(logs, axis=-1)))
    flat = None if row_weights is None else jnp.ravel(row_weights)
    return bin_rows(confidence, jnp.ravel(correct(logs, labels)), flat, num_bins, binning)


def mean_gap(bins: Bins, *, debiased: bool) -> Float[Array, ""]:
    """Mean over rows of the gap between a bin's probability and frequency, optionally minus its expected excess."""
    gaps = bins.frequency - bins.probability
    errors = jnp.abs(gaps)
    if debiased:
        variance = bins.frequency * (1 - bins.frequency) / jnp.where(bins.count == 0, 1, bins.effective)
        errors = 2 * errors - expected_distance(gaps, variance)
    return jnp.sum(bins.count * errors) / jnp.sum(bins.count)


def _of_width(num_bins: int, dtype: jnp.dtype) -> Float[Array, " edges"]:
    # Inner edges only: a probability that rounds to more than one stays in the last bin.
    return jnp.asarray(np.linspace(0, 1, num_bins + 1)[1:-1], dtype)


def _of_mass(
    probability: Float[Array, " rows"], row_weights: CheckedRowWeights | None, num_bins: int
) -> Float[Array, " edges"]:
    """The sorted values at positions floor((n - 1) k / K). Tied rows share a bin, because edges are values."""
    inner = jnp.arange(1, num_bins)
    if row_weights is not None and row_weights.dtype != bool:
        return _of_weight(probability, row_weights, inner, num_bins)
    ordered = jnp.sort(probability if row_weights is None else jnp.where(row_weights, probability, jnp.inf))
    last = probability.size - 1 if row_weights is None else jnp.sum(row_weights) - 1
    # In two parts, because the product may overflow 32-bit integers.
    index = last // num_bins * inner + last % num_bins * inner // num_bins
    return ordered[index]


def _of_weight(
    probability: Float[Array, " rows"], row_weights: Float[Array, " rows"], inner: Int[Array, " edges"], num_bins: int
) -> Float[Array, " edges"]:
    """As `_of_mass`, for weighted rows, in units of their mean weight."""
    order = jnp.argsort(jnp.where(row_weights == 0, jnp.inf, probability))
    at_most = jnp.cumsum(row_weights[order])
    last = at_most[-1] - at_most[-1] / jnp.sum(row_weights != 0).astype(at_most.dtype)
    # A multiple of the mean weight is reached although the sum up to it was rounded down.
    rounding = 4 * math.log2(2 * probability.size) * jnp.finfo(probability.dtype).eps
    beyond = last * inner.astype(at_most.dtype) * (1 + rounding)
    index = jnp.searchsorted(at_most * num_bins, beyond, side="right")
    return probability[order][jnp.minimum(index, probability.size - 1)]


@array_function
def reliability(
    logits: kinds.Logits,
    labels: kinds.Labels,
    *,
    num_bins: int,
    binning: Binning,
    weights: kinds.WeightsOfRows = None,
    row_weights: kinds.RowWeights = None,
) -> Bins:
    """The bins of the mixture's top label, for a plot."""
    return of_top_label(logits, labels, weights, row_weights, num_bins, binning)


@array_function
def ranked_probability(
    logits: kinds.Logits,
    labels: kinds.Labels,
    *,
    weights: kinds.WeightsOfRows = None,
    row_weights: kinds.RowWeights = None,
    reduction: kinds.Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Ranked probability score of the mixture of the members, for ordered classes.

    $\sum_k (P_k - [y \le k])^2$ with the probability $P_k$ of classes up to $k$; not normalised.

    **Arguments:**

    As [`eqx_ensemble.scores.nll`][].

    **Returns:**

    A scalar, or `(*batch,)`.

    ```python
    logits = jnp.log(jnp.array([[[0.5, 0.3, 0.2]]]))
    ee.scores.ranked_probability(logits, jnp.array([0]))  # 0.5**2 + 0.2**2 = 0.29
    ee.scores.ranked_probability(logits, jnp.array([2]))  # 0.5**2 + 0.8**2 = 0.89
    ```

    ??? cite
        [Epstein, JAM 1969](https://doi.org/10.1175/1520-0450(1969)008%3C0985:ASSFPF%3E2.0.CO;2)
    """
    at_most = jnp.cumsum(jnp.exp(class_mixture(logits, weights)), axis=-1)[..., :-1]
    classes = jnp.arange(logits.shape[-1] - 1, dtype=labels.dtype)
    reached = labels[..., None] <= jnp.reshape(classes, (1,) * labels.ndim + (-1,))
    score = jnp.sum((at_most - reached.astype(at_most.dtype)) ** 2, axis=-1)
    return jnp.where(is_class(labels, logits.shape[-1]), score, jnp.nan)


class BrierDecomposition(NamedTuple):
    """[`eqx_ensemble.scores.brier`][] as `reliability - resolution + uncertainty + within_bins`.

    - `reliability`: the squared distance of probabilities from frequencies in bins; 0 if calibrated.
    - `resolution`: the squared distance of frequencies in bins from those of all rows; higher is better.
    - `uncertainty`: the score of predicting the frequencies of all rows.
    - `within_bins`: the remainder; 0 if all rows of a bin have the same probability.
    """

    reliability: Float[Array, ""]
    resolution: Float[Array, ""]
    uncertainty: Float[Array, ""]
    within_bins: Float[Array, ""]

    def __repr__(self) -> str:
        return brief_repr(self)


@array_function
def brier(
    logits: kinds.Logits,
    labels: kinds.Labels,
    *,
    weights: kinds.WeightsOfRows = None,
    row_weights: kinds.RowWeights = None,
    reduction: kinds.Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Brier score of the mixture of the members, from 0 to 2.

    $\sum_c (p_c - [c = y])^2$ over all classes: for two classes, twice the score of one class.

    **Arguments:**

    As [`eqx_ensemble.scores.nll`][].

    **Returns:**

    A scalar, or `(*batch,)`.

    ```python
    logits = jnp.log(jnp.array([[[0.9, 0.1]], [[0.3, 0.7]]]))
    ee.scores.brier(logits, jnp.array([0]))  # 0.4**2 + 0.4**2 = 0.32
    ```

    ??? cite
        [Brier, MWR 1950](https://doi.org/10.1175/1520-0493(1950)078%3C0001:VOFEIT%3E2.0.CO;2)
    """
    probabilities = jnp.exp(class_mixture(logits, weights))
    truth = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
    known = is_class(labels, logits.shape[-1])
    return jnp.where(known, jnp.sum((probabilities - truth) ** 2, axis=-1), jnp.nan)


@array_function
def decompose_brier(
    logits: kinds.Logits,
    labels: kinds.Labels,
    *,
    num_bins: int = 15,
    binning: Binning = "width",
    weights: kinds.WeightsOfRows = None,
    row_weights: kinds.RowWeights = None,
) -> BrierDecomposition:
    r"""Murphy's decomposition of the Brier score of the mixture: reliability, resolution and uncertainty.

    Rows are binned by the probability of each class. Bin $k$ has mean probability $\bar p_k$ and frequency $\bar o_k$;
    the frequency in all rows is $\bar o$. Summed over classes, reliability is $\sum_k \frac{n_k}{n} (\bar p_k - \bar
    o_k)^2$, resolution $\sum_k \frac{n_k}{n} (\bar o_k - \bar o)^2$, uncertainty $\bar o (1 - \bar o)$.

    **Arguments:**

    As [`eqx_ensemble.scores.ece`][], without `debiased`.

    **Returns:**

    [`eqx_ensemble.scores.BrierDecomposition`][] of scalars.

    ```python
    logits = jnp.log(jnp.array([[[0.8, 0.2], [0.8, 0.2]]]))
    parts = ee.scores.decompose_brier(logits, jnp.array([0, 1]))
    parts.reliability, parts.resolution, parts.uncertainty
    # 2 * 0.3**2 = 0.18, 0, 2 * 0.25 = 0.5
    ```

    ??? cite
        [Murphy, JAM 1973](https://doi.org/10.1175/1520-0450(1973)012%3C0595:ANVPOT%3E2.0.CO;2); `within_bins`:
        [Stephenson et al., WAF 2008](https://doi.org/10.1175/2007WAF2006116.1)
    """
    probabilities, truth, kept = by_class(logits, labels, weights, row_weights)

    def of_class(p: Array, hits: Array) -> BrierDecomposition:
        bins = bin_rows(p, hits, kept, num_bins, binning)
        share, overall = bins.count / jnp.sum(bins.count), mean_of_rows(hits, kept)
        off, surprise = p - bins.probability[bins.index], hits - bins.frequency[bins.index]
        return BrierDecomposition(
            reliability=jnp.sum(share * (bins.probability - bins.frequency) ** 2),
            resolution=jnp.sum(share * (bins.frequency - overall) ** 2),
            uncertainty=overall * (1 - overall),
            # The variance within bins, minus twice the covariance with the hits.
            within_bins=mean_of_rows(off * (off - 2 * surprise), kept),
        )

    return jax.tree.map(jnp.sum, jax.vmap(of_class)(probabilities, truth))
