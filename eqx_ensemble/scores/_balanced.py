import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Integer, Real

from .._weighting import class_mixture, is_class
from ._classification import check_classes, correct
from ._reduce import RowWeights, sum_by_segment, weigh


def balanced_accuracy(
    logits: Float[ArrayLike, "members *batch classes"],
    labels: Integer[ArrayLike, "*batch"],
    *,
    weights: Real[ArrayLike, " members *rows"] | None = None,
    row_weights: Real[ArrayLike, "*batch"] | None = None,
    mask: Bool[ArrayLike, "*batch"] | None = None,
) -> Float[Array, ""]:
    """Balanced accuracy of the mixture of the members: the mean recall over classes; higher is better.

    Every class has the same weight, however rare: always predicting one of K classes gives 1 / K. Classes without rows
    are ignored. It is [`eqx_ensemble.scores.accuracy`][] with `row_weights` inverse to the frequencies of classes.

    **Arguments:**

    - `logits`: logits or log-probabilities, `(members, *batch, classes)`.
    - `labels`: integers `(*batch,)` from 0 to classes - 1.
    - `weights`: convex weights over members, `(members,)`, or per row, `(members, *rows)`; divided by their sum.
        Members of weight zero are ignored.
    - `row_weights`: finite, non-negative row weights `(*batch,)`; only their ratios matter. A row of weight 2 counts
        twice; a row of weight zero is ignored, even if it contains NaN.
    - `mask`: booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.

    **Returns:**

    A scalar. NaN if a prediction is NaN or, while tracing, a label is out of range.

    **Raises:**

    As [`eqx_ensemble.scores.nll`][].

    ```python
    logits = jnp.zeros((1, 4, 2)).at[..., 0].set(1.0)  # always the first class
    labels = jnp.array([0, 0, 0, 1])
    # 0.75, 0.5
    ee.scores.accuracy(logits, labels), ee.scores.balanced_accuracy(logits, labels)
    ```

    ??? cite
        [The Balanced Accuracy and Its Posterior Distribution](https://doi.org/10.1109/ICPR.2010.764)

        ```bibtex
        @inproceedings{brodersen2010balanced,
            author={Kay H. Brodersen and Cheng Soon Ong and Klaas E. Stephan and Joachim M. Buhmann},
            title={The Balanced Accuracy and Its Posterior Distribution},
            booktitle={International Conference on Pattern Recognition},
            year={2010},
        }
        ```
    """
    name = "scores.balanced_accuracy"
    return _balanced_accuracy(*check_classes(name, logits, labels, weights, row_weights, mask, "mean"))


@jax.jit
def _balanced_accuracy(
    logits: Float[Array, "members *batch classes"],
    labels: Integer[Array, "*batch"],
    weights: Float[Array, "members ..."] | None,
    row_weights: RowWeights | None,
) -> Float[Array, ""]:
    right = correct(class_mixture(logits, weights), labels)
    num_classes = logits.shape[-1]
    # For an invalid label `right` is NaN; the row is added to the first class.
    own = jnp.ravel(jnp.where(is_class(labels, num_classes), labels, 0))
    sums = lambda x: sum_by_segment(jnp.ravel(weigh(x, row_weights)), own, num_classes)
    hits, total = sums(right), sums(jnp.ones_like(right))
    present = total > 0
    recall = hits / jnp.where(present, total, 1)
    return jnp.sum(recall) / jnp.sum(present).astype(recall.dtype)
