import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Real

from .._check import check_level
from ._check_rows import check_ranking
from ._reduce import mean_of_rows


def auroc(
    scores: Float[ArrayLike, "*batch"],
    positives: Bool[ArrayLike, "*batch"],
    *,
    row_weights: Real[ArrayLike, "*batch"] | None = None,
    mask: Bool[ArrayLike, "*batch"] | None = None,
) -> Float[Array, ""]:
    """Area under the ROC curve: the probability that a positive row has a higher score than a negative one.

    Ties count exactly one half. 0.5 is chance level, 1 a perfect ranking.

    **Arguments:**

    - `scores`: one number per row `(*batch,)`, higher for likely positives, such as a measure of uncertainty.
    - `positives`: booleans `(*batch,)`, such as out-of-distribution rows, or wrongly predicted rows.
    - `row_weights`: finite, non-negative row weights `(*batch,)`; a row of weight 2 counts twice.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.

    **Returns:**

    A scalar. NaN if a row that is not ignored has a NaN score and, while tracing, if there are no positive or no
    negative rows. For several scores, such as one per member, use `jax.vmap`.

    **Raises:**

    - `TypeError` for scores that are not floating-point, and for positives or a mask that are not boolean.
    - `ValueError` for mismatched shapes, invalid row weights, and rows that are all positive or all negative (where
        concrete).

    ```python
    inside, outside = jnp.array([0.1, 0.2, 0.3]), jnp.array([0.2, 0.9])
    scores = jnp.concatenate([inside, outside])
    ee.scores.auroc(scores, jnp.arange(5) >= 3)  # 4.5 of 6 pairs: 0.75
    ```

    ??? cite
        [The Meaning and Use of the Area under a Receiver Operating Characteristic (ROC)
        Curve](https://doi.org/10.1148/radiology.143.1.7063747)

        ```bibtex
        @article{hanley1982meaning,
            author={James A. Hanley and Barbara J. McNeil},
            title={The Meaning and Use of the Area under a Receiver Operating Characteristic ({ROC}) Curve},
            journal={Radiology},
            year={1982},
        }
        ```
    """
    return _auroc(*check_ranking("scores.auroc", scores, positives, row_weights, mask))


def aupr(
    scores: Float[ArrayLike, "*batch"],
    positives: Bool[ArrayLike, "*batch"],
    *,
    row_weights: Real[ArrayLike, "*batch"] | None = None,
    mask: Bool[ArrayLike, "*batch"] | None = None,
) -> Float[Array, ""]:
    r"""Area under the precision-recall curve, as average precision, $\sum_k (R_k - R_{k-1}) P_k$ over thresholds.

    Recall $R_k$ and precision $P_k$ are those of all rows at or above the $k$-th highest distinct score: tied rows are
    one point. There is no interpolation, which would be too optimistic. The chance level is the fraction of positive
    rows: areas for different fractions, or with positive and negative rows swapped, are not comparable.

    **Arguments:**

    - `scores`, `positives`, `row_weights`, `mask`: as for [`eqx_ensemble.scores.auroc`][].

    **Returns:**

    A scalar, as for [`eqx_ensemble.scores.auroc`][].

    **Raises:**

    As [`eqx_ensemble.scores.auroc`][].

    ```python
    scores, positives = jnp.array([0.9, 0.8, 0.7]), jnp.array([True, False, True])
    ee.scores.aupr(scores, positives)  # 1/2 * 1 + 1/2 * 2/3 = 0.833
    ```

    ??? cite
        [The Relationship Between Precision-Recall and ROC Curves](https://doi.org/10.1145/1143844.1143874)

        ```bibtex
        @inproceedings{davis2006relationship,
            author={Jesse Davis and Mark Goadrich},
            title={The Relationship Between Precision-Recall and {ROC} Curves},
            booktitle={International Conference on Machine Learning},
            year={2006},
        }
        ```
    """
    return _aupr(*check_ranking("scores.aupr", scores, positives, row_weights, mask))


