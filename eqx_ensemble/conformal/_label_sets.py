import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int32, Integer

from .._brief import brief_doc
from .._check import RowWeightsLike, check_logits, check_word, promote
from ..resample import Folds
from ..resample._engine import check_folds
from ._check import check_members_of_folds, check_num_classes, check_one_fold, check_rows_of_folds
from ._classes import SCORES, Score, class_scores, lac_scores, score_labels, top_k_scores
from ._quantile import fraction, rank_of, value_at_rank_jit


class TopK(eqx.Module):
    """Fitted sets of the most likely classes: `fitted(logits)` returns booleans `(*batch, classes)`.

    **Attributes:**

    - `k`: the number of classes in each set; infinite, for all classes, if there were too few held-out rows.
    """

    k: Float[Array, ""]

    __pdoc__ = brief_doc

    def __call__(self, logits: Float[ArrayLike, "*batch classes"]) -> Bool[Array, "*batch classes"]:
        """The set of each row."""
        scores, k = promote(top_k_scores(check_logits(logits, members=False)), self.k)
        return ~(scores > k)


def top_k(
    logits: Float[ArrayLike, "rows classes"],
    labels: Integer[ArrayLike, " rows"],
    *,
    level: float,
    row_weights: RowWeightsLike | None = None,
) -> TopK:
    """Prediction sets of a fixed size: the `k` most likely classes, with the smallest `k` that reaches the coverage.

    The coverage usually exceeds `level`. Classes that tie across rank `k` are all excluded, as in the fit.

    **Arguments:** as [`eqx_ensemble.conformal.aps`][], without `key`.

    **Returns:** [`eqx_ensemble.conformal.TopK`][].

    ```python
    logits = jnp.log(jnp.array([[0.6, 0.3, 0.1]] * 9))
    labels = jnp.array([0, 0, 0, 0, 0, 1, 1, 1, 2])
    fitted = ee.conformal.top_k(logits, labels, level=0.8)
    fitted.k, fitted(logits[:1])  # 2, [[True, True, False]]
    ```

    ??? cite
        [Angelopoulos et al., ICLR 2021](https://arxiv.org/abs/2009.14193), where it is a baseline
    """
    scores, _, rows = score_labels("top_k", logits, labels, level, row_weights)
    return TopK(value_at_rank_jit(scores, rows.counted, rank_of(fraction(level), scores.size, rows)))


class Lac(eqx.Module):
    """Fitted least ambiguous sets: `fitted(logits)` returns booleans `(*batch, classes)`.

    **Attributes:**

    - `threshold`: a class is in the set if minus the log-odds of its probability, `log((1 - p) / p)`, is at most this.
    """

    threshold: Float[Array, ""]

    __pdoc__ = brief_doc

    def __call__(self, logits: Float[ArrayLike, "*batch classes"]) -> Bool[Array, "*batch classes"]:
        """The set of each row."""
        scores, threshold = promote(lac_scores(check_logits(logits, members=False)), self.threshold)
        return ~(scores > threshold)


def lac(
    logits: Float[ArrayLike, "rows classes"],
    labels: Integer[ArrayLike, " rows"],
    *,
    level: float,
    row_weights: RowWeightsLike | None = None,
) -> Lac:
    """Least ambiguous prediction sets: all classes whose probability reaches a threshold; the smallest on average.

    The score of a class is $1 - p$. The set contains the classes whose score is at most
    [`eqx_ensemble.conformal.quantile`][] of the labels' scores.

    Sets may be empty: a model that is always right has 30 % empty sets at level 0.7. To avoid them, add the most likely
    class, which can only increase coverage.

    **Arguments:** as [`eqx_ensemble.conformal.aps`][], without `key`.

    **Returns:** [`eqx_ensemble.conformal.Lac`][].

    ```python
    logits = jnp.log(jnp.array([[0.6, 0.3, 0.1]] * 9))
    fitted = ee.conformal.lac(logits, jnp.array([0, 0, 0, 0, 0, 1, 1, 1, 2]), level=0.8)
    fitted(logits[:1])  # [[True, True, False]], the classes with a probability of 0.3 or more
    ```

    ??? cite
        [Sadinle et al., JASA 2019](https://arxiv.org/abs/1609.00451)
    """
    scores, _, rows = score_labels("lac", logits, labels, level, row_weights)
    return Lac(value_at_rank_jit(scores, rows.counted, rank_of(fraction(level), scores.size, rows)))


