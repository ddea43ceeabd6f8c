import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Real

from .._check import check_logits, check_weights
from .._combination import by_rows
from .._weighting import blank_unweighted, weighted_mean
from ._variance import Decomposition


def entropy(logits: Float[ArrayLike, "*batch classes"]) -> Float[Array, "*batch"]:
    r"""The entropy of the distributions on the last axis, $-\sum_c p_c \log p_c$.

    **Arguments:**

    - `logits`: `(*batch, classes)`; leading axes, such as `members`, are kept.

    **Returns:**

    Entropies `(*batch,)`, between 0 and $\log$ `classes`.

    ```python
    ee.uncertainty.entropy(jnp.log(jnp.array([[0.5, 0.5], [1.0, 0.0]])))  # [0.693, 0.0]
    ```
    """
    checked = check_logits(logits, members=False)
    return _entropy(checked)


def decompose_entropy(
    logits: Float[ArrayLike, "members *batch classes"], *, weights: Real[ArrayLike, " members *rows"] | None = None
) -> Decomposition:
    r"""The entropy of the mixture of the members, split into noise and disagreement between members.

    With $p = \sum_m w_m p_m$: `total` is $H(p)$; `aleatoric` is $\sum_m w_m H(p_m)$; `epistemic` is their difference,
    the mutual information $\sum_m w_m \mathrm{KL}(p_m \parallel p)$ between label and member,
    never negative.

    **Arguments:**

    - `logits`: `(members, *batch, classes)`.
    - `weights`: over members, `(members,)` or `(members, *rows)`.

    **Returns:**

    [`eqx_ensemble.uncertainty.Decomposition`][] of arrays `(*batch,)`.

    ```python
    opposed = jnp.log(jnp.array([[[1.0, 0.0]], [[0.0, 1.0]]]))
    parts = ee.uncertainty.decompose_entropy(opposed)
    parts.total, parts.aleatoric, parts.epistemic  # [0.693], [0.0], [0.693]
    ```

    ??? cite
        [Depeweg et al. 2018](https://arxiv.org/abs/1710.07283)
    """
    checked = check_logits(logits)
    convex = check_weights(weights, checked.shape[0], checked.dtype, shape=checked.shape[1:-1])
    return Decomposition(*by_rows(_decompose, checked, (), convex, event_ndim=1))


def _decompose(
    logits: Float[Array, "members *batch classes"], _: tuple, weights: Float[Array, "members ..."] | None
) -> tuple[Float[Array, "*batch"], ...]:
    aleatoric, epistemic = _parts(logits, weights)
    return aleatoric + epistemic, aleatoric, epistemic


