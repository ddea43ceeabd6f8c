import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._boundary import array_function, kinds
from .._weighting import blank_unweighted, different_votes, votes, weighted_mean
from ._variance import Decomposition


@array_function(each_row=True)
def entropy(logits: kinds.MixedLogits) -> Float[Array, "*batch"]:
    r"""The entropy of the distributions on the last axis, $-\sum_c p_c \log p_c$.

    **Arguments:**

    - `logits`: `(*batch, classes)`; leading axes, such as `members`, are kept.

    **Returns:**

    Entropies `(*batch,)`, between 0 and $\log$ `classes`.

    ```python
    ee.uncertainty.entropy(jnp.log(jnp.array([[0.5, 0.5], [1.0, 0.0]])))  # [0.693, 0.0]
    ```
    """
    logs = jax.nn.log_softmax(logits, axis=-1)
    return _entropy_of(logs, jnp.exp(logs))


@array_function(each_row=True)
def decompose_entropy(logits: kinds.Logits, *, weights: kinds.WeightsOfRows = None) -> Decomposition:
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
    aleatoric, epistemic = _parts(logits, weights)
    return Decomposition(aleatoric + epistemic, aleatoric, epistemic)


def _parts(
    logits: Float[Array, "members *batch classes"], weights: Float[Array, "members ..."] | None
) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """The mean entropy of the members, and their mean divergence from the mixture."""
    logs = jax.nn.log_softmax(logits, axis=-1)
    probabilities = jnp.exp(logs)
    mixed = weighted_mean(probabilities, weights)
    entropies = weighted_mean(_entropy_of(logs, probabilities), weights)
    return entropies, weighted_mean(divergence(logs, mixed, weights), weights)


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


@array_function(each_row=True)
def jensen_shannon(logits: kinds.Logits, *, weights: kinds.Weights = None) -> Float[Array, "*batch"]:
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
    return _parts(logits, weights)[1]


@array_function(each_row=True)
def pairwise_kl(logits: kinds.Logits, *, weights: kinds.Weights = None) -> Float[Array, "*batch"]:
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
    logs = jax.nn.log_softmax(logits, axis=-1)
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


@array_function(each_row=True)
def variation_ratio(logits: kinds.Votes, *, weights: kinds.Weights = None) -> Float[Array, "*batch"]:
    """The fraction of the members' votes that are not for the class with the most votes.

    **Arguments:**

    - `logits`: `(members, *batch, classes)`.
    - `weights`: over members, `(members,)`.

    **Returns:**

    Fractions `(*batch,)`, from 0, if all members agree, to 1 - 1 / `classes`.

    ```python
    logits = jnp.array([[2.0, 1.0], [0.0, 3.0], [5.0, 4.0]])
    ee.uncertainty.variation_ratio(logits)  # 1/3
    ```
    """
    shares = votes(logits, weights)
    # Not 1 - max, which is not exactly zero where all members agree, because weights are rounded.
    return jnp.sum(shares, axis=-1) - jnp.max(shares, axis=-1)


@array_function(each_row=True)
def disagreement(logits: kinds.Votes, *, weights: kinds.Weights = None) -> Float[Array, "*batch"]:
    r"""The probability that two members, drawn with probabilities equal to their weights, vote for different classes.

    $1 - \sum_c v_c^2$ with $v_c$ the fraction of votes for class $c$.

    **Arguments:**

    - `logits`: `(members, *batch, classes)`.
    - `weights`: over members, `(members,)`.

    **Returns:**

    Probabilities `(*batch,)`.

    ```python
    logits = jnp.array([[2.0, 1.0], [0.0, 3.0], [5.0, 4.0]])
    ee.uncertainty.disagreement(logits)  # 4/9
    ```
    """
    return different_votes(votes(logits, weights))


@array_function
def pairwise_disagreement(
    logits: kinds.Votes, *, row_weights: kinds.RowWeights = None
) -> Float[Array, "members members"]:
    """The fraction of rows on which each pair of members votes for different classes.

    **Arguments:**

    - `logits`: `(members, *batch, classes)`.
    - `row_weights`: `(*batch,)`.

    **Returns:**

    A symmetric matrix `(members, members)` with zeros on its diagonal.

    ```python
    logits = jnp.array([[[2.0, 1.0], [0.0, 3.0]], [[2.0, 1.0], [4.0, 3.0]]])
    ee.uncertainty.pairwise_disagreement(logits)  # [[0, 0.5], [0.5, 0]]
    ```

    ??? cite
        [Fort et al. 2019](https://arxiv.org/abs/1912.02757)
    """
    own = jnp.ones(logits.shape[1:-1], logits.dtype) if row_weights is None else row_weights.astype(logits.dtype)
    voted = jnp.reshape(jnp.argmax(logits, axis=-1), (logits.shape[0], -1))
    broken = jnp.reshape(jnp.any(jnp.isnan(logits), axis=-1), voted.shape)
    of_one = lambda row: jnp.sum(jnp.where(voted != row[None], jnp.ravel(own)[None], 0), axis=1)
    shares = jax.lax.map(of_one, voted) / jnp.sum(own)
    unknown = jnp.any(broken, axis=1)
    return jnp.where(unknown[None] | unknown[:, None], jnp.nan, shares)


