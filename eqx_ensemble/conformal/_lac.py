import equinox as eqx
from jaxtyping import Array, ArrayLike, Bool, Float, Integer

from .._check import check_logits, promote
from ._classes import lac_scores, score_labels, top_k_scores
from ._quantile import fraction, rank_of, value_at_rank_jit


class TopK(eqx.Module):
    """Fitted prediction sets of the most likely classes: call it on logits.

    **Attributes:**

    - `k`: the number of classes in each set; infinite, for all classes, if there were too few held-out rows.
    """

    k: Float[Array, ""]

    def __call__(self, logits: Float[ArrayLike, "*batch classes"]) -> Bool[Array, "*batch classes"]:
        """The set of each row as booleans; all classes where the logits are NaN."""
        scores, k = promote(top_k_scores(check_logits("conformal.TopK", logits, members=False)), self.k)
        return ~(scores > k)


def top_k(
    logits: Float[ArrayLike, "rows classes"],
    labels: Integer[ArrayLike, " rows"],
    *,
    level: float,
    mask: Bool[ArrayLike, " rows"] | None = None,
) -> TopK:
    r"""Prediction sets of a fixed size: the `k` most likely classes, with the smallest `k` that reaches the coverage.

    The score of a class is the number of classes that are at least as likely, and `k` is
    [`eqx_ensemble.conformal.quantile`][] of the labels' scores on held-out rows. The size does not depend on the
    confidence of a prediction. Scores are integers, so the coverage usually exceeds `level`. Classes that tie across
    rank `k` are all excluded, consistently with the fit.

    **Arguments:**

    - `logits`: combined logits or log-probabilities for held-out rows, `(rows, classes)`. No `members` axis.
    - `labels`: integers `(rows,)` from 0 to classes - 1.
    - `level`: the coverage, a Python number between 0 and 1.
    - `mask`: booleans `(rows,)`; rows where it is `False` are ignored, even if they contain NaN.

    **Returns:**

    [`eqx_ensemble.conformal.TopK`][]: `fitted(logits)` returns booleans `(*batch, classes)`.

    **Raises:**

    As [`eqx_ensemble.conformal.aps`][].

    ```python
    logits = jnp.log(jnp.array([[0.6, 0.3, 0.1]] * 9))
    fitted = ee.conformal.top_k(
        logits, jnp.array([0, 0, 0, 0, 0, 1, 1, 1, 2]), level=0.8
    )
    fitted.k, fitted(logits[:1])  # 2, [[True, True, False]]
    ```

    ??? cite
        [Uncertainty Sets for Image Classifiers using Conformal Prediction](https://arxiv.org/abs/2009.14193), where it
        is the baseline of sets of a fixed size.
    """
    name = "conformal.top_k"
    scores, _, kept = score_labels(name, "top_k", logits, labels, level, mask)
    return TopK(value_at_rank_jit(scores, kept, rank_of(name, fraction(level), scores.size, kept)))


class Lac(eqx.Module):
    """Fitted least ambiguous prediction sets: call it on logits.

    **Attributes:**

    - `threshold`: a class is in the set if minus the log-odds of its probability, `log((1 - p) / p)`, is at most this;
        infinite, for sets of all classes, if there were too few held-out rows.
    """

    threshold: Float[Array, ""]

    def __call__(self, logits: Float[ArrayLike, "*batch classes"]) -> Bool[Array, "*batch classes"]:
        """The set of each row as booleans, which may be empty; all classes where the logits are NaN."""
        scores, threshold = promote(lac_scores(check_logits("conformal.Lac", logits, members=False)), self.threshold)
        return ~(scores > threshold)


def lac(
    logits: Float[ArrayLike, "rows classes"],
    labels: Integer[ArrayLike, " rows"],
    *,
    level: float,
    mask: Bool[ArrayLike, " rows"] | None = None,
) -> Lac:
    r"""Least ambiguous prediction sets: all classes whose probability reaches a threshold; the smallest on average.

    The score of a class is $1 - p$. The set contains the classes whose score is at most
    [`eqx_ensemble.conformal.quantile`][] of the labels' scores on held-out rows, and covers a new label with
    probability `level` or more. Scores are compared as log-odds, which are accurate even where probabilities round to
    zero or one.

    Sets may be empty: coverage is an average over rows, and if the model is more accurate than `level`, the rows with
    the least confident predictions get empty sets. A model that is always right has 30 % empty sets at level 0.7. To
    avoid empty sets, add the most likely class, which can only increase coverage; those of
    [`eqx_ensemble.conformal.aps`][] are rarely empty.

    **Arguments:**

    - `logits`: combined logits or log-probabilities for held-out rows, `(rows, classes)`, such as the result of
        [`eqx_ensemble.combine.mixture`][]. No `members` axis.
    - `labels`: integers `(rows,)` from 0 to classes - 1.
    - `level`: the coverage, a Python number between 0 and 1.
    - `mask`: booleans `(rows,)`; rows where it is `False` are ignored, even if they contain NaN.

    **Returns:**

    [`eqx_ensemble.conformal.Lac`][]: `fitted(logits)` returns booleans `(*batch, classes)`.

    **Raises:**

    As [`eqx_ensemble.conformal.aps`][].

    ```python
    logits = jnp.log(jnp.array([[0.6, 0.3, 0.1]] * 9))
    fitted = ee.conformal.lac(logits, jnp.array([0, 0, 0, 0, 0, 1, 1, 1, 2]), level=0.8)
    fitted(logits[:1])  # [[True, True, False]], the classes with a probability of 0.3 or more
    ```

    ??? cite
        [Least Ambiguous Set-Valued Classifiers With Bounded Error Levels](https://arxiv.org/abs/1609.00451)

        ```bibtex
        @article{sadinle2019least,
            author={Mauricio Sadinle and Jing Lei and Larry Wasserman},
            title={Least Ambiguous Set-Valued Classifiers With Bounded Error Levels},
            journal={Journal of the American Statistical Association},
            year={2019},
        }
        ```
    """
    name = "conformal.lac"
    scores, _, kept = score_labels(name, "lac", logits, labels, level, mask)
    return Lac(value_at_rank_jit(scores, kept, rank_of(name, fraction(level), scores.size, kept)))