class CrossConformal(eqx.Module):
    """Fitted cross-conformal sets: `fitted(logits)` takes all members' logits `(members, *batch, classes)`, and returns
    booleans `(*batch, classes)`.

    Member `i` belongs to fold `i % folds`; the logits of several members per fold are averaged.

    **Attributes:**

    - `scores`: `(folds, test)`, the sorted scores of the labels that each fold held out.
    - `rank`: a class is in the set if fewer scores than this are below its own.
    - `num_classes`, `score`: as fitted.
    """

    scores: Float[Array, "folds test"]
    rank: Int32[Array, ""]
    num_classes: int = eqx.field(static=True)
    score: Score = eqx.field(static=True)

    __pdoc__ = brief_doc

    def __call__(self, logits: Float[ArrayLike, "members *batch classes"]) -> Bool[Array, "*batch classes"]:
        """The set of each row."""
        checked = check_logits(logits)
        num_folds = self.scores.shape[0]
        times = check_members_of_folds(num_folds, checked.shape[0])
        check_num_classes(self.num_classes, checked.shape[-1])
        by_fold = jnp.mean(jnp.reshape(checked, (times, num_folds, *checked.shape[1:])), axis=0)
        return _count_below(self, by_fold) < self.rank


def cross_conformal(
    held_out: Float[ArrayLike, "rows classes"],
    labels: Integer[ArrayLike, " rows"],
    folds: Folds,
    *,
    level: float,
    score: Score = "aps",
    row_weights: RowWeightsLike | None = None,
) -> CrossConformal:
    r"""Cross-conformal prediction sets from one cross-fit run, without a calibration set.

    Let $R_i$ be the score of the label of row $i$ under the members of the fold $f(i)$ that held it out. The p-value of
    class $y$ of a new row is $(1 + \sum_i [R_i \ge R_{f(i)}(y)]) / (n + 1)$, and the set contains the classes whose
    p-value exceeds $1 - \mathrm{level}$. With $K$ folds it covers a new label with probability at least $2 \,
    \mathrm{level} - 1 - 2 (K - 1) / (n + K)$; in practice with `level`.

    **Arguments:**

    - `held_out`: `(rows, classes)`, logits: `.held_out.mean` of [`eqx_ensemble.methods.cross_fit`][].
    - `folds`: the result of [`eqx_ensemble.resample.folds`][]; every row is in the test part of exactly one fold.
    - the others: as for [`eqx_ensemble.conformal.class_conditional`][].

    **Returns:** [`eqx_ensemble.conformal.CrossConformal`][].

    ```python
    labels, folds = jnp.arange(100) % 3, ee.resample.folds(100, 10, key=key)
    predictions = jax.random.normal(key, (10, 100, 3))  # logits of all members
    held_out = ee.resample.out_of_fold(predictions, folds).mean
    fitted = ee.conformal.cross_conformal(held_out, labels, folds, level=0.9)
    fitted(predictions[:, :5]).shape  # (5, 3)
    ```

    ??? cite
        [Vovk, AMAI 2015](https://arxiv.org/abs/1208.0806); as CV+: [Romano et al., NeurIPS
        2020](https://arxiv.org/abs/2006.02544)
    """
    check_folds(folds)
    check_word(score, "score", SCORES)
    scores, _, rows = score_labels(score, held_out, labels, level, row_weights, argument="held_out")
    check_rows_of_folds(scores.size, folds.in_test.shape[1])
    check_one_fold(folds.in_test, rows)
    rank = rank_of(fraction(level), scores.size, rows)
    by_fold, rank = _sort_by_fold(scores, rows.counted, folds, rank)
    return CrossConformal(by_fold, rank, jnp.shape(held_out)[-1], score)


@jax.jit
def _sort_by_fold(
    scores: Float[Array, " rows"], counted: Bool[Array, " rows"] | None, folds: Folds, rank: Int32[Array, ""]
) -> tuple[Float[Array, "folds test"], Int32[Array, ""]]:
    valid = folds.valid if counted is None else folds.valid & counted[folds.test]
    own = jnp.where(valid, scores[folds.test], jnp.inf)
    # While tracing, NaN raises no error: no class is then excluded.
    spoilt = jnp.any(jnp.isnan(own))
    return jnp.sort(own, axis=-1), jnp.where(spoilt, scores.size + 1, rank)


@jax.jit
def _count_below(
    fitted: CrossConformal, logits: Float[Array, "folds *batch classes"]
) -> Int32[Array, "*batch classes"]:
    """The number of held-out rows whose score is below that of the class, under the members of the row's fold."""

    def add(count: Array, of_fold: tuple[Array, Array]) -> tuple[Array, None]:
        scores, own = of_fold
        scores, found = promote(scores, class_scores(fitted.score, own))
        below = jnp.searchsorted(scores, jnp.ravel(found), side="left").astype(jnp.int32)
        return count + jnp.where(jnp.isnan(found), 0, jnp.reshape(below, found.shape)), None

    count, _ = jax.lax.scan(add, jnp.zeros(logits.shape[1:], jnp.int32), (fitted.scores, logits))
    unknown = jnp.any(jnp.isnan(logits), axis=(0, -1))
    return jnp.where(unknown[..., None], -1, count)
