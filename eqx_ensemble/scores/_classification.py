from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from .._boundary import array_function, kinds, weigh
from .._check import value_error
from .._keys import root
from .._weighting import at_label, class_mixture, is_class, log_mixture, weighted_mean
from ._groups import sum_by_segment


@array_function
def nll(
    logits: kinds.Logits,
    labels: kinds.Labels,
    *,
    weights: kinds.WeightsOfRows = None,
    row_weights: kinds.RowWeights = None,
    reduction: kinds.Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Negative log-likelihood, in nats, of the labels under the mixture of the members.

    $-\log \sum_m w_m \, p_m(y)$ for each row.

    **Arguments:**

    - `logits`: logits or log-probabilities, `(members, *batch, classes)`. For probabilities `p` pass `jnp.log(p)`.
    - `labels`: integers `(*batch,)` from 0 to classes - 1.
    - `weights`: convex weights over members, `(members,)` or `(members, *rows)`.
    - `row_weights`, `reduction`: as for every score.

    **Returns:**

    A scalar, or `(*batch,)`. Infinite where all members give the label probability zero.

    ```python
    # two members, one row
    logits = jnp.log(jnp.array([[[0.9, 0.1]], [[0.3, 0.7]]]))
    ee.scores.nll(logits, jnp.array([0]))  # -log(0.6) = 0.511
    ```
    """
    logs = jax.nn.log_softmax(logits, axis=-1)
    known = is_class(labels, logits.shape[-1])
    index = jnp.where(known, labels, 0)[None, ..., None]
    chosen = jnp.take_along_axis(logs, index, axis=-1)[..., 0]
    return jnp.where(known, -log_mixture(chosen, weights), jnp.nan)


@array_function
def accuracy(
    logits: kinds.Logits,
    labels: kinds.Labels,
    *,
    weights: kinds.WeightsOfRows = None,
    row_weights: kinds.RowWeights = None,
    reduction: kinds.Reduction = "mean",
) -> Float[Array, "..."]:
    """Fraction of rows whose most likely class under the mixture is the label.

    **Arguments:**

    As [`eqx_ensemble.scores.nll`][].

    **Returns:**

    A scalar, or `(*batch,)`, 1.0 where right. Ties go to the lowest class.

    ```python
    logits = jnp.log(jnp.array([[[0.9, 0.1]], [[0.3, 0.7]]]))
    ee.scores.accuracy(logits, jnp.array([0]))  # 1.0
    ee.scores.mean_member_accuracy(logits, jnp.array([0]))  # 0.5
    ```
    """
    return correct(class_mixture(logits, weights), labels)


@array_function
def mean_member_accuracy(
    logits: kinds.Votes,
    labels: kinds.Labels,
    *,
    weights: kinds.WeightsOfRows = None,
    row_weights: kinds.RowWeights = None,
    reduction: kinds.Reduction = "mean",
) -> Float[Array, "..."]:
    """Mean accuracy of the members: [`eqx_ensemble.scores.accuracy`][] minus this is the gain from combining them.

    **Arguments:**

    As [`eqx_ensemble.scores.nll`][]; `logits` may also be probabilities.

    **Returns:**

    A scalar, or `(*batch,)`, the fraction of members that are right.

    ```python
    logits = jnp.array([[[2.0, 1.0]], [[0.0, 1.0]]])
    ee.scores.mean_member_accuracy(logits, jnp.array([0]))  # 0.5
    ```
    """
    right = correct(logits, labels[None])
    return weighted_mean(right, weights)


def correct(logits: Float[Array, "*rows classes"], labels: Integer[Array, "*labels"]) -> Float[Array, "*rows"]:
    """1.0 where the label is the most likely class, else 0.0; NaN for NaN predictions and invalid labels."""
    right = (jnp.argmax(logits, axis=-1).astype(labels.dtype) == labels).astype(logits.dtype)
    # argmax returns the index of a NaN: without this a NaN prediction could count as right.
    unknown = jnp.any(jnp.isnan(logits), axis=-1) | ~is_class(labels, logits.shape[-1])
    return jnp.where(unknown, jnp.nan, right)


@array_function
def balanced_accuracy(
    logits: kinds.Logits,
    labels: kinds.Labels,
    *,
    weights: kinds.WeightsOfRows = None,
    row_weights: kinds.RowWeights = None,
) -> Float[Array, ""]:
    """Mean recall over classes of the mixture of the members.

    Every class has the same weight: always predicting one of K classes gives 1 / K. Classes without rows are ignored.

    **Arguments:**

    As [`eqx_ensemble.scores.nll`][].

    **Returns:**

    A scalar.

    ```python
    logits = jnp.zeros((1, 4, 2)).at[..., 0].set(1.0)  # always the first class
    labels = jnp.array([0, 0, 0, 1])
    # 0.75, 0.5
    ee.scores.accuracy(logits, labels), ee.scores.balanced_accuracy(logits, labels)
    ```

    ??? cite
        [Brodersen et al., ICPR 2010](https://doi.org/10.1109/ICPR.2010.764)
    """
    right = correct(class_mixture(logits, weights), labels)
    num_classes = logits.shape[-1]
    # For an invalid label `right` is NaN; the row is added to the first class.
    own = jnp.ravel(jnp.where(is_class(labels, num_classes), labels, 0))
    sums = lambda x: sum_by_segment(jnp.ravel(weigh(x, row_weights)), own, num_classes)
    hits, total = sums(right), sums(jnp.ones_like(right))
    present = total > 0
    recall = hits / jnp.where(present, total, 1)
    return jnp.sum(recall) / jnp.sum(present).astype(recall.dtype)


@array_function
def top_k_accuracy(
    logits: kinds.Logits,
    labels: kinds.Labels,
    *,
    k: int,
    weights: kinds.WeightsOfRows = None,
    row_weights: kinds.RowWeights = None,
    reduction: kinds.Reduction = "mean",
) -> Float[Array, "..."]:
    """Fraction of rows whose label is among the `k` most likely classes of the mixture.

    **Arguments:**

    - `k`: the number of classes, from 1 to classes.
    - the others: as for [`eqx_ensemble.scores.nll`][].

    **Returns:**

    As [`eqx_ensemble.scores.accuracy`][].

    ```python
    logits = jnp.log(jnp.array([[[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]]))
    ee.scores.top_k_accuracy(logits, jnp.array([1, 2]), k=2)  # 0.5
    ```
    """
    num_classes = logits.shape[-1]
    if k > num_classes:
        needs = f"`k` of at most {num_classes}, the number of classes"
        raise value_error(needs, f"got {k}", "With `k` equal to it, every row counts as correct.")
    logs = class_mixture(logits, weights)
    own = at_label(logs, labels)[..., None]
    classes = jnp.arange(logs.shape[-1], dtype=labels.dtype)
    lower = jnp.reshape(classes, (1,) * labels.ndim + (-1,)) < labels[..., None]
    ahead = jnp.sum((logs > own) | ((logs == own) & lower), axis=-1)
    unknown = jnp.any(jnp.isnan(logs), axis=-1) | jnp.isnan(own[..., 0])
    return jnp.where(unknown, jnp.nan, (ahead < k).astype(logs.dtype))


@array_function(reduces=False)
def joint_nll(
    log_scores: kinds.Members,
    *,
    size: int = 10,
    num_anchors: int = 2,
    num_sets: int = 1000,
    weights: kinds.Weights = None,
    row_weights: kinds.RowWeights = None,
    reduction: kinds.Reduction = "mean",
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
