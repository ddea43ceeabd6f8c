from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._boundary import Labels, Logits, Reduction, RowWeights, WeightsOfRows, array_function, mean_of_rows
from .._brief import brief_repr
from .._weighting import class_mixture, is_class
from ._binning import Binning, bin_rows, by_class


@array_function
def ranked_probability(
    logits: Logits,
    labels: Labels,
    *,
    weights: WeightsOfRows = None,
    row_weights: RowWeights = None,
    reduction: Reduction = "mean",
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

    __repr__ = brief_repr


@array_function
def brier(
    logits: Logits,
    labels: Labels,
    *,
    weights: WeightsOfRows = None,
    row_weights: RowWeights = None,
    reduction: Reduction = "mean",
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
    logits: Logits,
    labels: Labels,
    *,
    num_bins: int = 15,
    binning: Binning = "width",
    weights: WeightsOfRows = None,
    row_weights: RowWeights = None,
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
            within_bins=mean_of_rows(off * (off - 2 * surprise), kept),
        )

    return jax.tree.map(jnp.sum, jax.vmap(of_class)(probabilities, truth))
