import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._boundary import Correct, Members, RowWeights, Votes, Weights, array_function
from .._weighting import different_votes, votes


@array_function(each_row=True)
def variation_ratio(logits: Votes, *, weights: Weights = None) -> Float[Array, "*batch"]:
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
def disagreement(logits: Votes, *, weights: Weights = None) -> Float[Array, "*batch"]:
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
def pairwise_disagreement(logits: Votes, *, row_weights: RowWeights = None) -> Float[Array, "members members"]:
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
def q_statistic(correct: Correct, *, row_weights: RowWeights = None) -> Float[Array, "members members"]:
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
def error_correlation(errors: Members, *, row_weights: RowWeights = None) -> Float[Array, "members members"]:
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
