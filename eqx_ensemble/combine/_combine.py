from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .. import _weighting
from .._boundary import array_function, kinds
from .._brief import brief_repr
from .._pairs import takes_pair
from .._weighting import (
    blank_unweighted,
    class_mixture,
    mixture_moments,
    quantile_in_order,
    shares_in_order,
    sum_members,
    votes,
    weighted_mean,
)


@array_function(each_row=True)
def mixture(logits: kinds.Logits, *, weights: kinds.WeightsOfRows = None) -> Float[Array, "*batch classes"]:
    r"""Log-probabilities of the mixture of the members: the logarithm of the mean of their probabilities.

    $\log \sum_m w_m \, \mathrm{softmax}(\mathrm{logits}_m)$, computed in log space.

    **Arguments:**

    - `logits`: logits or log-probabilities, `(members, *batch, classes)`. For probabilities `p` pass `jnp.log(p)`.

    **Returns:** log-probabilities `(*batch, classes)`.

    ```python
    # two members, one row, two classes
    logits = jnp.log(jnp.array([[[0.9, 0.1]], [[0.3, 0.7]]]))
    jnp.exp(ee.combine.mixture(logits))  # [[0.6, 0.4]]
    ```
    """
    return class_mixture(logits, weights)


@array_function(each_row=True)
def mean_logits(logits: kinds.Logits, *, weights: kinds.WeightsOfRows = None) -> Float[Array, "*batch classes"]:
    r"""Log-probabilities of the mean of the members' logits: the geometric mean of their probabilities, normalised.

    $\mathrm{log\,softmax}(\sum_m w_m \, \mathrm{logits}_m)$, the logarithmic opinion pool. Confident members have more
    influence than in [`eqx_ensemble.combine.mixture`][]: a class with probability zero under one member has probability
    zero.

    **Arguments:** as [`eqx_ensemble.combine.mixture`][].

    **Returns:** log-probabilities `(*batch, classes)`; NaN if every class has probability zero under some member.

    ```python
    logits = jnp.log(jnp.array([[0.9, 0.1], [0.5, 0.5]]))  # two members, one row
    jnp.exp(ee.combine.mean_logits(logits))
    # [0.75, 0.25]: the odds 9 and 1 have the geometric mean 3
    ```

    ??? cite
        [Hinton, Neural Computation 2002](https://doi.org/10.1162/089976602760128018)
    """
    # Relative to the largest logit; the remaining normalisation of each member cancels in the last `log_softmax`.
    relative = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    # Infinities are removed and restored: the weights would otherwise have NaN gradients.
    absent = relative == -jnp.inf
    pooled = weighted_mean(jnp.where(absent, 0, relative), weights)
    return jax.nn.log_softmax(jnp.where(jnp.any(absent, axis=0), -jnp.inf, pooled), axis=-1)


@array_function(each_row=True)
def vote(logits: kinds.Votes, *, weights: kinds.WeightsOfRows = None) -> Float[Array, "*batch classes"]:
    """The fraction of the members' votes for each class; each member votes for its most likely class.

    Ties go to the lowest class; the gradient is zero.

    **Arguments:**

    - `logits`: `(members, *batch, classes)`; log-probabilities or probabilities give the same votes.

    **Returns:** fractions `(*batch, classes)`.

    ```python
    logits = jnp.array([[2.0, 1.0], [0.0, 3.0], [5.0, 4.0]])  # three members, one row
    ee.combine.vote(logits)  # [0.667, 0.333]
    ```
    """
    return votes(logits, weights)


@array_function(each_row=True)
def mean(values: kinds.Members, *, weights: kinds.WeightsOfRows = None) -> Float[Array, "..."]:
    r"""The weighted mean over members of any array, $\sum_m w_m v_m$.

    For class probabilities from logits use [`eqx_ensemble.combine.mixture`][]: the mean of logits is different.

    **Arguments:**

    - `values`: floating-point, `(members, ...)`.

    **Returns:** an array `(...)`.

    ```python
    values = jnp.array([[1.0, 2.0], [4.0, 8.0]])
    ee.combine.mean(values)  # [2.5, 5.0]
    ee.combine.mean(values, weights=jnp.array([2, 1]))  # [2.0, 4.0]
    ee.combine.mean(values, weights=jnp.array([[2, 0], [1, 1]]))  # [2.0, 8.0]
    ```
    """
    return weighted_mean(values, weights)


