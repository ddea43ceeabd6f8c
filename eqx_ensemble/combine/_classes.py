import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._boundary import Logits, Votes, WeightsOfRows, array_function
from .._weighting import class_mixture, votes, weighted_mean


@array_function(each_row=True)
def mixture(logits: Logits, *, weights: WeightsOfRows = None) -> Float[Array, "*batch classes"]:
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
def mean_logits(logits: Logits, *, weights: WeightsOfRows = None) -> Float[Array, "*batch classes"]:
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
def vote(logits: Votes, *, weights: WeightsOfRows = None) -> Float[Array, "*batch classes"]:
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
