from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._boundary import array_function, kinds
from .._brief import brief_repr
from .._pairs import takes_pair
from .._weighting import at_label, class_mixture, is_class, moments, weighted_mean


class Decomposition(NamedTuple):
    """Uncertainty in two parts, `total` = `aleatoric` + `epistemic`, all of the same shape.

    Aleatoric uncertainty is the noise that members predict; epistemic uncertainty is the disagreement between members,
    which more data would reduce.
    """

    total: Float[Array, "..."]
    aleatoric: Float[Array, "..."]
    epistemic: Float[Array, "..."]

    def __repr__(self) -> str:
        return brief_repr(self)


class Ambiguity(NamedTuple):
    """The loss of the ensemble in two parts, `ensemble` = `members` - `ambiguity`, all of the same shape.

    `members` is the mean loss of the members, and `ambiguity`, never negative, the gain from their diversity.
    """

    ensemble: Float[Array, "..."]
    members: Float[Array, "..."]
    ambiguity: Float[Array, "..."]

    def __repr__(self) -> str:
        return brief_repr(self)


@array_function(each_row=True)
def decompose_squared_error(
    predictions: kinds.Samples, targets: kinds.Targets, *, weights: kinds.Weights = None
) -> Ambiguity:
    r"""The squared error of the ensemble mean: the mean squared error of the members minus their ambiguity.

    With $\bar f = \sum_m w_m f_m$: $(\bar f - y)^2 = \sum_m w_m (f_m - y)^2 - \sum_m w_m (f_m - \bar f)^2$.

    **Arguments:**

    - `predictions`, `targets`: `(members, *batch)` and `(*batch,)`, without broadcasting.
    - `weights`: over members, `(members,)`.

    **Returns:**

    [`eqx_ensemble.uncertainty.Ambiguity`][] of arrays `(*batch,)`.

    ```python
    parts = ee.uncertainty.decompose_squared_error(
        jnp.array([[1.0], [3.0]]), jnp.array([1.0])
    )
    parts.ensemble, parts.members, parts.ambiguity  # [1.0], [2.0], [1.0]
    ```

    ??? cite
        [Krogh and Vedelsby
        1994](https://proceedings.neurips.cc/paper/1994/hash/b8c37e33defde51cf91e1e03e51657da-Abstract.html)
    """
    # Errors, not predictions: a large common offset cancels before squaring.
    error, ambiguity = moments(predictions - targets[None], weights)
    return Ambiguity(error**2, error**2 + ambiguity, ambiguity)


@array_function(each_row=True)
def decompose_nll(logits: kinds.Logits, labels: kinds.Labels, *, weights: kinds.Weights = None) -> Ambiguity:
    r"""The cross-entropy of the mean logits: the mean cross-entropy of the members minus their ambiguity.

    With $q$ the normalised geometric mean of the members, [`eqx_ensemble.combine.mean_logits`][]: $-\log q(y) = -\sum_m
    w_m \log p_m(y) - \sum_m w_m \mathrm{KL}(q \parallel p_m)$. The ambiguity does not depend on the label; the gain of
    [`eqx_ensemble.combine.mixture`][] does.

    **Arguments:**

    - `logits`, `labels`: `(members, *batch, classes)`, and integers `(*batch,)` from 0 to classes - 1. While tracing, a
        label out of range makes its row NaN.
    - `weights`: over members, `(members,)`.

    **Returns:**

    [`eqx_ensemble.uncertainty.Ambiguity`][] of arrays `(*batch,)`.

    ```python
    logits = jnp.log(jnp.array([[[0.9, 0.1]], [[0.1, 0.9]]]))
    parts = ee.uncertainty.decompose_nll(logits, jnp.array([0]))
    parts.ensemble, parts.members, parts.ambiguity  # log(2) = 0.693, 1.204, 0.511
    ```

    ??? cite
        [Wood et al. 2023](https://jmlr.org/papers/v24/23-0041.html)
    """
    logs = jax.nn.log_softmax(logits, axis=-1)
    absent = logs == -jnp.inf
    pooled = jnp.where(jnp.any(absent, axis=0), -jnp.inf, weighted_mean(jnp.where(absent, 0, logs), weights))
    pooled = jax.nn.log_softmax(pooled, axis=-1)
    ambiguity = weighted_mean(_divergence_to(pooled[None], logs), weights)
    ambiguity = jnp.where(is_class(labels, logs.shape[-1]), ambiguity, jnp.nan)
    ensemble = -at_label(pooled, labels)
    return Ambiguity(ensemble, ensemble + ambiguity, ambiguity)


