from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._boundary import Members, Reduction, RowWeights, Weights, array_function
from .._keys import root
from .._weighting import log_mixture


@array_function(reduces=False)
def joint_nll(
    log_scores: Members,
    *,
    size: int = 10,
    num_anchors: int = 2,
    num_sets: int = 1000,
    weights: Weights = None,
    row_weights: RowWeights = None,
    reduction: Reduction = "mean",
    key: Any,
) -> Float[Array, "..."]:
    r"""Negative log-likelihood, in nats, of the labels of several rows together under the mixture of the members.

    $-\log \sum_m w_m \prod_{i=1}^\tau p_m(y_i \mid x_i)$ for sets of $\tau$ rows. It separates members that disagree
    from members that agree and are uncertain, which have the same score of single rows. Dyadic sampling makes this
    visible: two rows are drawn for each set, and the $\tau$ rows of the set from these two.

    **Arguments:**

    - `log_scores`: the log-likelihood of every row under each member, `(members, *batch)`, by
        [`eqx_ensemble.scores.per_member`][], as in the example.
    - `size`: $\tau$, the number of rows of a set.
    - `num_anchors`: the number of rows, drawn with replacement, from which the rows of a set are drawn.
    - `num_sets`: the number of sets.
    - `weights`: convex weights over members, `(members,)`.
    - `row_weights`: as for every score; rows are drawn in proportion to them.
    - `reduction`: `"mean"`, or `"none"` for one value per set.
    - `key`: one threefry key. The same key draws the same sets, to compare ensembles.

    **Returns:**

    A scalar, or `(sets,)`; per set, not per row.

    ```python
    logits, labels = jax.random.normal(key, (8, 100, 3)), jnp.zeros(100, int)
    log_scores = -ee.scores.per_member(ee.scores.nll, logits, labels, reduction="none")
    ee.scores.joint_nll(log_scores, key=key)
    ```

    ??? cite
        [Osband et al. 2022](https://arxiv.org/abs/2110.04629), [Osband et al., UAI 2022](https://arxiv.org/abs/2202.13509)
    """
    logs = jnp.reshape(log_scores, (log_scores.shape[0], -1))
    first, second = jax.random.split(root(key))
    own = None if row_weights is None else jnp.ravel(row_weights).astype(logs.dtype)
    share = None if own is None else own / own.sum()
    anchors = jax.random.choice(first, logs.shape[1], (num_sets, num_anchors), p=share)
    drawn = jnp.take_along_axis(anchors, jax.random.randint(second, (num_sets, size), 0, num_anchors), axis=1)
    joint = -log_mixture(jnp.sum(logs[:, drawn], axis=-1), weights)
    return jnp.mean(joint) if reduction == "mean" else joint
