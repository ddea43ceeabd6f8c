from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Integer, Real

from .._weighting import class_mixture, is_class
from ._classification import check_classes
from ._reduce import Reduction, RowWeights, reduce


def ranked_probability(
    logits: Float[ArrayLike, "members *batch classes"],
    labels: Integer[ArrayLike, "*batch"],
    *,
    weights: Real[ArrayLike, " members *rows"] | None = None,
    row_weights: Real[ArrayLike, "*batch"] | None = None,
    mask: Bool[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    r"""Ranked probability score of the mixture of the members, for ordered classes; lower is better.

    $\sum_k (P_k - [y \le k])^2$ with the mixture's cumulative probability $P_k$ of classes up to $k$: probability far
    from the label is penalised more than on a neighbouring class. From 0 to classes - 1; not normalised.

    **Arguments:**

    - `logits`: logits or log-probabilities, `(members, *batch, classes)`, with ordered classes.
    - `labels`: integers `(*batch,)` from 0 to classes - 1.
    - `weights`: convex weights over members, `(members,)`, or per row, `(members, *rows)`; divided by their sum.
        Members of weight zero are ignored.
    - `row_weights`: finite, non-negative row weights `(*batch,)`; only their ratios matter. A row of weight 2 counts
        twice; a row of weight zero is ignored, even if it contains NaN.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.
    - `reduction`: `"mean"` over all rows, or `"none"` for one value per row, NaN for ignored rows.

    **Returns:**

    A scalar, or `(*batch,)`. While tracing, a label out of range makes its row NaN.

    **Raises:**

    As [`eqx_ensemble.scores.nll`][].

    ```python
    logits = jnp.log(jnp.array([[[0.5, 0.3, 0.2]]]))
    ee.scores.ranked_probability(logits, jnp.array([0]))  # 0.5**2 + 0.2**2 = 0.29
    ee.scores.ranked_probability(logits, jnp.array([2]))  # 0.5**2 + 0.8**2 = 0.89
    ```

    ??? cite
        [A Scoring System for Probability Forecasts of Ranked
        Categories](https://doi.org/10.1175/1520-0450(1969)008%3C0985:ASSFPF%3E2.0.CO;2)

        ```bibtex
        @article{epstein1969scoring,
            author={Edward S. Epstein},
            title={A Scoring System for Probability Forecasts of Ranked Categories},
            journal={Journal of Applied Meteorology},
            year={1969},
        }
        ```
    """
    checked = check_classes("scores.ranked_probability", logits, labels, weights, row_weights, mask, reduction)
    return _ranked_probability(*checked, reduction)


# The scoringrules version needs concrete probabilities: it can be neither traced nor differentiated.
@partial(jax.jit, static_argnames="reduction")
def _ranked_probability(
    logits: Float[Array, "members *batch classes"],
    labels: Integer[Array, "*batch"],
    weights: Float[Array, "members ..."] | None,
    row_weights: RowWeights | None,
    reduction: Reduction,
) -> Float[Array, "..."]:
    at_most = jnp.cumsum(jnp.exp(class_mixture(logits, weights)), axis=-1)[..., :-1]
    classes = jnp.arange(logits.shape[-1] - 1, dtype=labels.dtype)
    reached = labels[..., None] <= jnp.reshape(classes, (1,) * labels.ndim + (-1,))
    score = jnp.sum((at_most - reached.astype(at_most.dtype)) ** 2, axis=-1)
    return reduce(jnp.where(is_class(labels, logits.shape[-1]), score, jnp.nan), reduction, row_weights)
