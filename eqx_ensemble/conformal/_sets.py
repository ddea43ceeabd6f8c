from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from .._boundary import array_function, kinds
from .._brief import brief_doc
from .._check import check_number, concrete, value_error
from .._leaves import promote
from .._weighting import at_label, class_log_odds
from ._intervals import by_fold
from ._quantile import finish, ranks, threshold

Score = Literal["lac", "aps", "top_k"]


def class_scores(
    logits: Float[Array, "*batch classes"], score: Score, penalty: float = 0.0, num_free: int = 1
) -> Float[Array, "*batch classes"]:
    """The nonconformity score of each class: a monotonic function of what `score` says, which does not round to one."""
    if score == "lac":
        return -class_log_odds(logits)
    logs = jax.nn.log_softmax(logits, axis=-1)
    ordered, num_classes = jnp.sort(logs, axis=-1), logs.shape[-1]
    # Numbers of classes below, and at most at, each one: those of equal probability have equal scores.
    find = lambda side: jnp.vectorize(lambda row, x: jnp.searchsorted(row, x, side=side), signature="(c),(c)->(c)")
    less, most = (find(side)(ordered, logs).astype(logs.dtype) for side in ("left", "right"))
    place = jnp.where(jnp.isnan(logs), jnp.nan, num_classes - less)
    if score == "top_k":
        return place
    # What remains beyond a class: the sum of the less likely ones, and of the others of its own probability.
    below = jax.lax.cumlogsumexp(ordered, axis=logs.ndim - 1)
    below = jnp.concatenate([jnp.full_like(below[..., :1], -jnp.inf), below], axis=-1)
    below = jnp.take_along_axis(below, less.astype(jnp.int32), axis=-1)
    others = jnp.log(most - less - 1) + logs
    # The gradient of `logaddexp` is NaN where both are minus infinity.
    nothing, alone = jnp.isneginf(below), jnp.isneginf(others)
    rest = jnp.logaddexp(jnp.where(nothing, 0, below), jnp.where(alone, 0, others))
    rest = jnp.minimum(jnp.where(nothing, others, jnp.where(alone, below, rest)), 0)
    if penalty > 0:
        return -jnp.expm1(rest) + penalty * jnp.maximum(place - num_free, 0)
    # Beyond the last likely class nothing remains; only impossible ones come after it.
    return jnp.where(jnp.isneginf(logs), jnp.inf, -jnp.maximum(rest, -(2.0**126)))


class Sets(eqx.Module):
    """Fitted prediction sets: `fitted(logits)` returns booleans `(*batch, classes)`.

    If they were fitted with groups, `fitted(logits, groups)`, with integers `(*batch,)`.

    **Attributes:**

    - `threshold`: a class is in the set if its score is at most this; a scalar, one for each class, or one for each
        group. The scores are minus the log-odds (`"lac"`), minus the logarithm of the remaining probability (`"aps"`;
        with a penalty, the sum itself), or the number of classes at least as likely (`"top_k"`).
    - `score`, `penalty`, `num_free`: as fitted.
    - `by_group`: whether there is a threshold for each group.
    """

    threshold: Float[Array, "..."]
    score: Score = eqx.field(static=True)
    penalty: float = eqx.field(static=True)
    num_free: int = eqx.field(static=True)
    by_group: bool = eqx.field(static=True)

    __pdoc__ = brief_doc

    @array_function
    def __call__(
        self, logits: kinds.MixedLogits, groups: kinds.AnyGroups | None = None
    ) -> Bool[Array, "*batch classes"]:
        """The set of each row."""
        if self.by_group != (groups is not None):
            needs, got = ("`groups`", "got none") if self.by_group else ("no `groups`", "got some")
            raise value_error(f"{needs} for the rows, as in the fit", got, "Call it as it was fitted.")
        scores, limit = promote(class_scores(logits, self.score, self.penalty, self.num_free), self.threshold)
        if groups is not None:
            known = (groups >= 0) & (groups < limit.size)
            limit = jnp.where(known, limit[jnp.where(known, groups, 0)], jnp.inf)[..., None]
        elif limit.ndim:
            limit = limit.reshape((1,) * (logits.ndim - 1) + limit.shape)
        return ~(scores > limit)  # a NaN score is in the set