def fpr_at_tpr(
    scores: Float[ArrayLike, "*batch"],
    positives: Bool[ArrayLike, "*batch"],
    *,
    level: float = 0.95,
    row_weights: Real[ArrayLike, "*batch"] | None = None,
    mask: Bool[ArrayLike, "*batch"] | None = None,
) -> Float[Array, ""]:
    """False positive rate at the threshold where the true positive rate reaches `level`: by default FPR95.

    The highest such threshold is used; rows at the threshold count as positive, without interpolation.

    **Arguments:**

    - `scores`, `positives`, `row_weights`, `mask`: as for [`eqx_ensemble.scores.auroc`][]. Papers on
        out-of-distribution detection differ in which rows are positive. For positive in-distribution rows pass
        `-scores, ~positives`, with scores that are high out of distribution.
    - `level`: the true positive rate, a Python number between 0 and 1.

    **Returns:**

    A scalar, as for [`eqx_ensemble.scores.auroc`][]; lower is better.

    **Raises:**

    As [`eqx_ensemble.scores.auroc`][], and `ValueError` for a level outside (0, 1).

    ```python
    scores = jnp.array([0.9, 0.8, 0.7, 0.1])
    positives = jnp.array([True, False, True, False])
    ee.scores.fpr_at_tpr(scores, positives)  # 0.5: at the threshold 0.7
    ```
    """
    name = "scores.fpr_at_tpr"
    check_level(name, level)
    return _fpr_at_tpr(*check_ranking(name, scores, positives, row_weights, mask), level)


def rates(
    scores: Float[Array, " rows"], positives: Bool[Array, " rows"], weights: Float[Array, " rows"]
) -> tuple[Float[Array, " rows"], Float[Array, " rows"], Float[Array, " rows"]]:
    """True and false positive rates, and precision, at the score of each row, highest first."""
    ranked, positive, negative = _in_order(scores, positives, weights)
    total = jnp.cumsum(positive), jnp.cumsum(negative)
    # Tied rows have the rates of the last of them.
    last = jnp.searchsorted(ranked, ranked, side="right") - 1
    hits, false = total[0][last], total[1][last]
    broken = jnp.any(jnp.isnan(ranked))
    found = jnp.where(broken, jnp.nan, hits / total[0][-1])
    return found, jnp.where(broken, jnp.nan, false / total[1][-1]), jnp.where(hits == 0, 0, hits / (hits + false))


def _in_order(
    scores: Float[Array, " rows"], positives: Bool[Array, " rows"], weights: Float[Array, " rows"]
) -> tuple[Float[Array, " rows"], Float[Array, " rows"], Float[Array, " rows"]]:
    """The negative scores, and the weights of positive and of negative rows, highest score first."""
    ranked = -jnp.where(weights == 0, -jnp.inf, scores)
    order = jnp.argsort(ranked)
    positive = jnp.where(positives, weights, 0)
    return ranked[order], positive[order], (weights - positive)[order]


@jax.jit
def _auroc(
    scores: Float[Array, " rows"], positives: Bool[Array, " rows"], weights: Float[Array, " rows"]
) -> Float[Array, ""]:
    hits, _, _ = rates(scores, positives, weights)
    ranked, _, negative = _in_order(scores, positives, weights)
    new = jnp.append(True, ranked[1:] != ranked[:-1])
    # The rate above the tied rows of each row. Weights are not differences of rates: as XLA rounds these, millions of
    # rows between which nothing changes would add up.
    above = jax.lax.cummax(jnp.where(new, jnp.append(0, hits[:-1]).astype(hits.dtype), 0))
    return mean_of_rows((hits + above) / 2, negative)


@jax.jit
def _aupr(
    scores: Float[Array, " rows"], positives: Bool[Array, " rows"], weights: Float[Array, " rows"]
) -> Float[Array, ""]:
    hits, _, precision = rates(scores, positives, weights)
    _, positive, _ = _in_order(scores, positives, weights)
    return mean_of_rows(jnp.where(jnp.isnan(hits), jnp.nan, precision), positive)


@jax.jit
def _fpr_at_tpr(
    scores: Float[Array, " rows"],
    positives: Bool[Array, " rows"],
    weights: Float[Array, " rows"],
    level: float | Float[Array, ""],
) -> Float[Array, ""]:
    hits, false, _ = rates(scores, positives, weights)
    rounding = 4 * math.log2(2 * hits.size) * jnp.finfo(hits.dtype).eps
    enough = hits >= level * (1 - rounding)
    return jnp.min(jnp.where(enough | jnp.isnan(hits), false, 1))
