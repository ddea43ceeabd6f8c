from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Key, Real

from .. import _keys
from .._check import RowWeightsLike, check_positive_int, check_row_weights, check_values, check_weights, value_error
from .._weighting import blank_unweighted, log_mixture
from ._reduce import Reduction, RowWeights


def joint_nll(
    log_scores: Float[ArrayLike, " members *batch"],
    *,
    size: int = 10,
    num_anchors: int = 2,
    num_sets: int = 1000,
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: RowWeightsLike | None = None,
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
    logs = check_values("log_scores", log_scores)
    rows = check_row_weights(row_weights, logs.shape[1:], logs.dtype, reduction=reduction)
    if logs[0].size == 0:
        raise value_error("at least one row in `log_scores`", f"got shape {logs.shape}", "Was every row filtered out?")
    size, num_anchors = check_positive_int(size, "size"), check_positive_int(num_anchors, "num_anchors")
    num_sets = check_positive_int(num_sets, "num_sets")
    convex = check_weights(weights, logs.shape[0], logs.dtype)
    logs = jnp.reshape(rows.blank(logs, before=1), (logs.shape[0], -1))
    return _joint(logs, convex, rows.weights, _keys.root(key), size, num_anchors, num_sets, reduction)


@partial(jax.jit, static_argnames=("size", "num_anchors", "num_sets", "reduction"))
def _joint(
    logs: Float[Array, "members rows"],
    weights: Float[Array, " members"] | None,
    row_weights: RowWeights | None,
    key: Key[Array, ""],
    size: int,
    num_anchors: int,
    num_sets: int,
    reduction: Reduction,
) -> Float[Array, "..."]:
    first, second = jax.random.split(key)
    own = None if row_weights is None else jnp.ravel(row_weights).astype(logs.dtype)
    anchors = jax.random.choice(
        first, logs.shape[1], (num_sets, num_anchors), p=None if own is None else own / own.sum()
    )
    drawn = jnp.take_along_axis(anchors, jax.random.randint(second, (num_sets, size), 0, num_anchors), axis=1)
    each = jnp.sum(blank_unweighted(logs, weights)[:, drawn], axis=-1)
    joint = -log_mixture(each, weights)
    return jnp.mean(joint) if reduction == "mean" else joint