def _divergence_to(
    pooled: Float[Array, "1 *batch classes"], logs: Float[Array, "members *batch classes"]
) -> Float[Array, " members *batch"]:
    r"""KL divergence of the pool $q$ from each member, $\sum_c q_c (\delta_c + e^{-\delta_c} - 1)$.

    Here $\delta_c = \log q_c - \log p_c$: as both sum to one, this equals $\sum_c q_c \delta_c$, but no term is
    negative.
    """
    gone = jnp.broadcast_to(pooled == -jnp.inf, logs.shape)  # where q is zero the term is p
    delta = jnp.where(gone, 0, jnp.broadcast_to(pooled, logs.shape)) - jnp.where(gone, 0, logs)
    near = delta > -1
    small = jnp.where(near, delta, 0)
    q, p = jnp.exp(pooled), jnp.exp(logs)
    terms = jnp.where(near, q * jnp.maximum(small + jnp.expm1(-small), 0), q * (delta - 1) + p)
    return jnp.sum(jnp.where(gone, p, terms), axis=-1)


@takes_pair
@array_function(each_row=True)
def decompose_variance(
    mean: kinds.Members, variance: kinds.VariancesOrZero, *, weights: kinds.WeightsOfRows = None
) -> Decomposition:
    r"""The variance of the mixture of the members, split by the law of total variance.

    `aleatoric` is the mean of the members' variances, $\sum_m w_m \sigma_m^2$; `epistemic` is the variance of their
    means, $\sum_m w_m (\mu_m - \mu)^2$ (ddof 0); `total` is the variance of [`eqx_ensemble.combine.gaussian`][].

    **Arguments:**

    - `mean`, `variance`: `(members, ...)`. For point predictions pass `jnp.zeros_like(mean)`; for class probabilities
        `p` pass `p` and `p * (1 - p)`, and sum the parts over classes.
    - `weights`: over members, `(members,)` or `(members, *rows)`.

    **Returns:**

    [`eqx_ensemble.uncertainty.Decomposition`][] of arrays of the shape of one member's mean.

    ```python
    parts = ee.uncertainty.decompose_variance(
        jnp.array([[1.0], [3.0]]), jnp.array([[0.5], [0.7]])
    )
    parts.total, parts.aleatoric, parts.epistemic  # [1.6], [0.6], [1.0]
    ```

    ??? cite
        [Depeweg et al. 2018](https://arxiv.org/abs/1710.07283)
    """
    aleatoric, epistemic = weighted_mean(variance, weights), moments(mean, weights)[1]
    return Decomposition(aleatoric + epistemic, aleatoric, epistemic)


@array_function(each_row=True)
def least_confidence(logits: kinds.Logits, *, weights: kinds.Weights = None) -> Float[Array, "*batch"]:
    r"""One minus the largest probability of the mixture of the members, $1 - \max_c \sum_m w_m p_{mc}$.

    Nearly certain rows remain distinguishable.

    **Arguments:**

    - `logits`: `(members, *batch, classes)`.
    - `weights`: over members, `(members,)`.

    **Returns:**

    `(*batch,)`, from 0 to 1 - 1 / `classes`; higher is less certain.

    ```python
    logits = jnp.log(jnp.array([[[0.9, 0.1]], [[0.7, 0.3]]]))
    ee.uncertainty.least_confidence(logits)  # 0.2
    ```

    ??? cite
        [Hendrycks and Gimpel 2017](https://arxiv.org/abs/1610.02136)
    """
    logs = class_mixture(logits, weights)
    best = jax.nn.one_hot(jnp.argmax(logs, axis=-1), logs.shape[-1], dtype=bool)
    return jnp.sum(jnp.where(best & ~jnp.isnan(logs), 0, jnp.exp(logs)), axis=-1)


@array_function(each_row=True)
def free_energy(
    logits: kinds.Logits, *, temperature: kinds.Temperature = 1.0, weights: kinds.Weights = None
) -> Float[Array, "*batch"]:
    r"""The mean over members of the free energy of their logits, $-T \log \sum_c \exp(f_c / T)$.

    **Arguments:**

    - `logits`: raw logits `(members, *batch, classes)`; log-probabilities have energy zero at $T = 1$.
    - `temperature`: $T$, positive.
    - `weights`: over members, `(members,)`.

    **Returns:**

    Energies `(*batch,)`, in the unit of the logits; higher is less similar to the training data.

    ```python
    ee.uncertainty.free_energy(jnp.array([[[0.0, 0.0], [9.0, 0.0]]]))  # [-0.69, -9.0]
    ```

    ??? cite
        [Liu et al. 2020](https://arxiv.org/abs/2010.03759)
    """
    return -temperature * weighted_mean(jax.nn.logsumexp(logits / temperature, axis=-1), weights)