@array_function
def q_statistic(correct: kinds.Correct, *, row_weights: kinds.RowWeights = None) -> Float[Array, "members members"]:
    r"""Yule's Q statistic of every pair of members: whether they fail on the same rows.

    $Q = \frac{N_{11} N_{00} - N_{10} N_{01}}{N_{11} N_{00} + N_{10} N_{01}}$, where $N_{ab}$ is the number of rows on
    which the first and the second member are right (1) or wrong (0). It is 1 if one is never right without the other, 0
    for independent errors, and negative if members fail on different rows.

    **Arguments:**

    - `correct`: `(members, *batch)`, 1 where the member is right and 0 where it is wrong, of any dtype:
        `scores.per_member(scores.accuracy, logits, labels, reduction="none")`.
    - `row_weights`: `(*batch,)`.

    **Returns:**

    A symmetric matrix `(members, members)`; NaN for zero divided by zero, as for a member that is never wrong.

    ```python
    correct = jnp.array([[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0]])
    ee.uncertainty.q_statistic(correct)  # [[1, 0], [0, 1]]
    ```

    ??? cite
        [Kuncheva and Whitaker 2003](https://doi.org/10.1023/A:1022859003006)
    """
    correct, own = _flat(correct, row_weights)
    right, wrong = correct, 1 - correct
    share = lambda one, other: jnp.matmul(one * own[None], other.T, precision="highest") / jnp.sum(own)
    alike = share(right, right) * share(wrong, wrong)
    unlike = share(right, wrong) * share(wrong, right)
    return (alike - unlike) / (alike + unlike)


@array_function
def error_correlation(
    errors: kinds.Members, *, row_weights: kinds.RowWeights = None
) -> Float[Array, "members members"]:
    r"""Pearson's correlation over rows of the errors of every pair of members.

    The variance of the mean of $M$ errors of equal variance $\sigma^2$ and correlation $\rho$ is $\sigma^2 (1 + (M - 1)
    \rho) / M$: ensembles gain most from uncorrelated errors.

    **Arguments:**

    - `errors`: `(members, *batch)`, such as `predictions - targets[None]`, or `correct` as for
        [`eqx_ensemble.uncertainty.q_statistic`][].
    - `row_weights`: `(*batch,)`.

    **Returns:**

    A symmetric matrix `(members, members)` with ones on its diagonal; NaN for members with constant errors.

    ```python
    errors = jnp.array([[1.0, -1.0, 2.0, 0.0], [2.0, -2.0, 4.0, 0.0]])
    ee.uncertainty.error_correlation(errors)  # all ones
    ```
    """
    errors, own = _flat(errors, row_weights)
    over_rows = lambda x: jnp.sum(x * own[None], axis=1, keepdims=True) / jnp.sum(own)
    counted = own[None] > 0
    deviation = jnp.where(counted, errors - over_rows(errors), 0)
    deviation = jnp.where(counted, deviation - over_rows(deviation), 0)
    lowest = jnp.min(jnp.where(counted, errors, jnp.inf), axis=1, keepdims=True)
    highest = jnp.max(jnp.where(counted, errors, -jnp.inf), axis=1, keepdims=True)
    # Deviations of constant errors are rounding only, which must not count as correlation.
    deviation = jnp.where(lowest == highest, jnp.nan, deviation)
    # Divided by the largest first: squares of very large or small errors would overflow or underflow.
    deviation = jnp.sqrt(own)[None] * (deviation / jnp.max(jnp.abs(deviation), axis=1, keepdims=True))
    scaled = deviation / jnp.sqrt(jnp.sum(deviation**2, axis=1, keepdims=True))
    return jnp.clip(jnp.matmul(scaled, scaled.T, precision="highest"), -1, 1)


def _flat(values: Float[Array, " members *batch"], row_weights: Array | None) -> tuple[Array, Array]:
    """Values `(members, rows)`, and row weights `(rows,)`."""
    own = jnp.ones(values.shape[1:], values.dtype) if row_weights is None else row_weights.astype(values.dtype)
    return jnp.reshape(values, (values.shape[0], -1)), jnp.ravel(own)