@array_function(finish=finish)
def sets(
    logits: kinds.HeldOutLogits,
    labels: kinds.RowLabels,
    *,
    level: float,
    score: Score = "aps",
    penalty: float = 0.0,
    num_free: int = 1,
    by_class: bool = False,
    groups: kinds.RowGroups | None = None,
    num_groups: int = 1,
    row_weights: kinds.RowFilter = None,
) -> Sets:
    r"""Sets of classes that contain a new label with probability `level` or more, if rows are exchangeable.

    A set contains the classes whose score is at most [`eqx_ensemble.conformal.quantile`][] of the labels' scores on
    held-out rows. The score of a class of probability $p$ is

    | `score` | of a class | sets |
    |---|---|---|
    | `"lac"` | $1 - p$ | the smallest on average; may be empty |
    | `"aps"` | $p$ plus the probability of all more likely classes | larger where uncertain, rarely empty |
    | `"top_k"` | the number of classes at least as likely | of constant size |

    For `"aps"` and many classes, a `penalty` $\lambda$ keeps sets small (RAPS): $\lambda \max(0, o - k)$ is added to
    the score, where $o$ is the number of classes at least as likely. Choose it, and `num_free` $k$, on other rows.

    **Arguments:**

    - `logits`: `(rows, classes)`, of held-out rows, also log-probabilities, as of [`eqx_ensemble.combine.mixture`][].
    - `labels`: integers `(rows,)` from 0 to classes - 1.
    - `penalty`, `num_free`: $\lambda$ and $k$.
    - `by_class`: whether each class has its own quantile: sets then contain the label of the rows of every class with
        probability `level` or more. A class with too few rows is in every set.
    - `groups`, `num_groups`: as for [`eqx_ensemble.conformal.quantile`][]: the same for the rows of every group, which
        is known before the label, such as a patient's hospital.

    **Returns:** [`eqx_ensemble.conformal.Sets`][].

    ```python
    logits = jnp.log(jnp.array([[0.6, 0.3, 0.1]] * 9))
    labels = jnp.array([0, 0, 0, 0, 0, 1, 1, 1, 2])
    fitted = ee.conformal.sets(logits, labels, level=0.8)
    fitted(logits[:1])  # [[True, True, False]]
    ```

    ??? cite
        LAC: [Sadinle et al., JASA 2019](https://arxiv.org/abs/1609.00451); APS: [Romano et al., NeurIPS
        2020](https://arxiv.org/abs/2006.02544); RAPS: [Angelopoulos et al., ICLR
        2021](https://arxiv.org/abs/2009.14193); classes and groups: [Vovk, Machine Learning
        2013](https://arxiv.org/abs/1209.2673)
    """
    check_number(penalty, "penalty", least=0)
    if (by_class and groups is not None) or (penalty > 0 and score != "aps"):
        got = f"got `by_class={by_class}`, `score={score!r}` and `penalty={penalty}`"
        raise value_error('`by_class` without `groups`, and a `penalty` with `score="aps"`', got, "Leave one out.")
    own = at_label(class_scores(logits, score, penalty, num_free), labels)
    which, count = (labels, logits.shape[-1]) if by_class else (groups, num_groups)
    found, few = threshold(own, level, row_weights, which, count)
    return Sets(found, score, penalty, num_free, groups is not None), few  # pyright: ignore[reportReturnType]


