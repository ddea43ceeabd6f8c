from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Integer, Real

from .._check import check_labels, check_logits, check_num_bins, check_reduction, check_weights
from .._weighting import blank_unweighted, log_mixture


def ece(
    logits: Float[ArrayLike, "members *batch classes"],
    labels: Integer[ArrayLike, "*batch"],
    *,
    num_bins: int = 15,
    weights: Real[ArrayLike, " members"] | None = None,
) -> Float[Array, ""]:
    r"""Expected calibration error of the mixture of the members, from 0 to 1; lower is better.

    The rows are put into bins of equal width, $(k / K, (k + 1) / K]$, by their confidence, the largest probability of
    the mixture; then $\sum_k \frac{n_k}{n} |\mathrm{accuracy}_k - \mathrm{confidence}_k|$. The estimate is of the top
    label only (the l1 norm of torchmetrics' multi-class calibration error), depends on the bins, and is biased upwards
    when bins hold few rows.

    **Arguments:**

    - `logits`: `(members, *batch, classes)`; log-probabilities may be passed as they are. Rows of all batch axes count.
    - `labels`: integers `(*batch,)` from 0 to classes - 1.
    - `num_bins`: the number of bins $K$.
    - `weights`: convex weights over members, `(members,)`; divided by their sum. A member of weight zero is left out.

    **Returns:**

    A scalar. NaN if any row of the mixture is.

    **Raises:**

    As [`eqx_ensemble.scores.nll`][], and `ValueError` for fewer than one bin.

    ```python
    import jax.numpy as jnp
    from eqx_ensemble import scores

    logits = jnp.log(jnp.array([[[0.8, 0.2], [0.8, 0.2]]]))  # one member that is 80 % sure, twice
    scores.ece(logits, jnp.array([0, 1]))  # |0.5 - 0.8| = 0.3
    ```

    ??? cite
        [On Calibration of Modern Neural Networks](https://arxiv.org/abs/1706.04599)

        ```bibtex
        @inproceedings{guo2017calibration,
            author={Chuan Guo and Geoff Pleiss and Yu Sun and Kilian Q. Weinberger},
            title={On Calibration of Modern Neural Networks},
            booktitle={International Conference on Machine Learning},
            year={2017},
        }
        ```
    """
    fn = "scores.ece"
    checked = check_logits(fn, logits)
    targets = check_labels(fn, labels, checked)
    convex = check_weights(fn, weights, checked.shape[0], checked.dtype)
    check_num_bins(fn, num_bins)
    check_reduction(fn, "mean", targets.shape)
    return _ece(checked, targets, convex, num_bins)


@partial(jax.jit, static_argnames="num_bins")
def _ece(
    logits: Float[Array, "members *batch classes"],
    labels: Integer[Array, "*batch"],
    weights: Float[Array, " members"] | None,
    num_bins: int,
) -> Float[Array, ""]:
    logs = log_mixture(jax.nn.log_softmax(blank_unweighted(logits, weights), axis=-1), weights)
    confidence = jnp.ravel(jnp.exp(jnp.max(logs, axis=-1)))
    right = jnp.ravel(jnp.argmax(logs, axis=-1).astype(labels.dtype) == labels).astype(confidence.dtype)
    # Inner edges only: a confidence that rounding puts above one stays in the last bin.
    edges = jnp.asarray(np.linspace(0, 1, num_bins + 1)[1:-1], confidence.dtype)
    bins = jnp.searchsorted(edges, confidence, side="left")
    gaps = jax.ops.segment_sum(right - confidence, bins, num_segments=num_bins)
    return jnp.sum(jnp.abs(gaps)) / confidence.size