def _parts(
    logits: Float[Array, "members *batch classes"], weights: Float[Array, "members ..."] | None
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """The mean entropy of the members, and their mean divergence from the mixture."""
    logs = jax.nn.log_softmax(blank_unweighted(logits, weights), axis=-1)
    probabilities = jnp.exp(logs)
    mixed = weighted_mean(probabilities, weights)
    entropies = weighted_mean(_entropy_of(logs, probabilities), weights)
    return entropies, weighted_mean(divergence(logs, mixed, weights), weights)


@jax.jit
def _entropy(logits: Float[Array, "*batch classes"]) -> Float[Array, "*batch"]:
    logs = jax.nn.log_softmax(logits, axis=-1)
    return _entropy_of(logs, jnp.exp(logs))


def _entropy_of(
    logs: Float[Array, "*batch classes"], probabilities: Float[Array, "*batch classes"]
) -> Float[Array, "*batch"]:
    # 0 log 0 = 0; the inner `where` keeps the gradient finite as well.
    return jnp.sum(probabilities * -jnp.where(logs == -jnp.inf, 0, logs), axis=-1)


def divergence(
    logs: Float[Array, "members *batch classes"],
    mixed: Float[Array, "*batch classes"],
    weights: Float[Array, "members ..."] | None,
) -> Float[Array, " members *batch"]:
    r"""KL divergence of each member from the mixture, $\sum_c q_c (\delta_c e^{\delta_c} - e^{\delta_c} + 1)$.

    Here $\delta_c = \log p_c - \log q_c$ and $q$ is the mixture: as both sum to one, this equals $\sum_c p_c \delta_c$,
    but no term is negative, and $\delta$ is at most the logarithm of one over the member's weight.
    """
    absent, impossible = logs == -jnp.inf, mixed == 0
    relative = jnp.where(absent, 0, logs) - jnp.log(jnp.where(impossible, 1, mixed))[None]
    # A member of weight zero may have infinite divergence, and zero times infinity is NaN.
    delta = blank_unweighted(jnp.where(absent | impossible[None], 0, relative), weights)
    return jnp.sum(mixed[None] * jnp.where(absent, 1, _excess(delta)), axis=-1)


def _excess(x: Float[Array, "..."]) -> Float[Array, "..."]:
    r"""$x e^x - e^x + 1$, by its series $\sum_k x^k (k - 1) / k!$ where this is small and would cancel."""
    is_small = jnp.abs(x) < 0.5
    small, large = jnp.where(is_small, x, 0), jnp.where(is_small, 0, x)
    series = jnp.zeros_like(x)
    for k in range(10 if x.dtype == jnp.float32 else 17, 1, -1):
        series = series * small + (k - 1) / math.factorial(k)
    return jnp.where(is_small, small**2 * series, large * jnp.exp(large) - jnp.exp(large) + 1)


def jensen_shannon(
    logits: Float[ArrayLike, "members *batch classes"], *, weights: Real[ArrayLike, " members"] | None = None
) -> Float[Array, "*batch"]:
    r"""The Jensen-Shannon divergence of the members: their mean divergence from their mixture.

    $\sum_m w_m \mathrm{KL}(p_m \parallel p)$ with $p = \sum_m w_m p_m$: the `epistemic` part of
    [`eqx_ensemble.uncertainty.decompose_entropy`][], and for two equally weighted members half of Lin's $L$.

    **Arguments:**

    - `logits`: `(members, *batch, classes)`.
    - `weights`: over members, `(members,)`.

    **Returns:**

    Divergences `(*batch,)`, from 0 to the entropy of the weights.

    ```python
    logits = jnp.log(jnp.array([[1.0, 0.0], [0.0, 1.0]]))
    ee.uncertainty.jensen_shannon(logits)  # log(2)
    ```

    ??? cite
        [Lin 1991](https://doi.org/10.1109/18.61115)
    """
    checked = check_logits(logits)
    return _jensen_shannon(checked, check_weights(weights, checked.shape[0], checked.dtype))


def pairwise_kl(
    logits: Float[ArrayLike, "members *batch classes"], *, weights: Real[ArrayLike, " members"] | None = None
) -> Float[Array, "*batch"]:
    r"""The mean KL divergence between two members drawn with probabilities equal to their weights.

    $\sum_{mn} w_m w_n \mathrm{KL}(p_m \parallel p_n)$, in time linear in the members; an upper bound on
    [`eqx_ensemble.uncertainty.jensen_shannon`][]. Added to the members' mean entropy, it gives the total uncertainty if
    a random member predicts instead of the mixture.

    **Arguments:**

    - `logits`: `(members, *batch, classes)`.
    - `weights`: over members, `(members,)`.

    **Returns:**

    Divergences `(*batch,)`; infinite where one member assigns a class probability zero and another does not.

    ```python
    logits = jnp.log(jnp.array([[0.9, 0.1], [0.1, 0.9]]))
    ee.uncertainty.pairwise_kl(logits)  # 0.4 * log(9) = 0.879
    ```

    ??? cite
        [Schweighofer et al. 2023](https://arxiv.org/abs/2311.08309)
    """
    checked = check_logits(logits)
    return _pairwise_kl(checked, check_weights(weights, checked.shape[0], checked.dtype))


@jax.jit
def _jensen_shannon(
    logits: Float[Array, "members *batch classes"], weights: Float[Array, " members"] | None
) -> Float[Array, "*batch"]:
    return _parts(logits, weights)[1]


@jax.jit
def _pairwise_kl(
    logits: Float[Array, "members *batch classes"], weights: Float[Array, " members"] | None
) -> Float[Array, "*batch"]:
    logs = jax.nn.log_softmax(blank_unweighted(logits, weights), axis=-1)
    absent = logs == -jnp.inf
    finite = jnp.where(absent, 0, logs)
    product = _centre(jnp.where(absent, 0, jnp.exp(finite)), weights) * _centre(finite, weights)
    # Members of weight zero are overwritten, and therefore never absent.
    nowhere = weighted_mean(jnp.where(absent, 0, jnp.ones_like(logs)), weights) == 0
    disputed = jnp.any(absent, axis=0) & ~nowhere
    return jnp.sum(jnp.where(disputed, jnp.inf, jnp.maximum(weighted_mean(product, weights), 0)), axis=-1)


def _centre(
    values: Float[Array, "members *batch classes"], weights: Float[Array, " members"] | None
) -> Float[Array, "members *batch classes"]:
    deviation = values - weighted_mean(values, weights)[None]
    return deviation - weighted_mean(deviation, weights)[None]
