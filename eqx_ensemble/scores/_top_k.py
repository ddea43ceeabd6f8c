from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Integer, Real

from .._weighting import at_label, class_mixture
from ._check import check_top_k
from ._classification import check_classes
from ._reduce import Reduction, RowWeights, reduce


def top_k_accuracy(
    logits: Float[ArrayLike, "members *batch classes"],
    labels: Integer[ArrayLike, "*batch"],
    *,
    k: int,
    weights: Real[ArrayLike, " members *rows"] | None = None,
    row_weights: Real[ArrayLike, "*batch"] | None = None,
    mask: Bool[ArrayLike, "*batch"] | None = None,
    reduction: Reduction = "mean",
) -> Float[Array, "..."]:
    """Fraction of rows whose label is among the `k` most likely classes of the mixture; higher is better.

    **Arguments:**

    - `logits`: logits or log-probabilities, `(members, *batch, classes)`.
    - `labels`: integers `(*batch,)` from 0 to classes - 1.
    - `k`: the number of classes, an integer from 1 to classes. With 1 it is [`eqx_ensemble.scores.accuracy`][].
    - `weights`: convex weights over members, `(members,)`, or per row, `(members, *rows)`; divided by their sum.
        Members of weight zero are ignored.
    - `row_weights`: finite, non-negative row weights `(*batch,)`; only their ratios matter. A row of weight 2 counts
        twice; a row of weight zero is ignored, even if it contains NaN.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.
    - `reduction`: `"mean"` over all rows, or `"none"` for 1.0 (right) or 0.0 (wrong) per row, NaN for ignored rows.

    **Returns:**

    A scalar, or `(*batch,)`. Ties are resolved in favour of the lowest class. A NaN prediction gives NaN, not 0, as
    does a label out of range while tracing.

    **Raises:**

    As [`eqx_ensemble.scores.nll`][], and `ValueError` for a `k` outside 1 to classes.

    ```python
    logits = jnp.log(jnp.array([[[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]]))
    ee.scores.top_k_accuracy(logits, jnp.array([1, 2]), k=2)  # 0.5
    ```
    """
    name = "scores.top_k_accuracy"
    checked = check_classes(name, logits, labels, weights, row_weights, mask, reduction)
    return _top_k_accuracy(*checked, check_top_k(name, k, checked[0].shape[-1]), reduction)


@partial(jax.jit, static_argnames=("k", "reduction"))
def _top_k_accuracy(
    logits: Float[Array, "members *batch classes"],
    labels: Integer[Array, "*batch"],
    weights: Float[Array, "members ..."] | None,
    row_weights: RowWeights | None,
    k: int,
    reduction: Reduction,
) -> Float[Array, "..."]:
    logs = class_mixture(logits, weights)
    own = at_label(logs, labels)[..., None]
    classes = jnp.arange(logs.shape[-1], dtype=labels.dtype)
    lower = jnp.reshape(classes, (1,) * labels.ndim + (-1,)) < labels[..., None]
    ahead = jnp.sum((logs > own) | ((logs == own) & lower), axis=-1)
    unknown = jnp.any(jnp.isnan(logs), axis=-1) | jnp.isnan(own[..., 0])
    return reduce(jnp.where(unknown, jnp.nan, (ahead < k).astype(logs.dtype)), reduction, row_weights)