@array_function(each_row=True)
def log_mixture(log_densities: kinds.Members, *, weights: kinds.WeightsOfRows = None) -> Float[Array, "..."]:
    r"""The logarithm of the mixture of the members' densities, $\log \sum_m w_m p_m$, of any kind, at the same points.

    For classes see [`eqx_ensemble.combine.mixture`][], for Gaussians [`eqx_ensemble.scores.nll_gaussian_mixture`][].

    **Arguments:**

    - `log_densities`: natural logarithms of densities or probabilities, `(members, ...)`.

    **Returns:** log-densities `(...)`.

    ```python
    ee.combine.log_mixture(jnp.log(jnp.array([[0.5], [0.1]])))  # log(0.3)
    ```
    """
    return _weighting.log_mixture(log_densities, weights)


class Gaussian(NamedTuple):
    """One Gaussian per entry: `mean` and `variance`, of the same shape."""

    mean: Float[Array, "..."]
    variance: Float[Array, "..."]

    def __repr__(self) -> str:
        return brief_repr(self)


@takes_pair
@array_function(each_row=True)
def gaussian(mean: kinds.Members, variance: kinds.VariancesOrZero, *, weights: kinds.WeightsOfRows = None) -> Gaussian:
    r"""The Gaussian with the mean and variance of the mixture of the members' Gaussians.

    $\mu = \sum_m w_m \mu_m$ and $\sigma^2 = \sum_m w_m (\sigma_m^2 + (\mu_m - \mu)^2)$, entry by entry. For the two
    parts of the variance see [`eqx_ensemble.uncertainty.decompose_variance`][].

    **Arguments:**

    - `mean`, `variance`: `(members, ...)`.

    **Returns:** [`eqx_ensemble.combine.Gaussian`][], each `(...)`.

    ```python
    matched = ee.combine.gaussian(jnp.array([[1.0], [3.0]]), jnp.array([[0.5], [0.5]]))
    matched.mean, matched.variance  # [2.0], [1.5]
    ```

    ??? cite
        [Lakshminarayanan et al., NeurIPS 2017](https://arxiv.org/abs/1612.01474)
    """
    return Gaussian(*mixture_moments(mean, variance, weights))


@takes_pair
@array_function(each_row=True)
def product_gaussian(
    mean: kinds.Members,
    variance: kinds.VariancesOrZero,
    *,
    weights: kinds.WeightsOfRows = None,
    power: kinds.Power = 1.0,
) -> Gaussian:
    r"""The Gaussian proportional to the product of the members' Gaussians, each raised to its weight.

    The precision is $\sigma^{-2} = a \sum_m w_m \sigma_m^{-2}$ and the mean $\mu = a \, \sigma^2 \sum_m w_m \mu_m /
    \sigma_m^2$, where $a$, the `power`, is the sum of all exponents: 1 for the geometric mean of the densities, the
    number of members for the plain product, valid for members with independent errors.

    **Arguments:**

    - `mean`, `variance`: `(members, ...)`. Where a member has variance zero, only such members are used.
    - `power`: the sum of the exponents, positive.

    **Returns:** [`eqx_ensemble.combine.Gaussian`][], each `(...)`. The variance does not depend on the means.

    ```python
    mean, variance = jnp.array([[0.0], [3.0]]), jnp.array([[1.0], [2.0]])
    ee.combine.product_gaussian(mean, variance, power=2)  # mean 1.0, variance 2/3
    ```

    ??? cite
        [Cao and Fleet, arXiv 2014](https://arxiv.org/abs/1410.7827)
    """
    variance = blank_unweighted(variance, weights, fill=jnp.inf)
    # Precisions relative to the largest do not overflow, and do not give 0 / 0 where a member has variance zero.
    least = jax.lax.stop_gradient(jnp.min(variance, axis=0))
    limit = (least == 0) | (least == jnp.inf)
    of_equals = (variance == least[None]).astype(variance.dtype)
    safe = jnp.where(limit[None], 1, variance)
    precision = jnp.where(limit[None], of_equals, 1 / (safe / jnp.where(limit, 1, least)[None]))
    # A member of precision zero has no influence, even if its mean is not finite.
    mean = jnp.where(precision == 0, 0, mean)
    total = weighted_mean(precision, weights)
    # The first mean is also weighted by precision: otherwise members of low precision could shift it far away.
    found = weighted_mean(precision * mean, weights) / total
    infinite = jnp.isinf(found)
    rough = jnp.where(infinite, 0, found)
    deviation = jnp.where(infinite[None], 0, mean) - rough[None]
    correction = weighted_mean(precision * jnp.where(precision == 0, 0, deviation), weights) / total
    return Gaussian(jnp.where(infinite, found, rough + correction), least / total / power)


