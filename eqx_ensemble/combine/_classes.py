import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Real

from .._check import check_logits, check_weights
from .._combination import by_rows
from .._weighting import blank_unweighted, class_mixture, votes, weighted_mean


def mixture(
    logits: Float[ArrayLike, "members *batch classes"], *, weights: Real[ArrayLike, " members *rows"] | None = None
) -> Float[Array, "*batch classes"]:
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
    checked = check_logits(logits)
    convex = check_weights(weights, checked.shape[0], checked.dtype, shape=checked.shape[1:-1])
    return _mixture(checked, convex)


def mean_logits(
    logits: Float[ArrayLike, "members *batch classes"], *, weights: Real[ArrayLike, " members *rows"] | None = None
) -> Float[Array, "*batch classes"]:
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
    checked = check_logits(logits)
    convex = check_weights(weights, checked.shape[0], checked.dtype, shape=checked.shape[1:-1])
    return by_rows(_mean_logits, checked, (), convex, event_ndim=1)


def vote(
    logits: Float[ArrayLike, "members *batch classes"], *, weights: Real[ArrayLike, " members *rows"] | None = None
) -> Float[Array, "*batch classes"]:
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
    checked = check_logits(logits, of_votes=True)
    convex = check_weights(weights, checked.shape[0], checked.dtype, shape=checked.shape[1:-1])
    return _vote(checked, convex)


def _mean_logits(
    logits: Float[Array, "members *batch classes"], _: tuple, weights: Float[Array, "members ..."] | None
) -> Float[Array, "*batch classes"]:
    logits = blank_unweighted(logits, weights)
    # Relative to the largest logit; the remaining normalisation of each member cancels in the last `log_softmax`.
    relative = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    # Infinities are removed and restored: the weights would otherwise have NaN gradients.
    absent = relative == -jnp.inf
    pooled = weighted_mean(jnp.where(absent, 0, relative), weights)
    return jax.nn.log_softmax(jnp.where(jnp.any(absent, axis=0), -jnp.inf, pooled), axis=-1)


_mixture, _vote = jax.jit(class_mixture), jax.jit(votes)
