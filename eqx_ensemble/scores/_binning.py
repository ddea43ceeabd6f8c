"""Bins rows by probability, for calibration errors and the decomposition of the Brier score."""

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer

from .._boundary import Labels, Logits, RowWeights, WeightsOfRows, array_function
from .._brief import brief_repr
from .._weighting import class_mixture, is_class
from ._classification import correct
from ._gaussian import expected_distance
from ._reduce import sum_by_segment

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

    __repr__ = brief_repr


def bin_rows(
    probability: Float[Array, " rows"],
    hits: Float[Array, " rows"],
    row_weights: CheckedRowWeights | None,
    num_bins: int,
    binning: Binning,
) -> Bins:
    """Bins of equal width or of equal mass; ignored rows are in no bin."""
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
    rounding = 4 * math.log2(2 * probability.size) * jnp.finfo(probability.dtype).eps
    beyond = last * inner.astype(at_most.dtype) * (1 + rounding)
    index = jnp.searchsorted(at_most * num_bins, beyond, side="right")
    return probability[order][jnp.minimum(index, probability.size - 1)]


@array_function
def reliability(
    logits: Logits,
    labels: Labels,
    *,
    num_bins: int,
    binning: Binning,
    weights: WeightsOfRows = None,
    row_weights: RowWeights = None,
) -> Bins:
    """The bins of the mixture's top label, for a plot."""
    return of_top_label(logits, labels, weights, row_weights, num_bins, binning)