@array_function(each_row=True)
def moments(values: kinds.Members, *, weights: kinds.WeightsOfRows = None) -> Gaussian:
    r"""Mean and variance over members of point predictions, entry by entry.

    $\mu = \sum_m w_m v_m$ and $\sigma^2 = \sum_m w_m (v_m - \mu)^2$ (ddof 0). A large common offset costs no precision.
    For members that predict a variance see [`eqx_ensemble.combine.gaussian`][].

    **Arguments:**

    - `values`: floating-point, `(members, ...)`.

    **Returns:** a named tuple of `.mean` and `.variance`, each `(...)`.

    ```python
    ee.combine.moments(jnp.array([[1.0], [3.0]]))  # mean [2.0], variance [1.0]
    ```

    ??? cite
        [Chan et al., COMPSTAT 1982](https://doi.org/10.1007/978-3-642-51461-6_3)
    """
    return Gaussian(*_weighting.moments(values, weights))


@array_function(in_order="values", each_row=True)
def median(values: kinds.Members, *, weights: kinds.Weights = None) -> Float[Array, "..."]:
    """The weighted median over members, entry by entry; robust to outlying members.

    The value at which the cumulative weight reaches one half; the midpoint to the next value if it is exactly one half.
    For other levels see [`eqx_ensemble.uncertainty.quantile`][].

    **Arguments:**

    - `values`: floating-point, `(members, ...)`. Medians of the probabilities of several classes do not sum to one.

    **Returns:** an array `(...)`; NaN where a member is NaN.

    ```python
    values = jnp.array([[1.0], [2.0], [1e9]])
    ee.combine.median(values)  # [2.0]
    ee.combine.median(values, weights=jnp.array([3, 1, 1]))  # [1.0]
    ```
    """
    half = jnp.asarray(0.5, values.dtype)
    return jnp.where(jnp.isnan(values[-1]), jnp.nan, quantile_in_order(values, weights, half, half))


@array_function(in_order="values", each_row=True)
def trimmed_mean(values: kinds.Members, *, cut: kinds.Cut = 0.1, weights: kinds.Weights = None) -> Float[Array, "..."]:
    r"""The mean over members without the lowest and highest values, entry by entry.

    $\frac{1}{1 - 2c} \int_c^{1 - c} Q(u) \, du$ with the members' quantiles $Q$ and $c$ the `cut`;
    `scipy.stats.trim_mean` if $c$ times the number of members is an integer.

    **Arguments:**

    - `values`: floating-point, `(members, ...)`.
    - `cut`: the fraction to cut off at each end, from 0 (the mean) to below 0.5 (the median).

    **Returns:** an array `(...)`; NaN where any member is NaN.

    ```python
    values = jnp.array([[-1e9], [1.0], [2.0], [3.0], [1e9]])
    ee.combine.trimmed_mean(values, cut=0.2)  # [2.0]
    ```
    """
    inside = jnp.clip(shares_in_order(values, weights), cut, 1 - cut)
    kept = jnp.diff(inside, axis=0, prepend=jnp.broadcast_to(cut, inside[:1].shape))
    # A fraction due to rounding alone must not include an outlying member.
    rounding = jnp.minimum(8 * jnp.finfo(values.dtype).eps, jnp.max(kept, axis=0) / 2)
    kept = jnp.where(kept < rounding[None], 0, kept)
    kept = kept / jnp.sum(kept, axis=0)[None]
    # Deviations from a member that is kept are small: a large common offset costs no precision.
    middle = lambda: jax.lax.dynamic_index_in_dim(values, values.shape[0] // 2, keepdims=False)
    one = middle() if weights is None else _at_largest(values, kept)
    one = jnp.where(jnp.abs(one) < jnp.finfo(values.dtype).max / 4, one, 0)
    found = one + sum_members(kept * jnp.where(kept == 0, 0, values - one[None]))
    return jnp.where(jnp.isnan(values[-1]), jnp.nan, found)


def _at_largest(values: Float[Array, "members ..."], weights: Float[Array, "members ..."]) -> Float[Array, "..."]:
    index = jnp.argmax(weights, axis=0)
    return jnp.take_along_axis(values, index[None], axis=0)[0]