class CrossConformal(eqx.Module):
    """Fitted cross-conformal sets: `fitted(logits)` takes all members' logits `(members, *batch, classes)`, and returns
    booleans `(*batch, classes)`.

    Member `i` belongs to fold `i % folds`; the logits of several members per fold are averaged.

    **Attributes:**

    - `scores`: `(folds, rows)`, the sorted scores of the labels that each fold held out; infinite for other rows.
    - `rank`: a class is in the set if fewer scores than this are below its own.
    - `score`: as fitted.
    """

    scores: Float[Array, "folds rows"]
    rank: Int32[Array, ""]
    score: Score = eqx.field(static=True)

    __pdoc__ = brief_doc

    @array_function
    def __call__(self, logits: kinds.Logits) -> Bool[Array, "*batch classes"]:
        """The set of each row."""
        own, scores = promote(class_scores(by_fold(logits, self.scores.shape[0]), self.score), self.scores)
        below = jax.vmap(jnp.searchsorted)(scores, own.reshape(own.shape[0], -1)).astype(jnp.int32)
        return (jnp.sum(below, axis=0).reshape(own.shape[1:]) < self.rank) | jnp.any(jnp.isnan(own), axis=0)


def _finish_folds(out: tuple[CrossConformal, Array], given: dict[str, Any]) -> CrossConformal:
    unseen, row_weights = concrete(given["unseen"]), given["row_weights"]
    counted = None if row_weights is None else concrete(row_weights)
    if unseen is not None and (row_weights is None or counted is not None):
        times = unseen.sum(axis=0)
        if (wrong := (times != 1) & (True if counted is None else counted)).any():
            got = f"got {wrong.sum()} rows held out never or repeatedly, the first is row {np.argmax(wrong)}"
            fix = "Use `resample.folds`, or exclude these rows with `row_weights`."
            raise value_error("folds that hold out every row once", got, fix)
    return finish(out, given)


@array_function(finish=_finish_folds)
def cross_conformal(
    logits: kinds.HeldOutLogits,
    labels: kinds.RowLabels,
    unseen: kinds.Unseen,
    *,
    level: float,
    score: Score = "aps",
    row_weights: kinds.RowFilter = None,
) -> CrossConformal:
    r"""Cross-conformal prediction sets from one cross-fit run, without a calibration set.

    Let $R_i$ be the score of the label of row $i$ under the members of the fold $f(i)$ that held it out. The p-value of
    class $y$ of a new row is $(1 + \sum_i [R_i \ge R_{f(i)}(y)]) / (n + 1)$, and the set contains the classes whose
    p-value exceeds $1 - \mathrm{level}$. With $K$ folds it covers a new, exchangeable label with probability at
    least $2 \, \mathrm{level} - 1 - 2 (K - 1) / (n + K)$; in practice with `level`.

    **Arguments:**

    - `logits`: `(rows, classes)`, held out: `.held_out.mean` of [`eqx_ensemble.methods.cross_fit`][].
    - `unseen`: `(folds, rows)`, `folds.in_test` of [`eqx_ensemble.resample.folds`][]; every row is in the test part of
        exactly one fold.
    - the others: as for [`eqx_ensemble.conformal.sets`][].

    **Returns:** [`eqx_ensemble.conformal.CrossConformal`][].

    ```python
    labels, folds = jnp.arange(100) % 3, ee.resample.folds(100, 10, key=key)
    predictions = jax.random.normal(key, (10, 100, 3))  # logits of all members
    held_out = ee.resample.held_out_mean(predictions, folds.in_test).mean
    fitted = ee.conformal.cross_conformal(held_out, labels, folds.in_test, level=0.9)
    fitted(predictions[:, :5]).shape  # (5, 3)
    ```

    ??? cite
        [Vovk, AMAI 2015](https://arxiv.org/abs/1208.0806); as CV+: [Romano et al., NeurIPS
        2020](https://arxiv.org/abs/2006.02544)
    """
    own = at_label(class_scores(logits, score), labels)
    counted = jnp.ones(labels.shape, bool) if row_weights is None else row_weights
    scores = jnp.sort(jnp.where(unseen & counted[None], own[None], jnp.inf), axis=-1)
    count = jnp.sum(counted, dtype=jnp.int32)
    rank = ranks(level, own.size)[count]
    few = rank > count
    # NaN, which raises no error while tracing, excludes no class.
    every = few | jnp.any(jnp.isnan(scores))
    return CrossConformal(scores, jnp.where(every, own.size + 1, rank), score), few  # pyright: ignore[reportReturnType]
