import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Real

from .._check import RowWeightsLike, check_logits, check_row_weights, check_weights
from .._weighting import different_votes, votes
from ._variance import check_rows_of_members


def variation_ratio(
    logits: Float[ArrayLike, "members *batch classes"], *, weights: Real[ArrayLike, " members"] | None = None
) -> Float[Array, "*batch"]:
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
    checked = check_logits(logits, of_votes=True)
    return _variation_ratio(checked, check_weights(weights, checked.shape[0], checked.dtype))


def disagreement(
    logits: Float[ArrayLike, "members *batch classes"], *, weights: Real[ArrayLike, " members"] | None = None
) -> Float[Array, "*batch"]:
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
    checked = check_logits(logits, of_votes=True)
    return _disagreement(checked, check_weights(weights, checked.shape[0], checked.dtype))


@jax.jit
def _variation_ratio(
    logits: Float[Array, "members *batch classes"], weights: Float[Array, " members"] | None
) -> Float[Array, "*batch"]:
    return _rest(votes(logits, weights))


@jax.jit
def _disagreement(
    logits: Float[Array, "members *batch classes"], weights: Float[Array, " members"] | None
) -> Float[Array, "*batch"]:
    return different_votes(votes(logits, weights))


def _rest(shares: Float[Array, "*batch classes"]) -> Float[Array, "*batch"]:
    """The votes that are not for the class with the most votes."""
    # Not 1 - max, which is not exactly zero where all members agree, because weights are rounded.
    return jnp.sum(shares, axis=-1) - jnp.max(shares, axis=-1)


def pairwise_disagreement(
    logits: Float[ArrayLike, "members *batch classes"],
    *,
    row_weights: RowWeightsLike | None = None,
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
    checked = check_logits(logits, of_votes=True)
    rows = check_row_weights(row_weights, checked.shape[1:-1], checked.dtype)
    own = jnp.ones(checked.shape[1:-1], checked.dtype) if rows.weights is None else rows.weights.astype(checked.dtype)
    return _pairwise_disagreement(rows.blank(checked, before=1), own)


def q_statistic(
    correct: Real[ArrayLike, " members *batch"] | Bool[ArrayLike, " members *batch"],
    *,
    row_weights: RowWeightsLike | None = None,
) -> Float[Array, "members members"]:
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
    return _q_statistic(*check_rows_of_members("correct", correct, row_weights, binary=True))


def error_correlation(
    errors: Float[ArrayLike, " members *batch"],
    *,
    row_weights: RowWeightsLike | None = None,
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
    return _error_correlation(*check_rows_of_members("errors", errors, row_weights))


@jax.jit
def _pairwise_disagreement(
    logits: Float[Array, "members *batch classes"], own: Float[Array, "*batch"]
) -> Float[Array, "members members"]:
    voted = jnp.reshape(jnp.argmax(logits, axis=-1), (logits.shape[0], -1))
    broken = jnp.reshape(jnp.any(jnp.isnan(logits), axis=-1), voted.shape)
    of_one = lambda row: jnp.sum(jnp.where(voted != row[None], jnp.ravel(own)[None], 0), axis=1)
    shares = jax.lax.map(of_one, voted) / jnp.sum(own)
    unknown = jnp.any(broken, axis=1)
    return jnp.where(unknown[None] | unknown[:, None], jnp.nan, shares)


@jax.jit
def _q_statistic(correct: Float[Array, "members rows"], own: Float[Array, " rows"]) -> Float[Array, "members members"]:
    right, wrong = correct, 1 - correct
    share = lambda one, other: jnp.matmul(one * own[None], other.T, precision="highest") / jnp.sum(own)
    alike = share(right, right) * share(wrong, wrong)
    unlike = share(right, wrong) * share(wrong, right)
    return (alike - unlike) / (alike + unlike)


@jax.jit
def _error_correlation(
    errors: Float[Array, "members rows"], own: Float[Array, " rows"]
) -> Float[Array, "members members"]:
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
