import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Real

from .._check import check_logits, check_weights
from .._combination import Summary, check_one_logits, stream
from .._weighting import different_votes, known_mean, votes


def variation_ratio(
    logits: Float[ArrayLike, "members *batch classes"],
    *,
    weights: Real[ArrayLike, " members"] | None = None,
) -> Float[Array, "*batch"]:
    """The fraction of the members' votes that are not for the class with the most votes.

    From 0, if all members agree, to 1 - 1 / `classes`. Each member votes for its most likely class; ties go to the
    lowest class.

    **Arguments:**

    - `logits`: `(members, *batch, classes)`; log-probabilities or probabilities give the same votes.
    - `weights`: the members' voting weights, `(members,)`; divided by their sum. Members of weight zero are ignored.

    **Returns:**

    Fractions `(*batch,)`; NaN where a member of nonzero weight is NaN. Their gradient is zero.

    **Raises:**

    - `TypeError` for logits that are not floating-point.
    - `ValueError` for logits without a `members` axis or with fewer than two classes, and for invalid weights.

    ```python
    logits = jnp.array([[2.0, 1.0], [0.0, 3.0], [5.0, 4.0]])  # three members, one row
    ee.uncertainty.variation_ratio(logits)  # 1/3
    ```
    """
    name = "uncertainty.variation_ratio"
    checked = check_logits(name, logits, of_votes=True)
    return _variation_ratio(checked, check_weights(name, weights, checked.shape[0], checked.dtype))


def disagreement(
    logits: Float[ArrayLike, "members *batch classes"],
    *,
    weights: Real[ArrayLike, " members"] | None = None,
) -> Float[Array, "*batch"]:
    r"""The probability that two members, drawn with probabilities equal to their weights, vote for different classes.

    $1 - \sum_c v_c^2$ with $v_c$ the fraction of votes for class $c$. Pairs of a member with itself are included and
    agree: for equal weights, the fraction of disagreeing pairs of different members is
    `num_members / (num_members - 1)` times this. For each pair of members over all rows see
    [`eqx_ensemble.uncertainty.pairwise_disagreement`][].

    **Arguments:**

    - `logits`: `(members, *batch, classes)`; log-probabilities or probabilities give the same votes.
    - `weights`: the members' voting weights, `(members,)`; divided by their sum. Members of weight zero are ignored.

    **Returns:**

    Probabilities `(*batch,)`; NaN where a member of nonzero weight is NaN. Their gradient is zero.

    **Raises:**

    As [`eqx_ensemble.uncertainty.variation_ratio`][].

    ```python
    logits = jnp.array([[2.0, 1.0], [0.0, 3.0], [5.0, 4.0]])  # three members, one row
    ee.uncertainty.disagreement(logits)  # 4/9, or 2/3 of the pairs of different members
    ```
    """
    name = "uncertainty.disagreement"
    checked = check_logits(name, logits, of_votes=True)
    return _disagreement(checked, check_weights(name, weights, checked.shape[0], checked.dtype))


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


for _fn, _result in ((variation_ratio, _rest), (disagreement, different_votes)):
    _name = f"uncertainty.{_fn.__name__}"
    stream(_fn, Summary(_name, check_one_logits, votes, known_mean, _result, event_ndim=1))
