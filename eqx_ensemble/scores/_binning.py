"""Rows in bins by a probability, for calibration errors and the parts of the Brier score."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Integer

from .._check import check_positive_int, check_word
from .._weighting import class_mixture, is_class
from ._classification import check_classes, correct
from ._crps_gaussian import expected_distance

Binning = Literal["width", "mass"]

_BLOCK = 1024
"""How many rows are added up one after another."""


class Bins(NamedTuple):
    """The inner edges of the bins, the bin of every row, and for each bin its rows, mean probability and frequency.

    The means of an empty bin are zero.
    """

    edges: Float[Array, " edges"]
    index: Int[Array, " rows"]
    count: Float[Array, " bins"]
    probability: Float[Array, " bins"]
    frequency: Float[Array, " bins"]


def check_bins(
    name: str,
    logits: ArrayLike,
    labels: ArrayLike,
    num_bins: int,
    binning: Binning,
    weights: ArrayLike | None,
    mask: ArrayLike | None,
) -> tuple[Array, Array, Array | None, Array | None]:
    """Checked logits, labels, weights and mask, as of `check_classes`; one bin or more, of a known kind."""
    checked = check_classes(name, logits, labels, weights, mask, "mean")
    check_positive_int(num_bins, "num_bins", name=name)
    check_word(binning, "binning", ("width", "mass"), name=name)
    return checked


def bin_rows(
    probability: Float[Array, " rows"],
    hits: Float[Array, " rows"],
    mask: Bool[Array, " rows"] | None,
    num_bins: int,
    binning: Binning,
) -> Bins:
    """Bins of equal width or of equal mass; masked rows are in no bin."""
    kept = jnp.ones_like(probability) if mask is None else mask.astype(probability.dtype)
    edges = _of_width(num_bins, probability.dtype) if binning == "width" else _of_mass(probability, mask, num_bins)
    edges = jax.lax.stop_gradient(edges)
    index = jnp.searchsorted(edges, probability, side="left")
    total = lambda values: _sum_by_bin(values * kept, index, num_bins)
    count = total(jnp.ones_like(probability))
    filled = jnp.maximum(count, 1)
    rough = total(probability) / filled
    # A sum of equal numbers always rounds the same way; a sum of small deviations from the mean does not.
    mean = rough + total(probability - rough[index]) / filled
    return Bins(edges, index, count, mean, total(hits) / filled)


def by_class(
    logits: Float[Array, "members *batch classes"],
    labels: Integer[Array, "*batch"],
    weights: Float[Array, "members ..."] | None,
    mask: Bool[Array, "*batch"] | None,
) -> tuple[Float[Array, "classes rows"], Float[Array, "classes rows"], Bool[Array, " rows"] | None]:
    """The mixture's probabilities and the one-hot labels, class by class, with all rows on one axis."""
    num_classes = logits.shape[-1]
    logs = class_mixture(logits, weights)
    probabilities = jnp.reshape(jnp.exp(logs), (-1, num_classes))
    flat = jnp.ravel(labels)
    known = is_class(flat, num_classes)
    truth = jnp.where(known[:, None], jax.nn.one_hot(flat, num_classes, dtype=probabilities.dtype), jnp.nan)
    return probabilities.T, truth.T, None if mask is None else jnp.ravel(mask)


def of_top_label(
    logits: Float[Array, "members *batch classes"],
    labels: Integer[Array, "*batch"],
    weights: Float[Array, "members ..."] | None,
    mask: Bool[Array, "*batch"] | None,
    num_bins: int,
    binning: Binning,
) -> Bins:
    """Bins of the confidence, which is the mixture's largest probability; a hit is a label of that class."""
    logs = class_mixture(logits, weights)
    confidence = jnp.ravel(jnp.exp(jnp.max(logs, axis=-1)))
    return bin_rows(
        confidence, jnp.ravel(correct(logs, labels)), None if mask is None else jnp.ravel(mask), num_bins, binning
    )


def mean_gap(bins: Bins, *, debiased: bool) -> Float[Array, ""]:
    """The mean over rows of the distance between a bin's probability and frequency, without its expected excess."""
    gaps = bins.frequency - bins.probability
    errors = jnp.abs(gaps)
    if debiased:
        variance = bins.frequency * (1 - bins.frequency) / jnp.maximum(bins.count, 1)
        errors = 2 * errors - expected_distance(gaps, variance)
    return jnp.sum(bins.count * errors) / jnp.sum(bins.count)


def _sum_by_bin(values: Float[Array, " rows"], index: Int[Array, " rows"], num_bins: int) -> Float[Array, " bins"]:
    """The sum of every bin, block by block of rows, so that no small number is added to a very large one."""
    num_blocks = max(-(-values.size // _BLOCK), 1)
    segment = index + num_bins * (jnp.arange(values.size, dtype=index.dtype) // _BLOCK)
    sums = jax.ops.segment_sum(values, segment, num_segments=num_bins * num_blocks)
    return jnp.sum(jnp.reshape(sums, (num_blocks, num_bins)), axis=0)


def _of_width(num_bins: int, dtype: jnp.dtype) -> Float[Array, " edges"]:
    # Inner edges only: a probability that rounding puts above one stays in the last bin.
    return jnp.asarray(np.linspace(0, 1, num_bins + 1)[1:-1], dtype)


def _of_mass(
    probability: Float[Array, " rows"], mask: Bool[Array, " rows"] | None, num_bins: int
) -> Float[Array, " edges"]:
    """Sorted value number (n - 1) k / K, rounded down. An edge that is a value keeps all rows of it together."""
    ordered = jnp.sort(probability if mask is None else jnp.where(mask, probability, jnp.inf))
    last = probability.size - 1 if mask is None else jnp.sum(mask) - 1
    inner = jnp.arange(1, num_bins)
    # In two parts, because the product may be more than 32-bit integers hold.
    index = last // num_bins * inner + last % num_bins * inner // num_bins
    return ordered[index]
