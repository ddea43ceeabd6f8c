from fractions import Fraction
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int32, Integer

from .._brief import brief_doc
from .._caller import caller
from .._check import (
    ALL_ROWS,
    CountedRows,
    RowWeightsLike,
    check_array,
    check_counted_rows,
    check_entries,
    check_logits,
    check_positive_int,
    check_word,
    concrete,
    promote,
    type_error,
    value_error,
)
from .._warnings import warn
from ._check import check_level, check_num_classes, check_rows, enough_rows_text
from ._classes import SCORES, Score, class_scores, score_labels
from ._quantile import fraction, ranks_by_count


def check_groups(
    groups: Any, num_groups: Any, shape: tuple[int, ...], rows: CountedRows = ALL_ROWS
) -> tuple[Array, int]:
    """Raises unless `groups` are integers from 0 to `num_groups - 1` (where concrete), one per row. Returns both."""
    count = check_positive_int(num_groups, "num_groups")
    if isinstance(groups, np.ndarray) and groups.dtype.kind in "OUST":
        fix = "Number the groups: `names, groups = np.unique(groups, return_inverse=True)`."
        raise type_error("integer `groups`", f"got dtype {groups.dtype}", fix)
    array = check_array("groups", groups)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        fix = "Number the groups from 0: `names, groups = np.unique(groups, return_inverse=True)`."
        got = f"got dtype {array.dtype}, shape {array.shape}"
        raise type_error("integer `groups`", got, fix)
    if array.shape != shape:
        got = f"expected {shape}, got {array.shape}"
        raise value_error("one of `groups` per row", got, "Groups are in the order of the rows.")
    fix = "Count groups from 0, and leave rows without a group out (`row_weights`)."
    needs = f"`groups` from 0 to {count - 1}, as `num_groups` is {count}"
    check_entries(needs, groups, lambda host: (host < 0) | (host >= count), fix, rows)
    return array.astype(jnp.int32), count


def group_quantile(
    scores: Float[ArrayLike, " rows"],
    groups: Integer[ArrayLike, " rows"],
    *,
    level: float,
    num_groups: int,
    row_weights: RowWeightsLike | None = None,
) -> Float[Array, " groups"]:
    """The conformal quantile of each group: it bounds a new score of the group with probability `level` or more.

    [`eqx_ensemble.conformal.quantile`][] of the rows of each group (Mondrian conformal prediction).

    **Arguments:**

    - `groups`: integers `(rows,)` from 0 to num_groups - 1, also known for new rows.
    - `num_groups`: the number of groups.
    - the others: as for [`eqx_ensemble.conformal.quantile`][].

    **Returns:** `(groups,)`; infinite, with a warning, for groups with too few rows.

    ```python
    groups = jnp.repeat(jnp.arange(2), 9)
    errors = jnp.tile(jnp.arange(1.0, 10.0), 2) * jnp.repeat(jnp.array([1.0, 2.0]), 9)
    radius = ee.conformal.group_quantile(errors, groups, level=0.8, num_groups=2)
    radius  # [8.0, 16.0], for new rows `radius[groups]`
    ```

    ??? cite
        [Vovk, Machine Learning 2013](https://arxiv.org/abs/1209.2673)
    """
    (checked,) = check_rows(scores=scores)
    rows = check_counted_rows(row_weights, checked.shape)
    own, count = check_groups(groups, num_groups, checked.shape, rows)
    check_level(level)
    return fit_groups(checked, own, count, fraction(level), rows.counted, noun="groups")


def fit_groups(
    scores: Array, groups: Array, num_groups: int, level: Fraction, counted: Array | None, *, noun: str
) -> Float[Array, " groups"]:
    """The quantile of each group; warns about groups with too few rows."""
    table = ranks_by_count(level, scores.size)
    found, counts = _values_at_ranks(scores, groups, counted, jnp.asarray(table), num_groups)
    host = concrete(counts)
    if host is not None and (few := table[host] > host).any():
        first = int(np.argmax(few))
        warn(
            f"`{caller()}`: {int(few.sum())} of {num_groups} {noun} have too few rows for level {float(level):g}, the "
            f"first is {first} with {int(host[first])}; their predictions are unbounded. {enough_rows_text(level)}"
        )
    return found


@partial(jax.jit, static_argnames="num_groups")
def _values_at_ranks(
    scores: Float[Array, " rows"],
    groups: Integer[Array, " rows"],
    counted: Bool[Array, " rows"] | None,
    table: Int32[Array, " counts"],
    num_groups: int,
) -> tuple[Float[Array, " groups"], Int32[Array, " groups"]]:
    known = (groups >= 0) & (groups < num_groups)
    bucket = jnp.where(known if counted is None else known & counted, groups, num_groups)
    bucket, ordered = jax.lax.sort((bucket, scores), num_keys=2)
    per_bucket = partial(jax.ops.segment_sum, segment_ids=bucket, num_segments=num_groups + 1)
    count = per_bucket(jnp.ones(bucket.shape, jnp.int32))[:-1]
    spoilt = per_bucket(jnp.isnan(ordered).astype(jnp.int32))[:-1] > 0
    rank = table[count]
    found = ordered[jnp.clip(jnp.cumsum(count) - count + rank - 1, 0, scores.size - 1)]
    return jnp.where(spoilt, jnp.nan, jnp.where(rank > count, jnp.inf, found)), count


class ClassConditional(eqx.Module):
    """Fitted sets with a threshold for each class: `fitted(logits)` returns booleans `(*batch, classes)`.

    **Attributes:**

    - `threshold`: `(classes,)`; a class is in the set if its score is at most its threshold.
    - `score`: `"lac"`, as in [`eqx_ensemble.conformal.Lac`][]; `"aps"`, minus the logarithm of the remaining
        probability; or `"top_k"`, the number of classes at least as likely.
    """

    threshold: Float[Array, " classes"]
    score: Score = eqx.field(static=True)

    __pdoc__ = brief_doc

    def __call__(self, logits: Float[ArrayLike, "*batch classes"]) -> Bool[Array, "*batch classes"]:
        """The set of each row."""
        checked = check_logits(logits, members=False)
        check_num_classes(self.threshold.size, checked.shape[-1])
        threshold = jnp.reshape(self.threshold, (1,) * (checked.ndim - 1) + self.threshold.shape)
        scores, threshold = promote(class_scores(self.score, checked), threshold)
        return ~(scores > threshold)


class GroupConditional(eqx.Module):
    """Fitted sets with a threshold for each group: `fitted(logits, groups)` returns booleans `(*batch, classes)`.

    `groups` are integers `(*batch,)`.

    **Attributes:**

    - `threshold`: `(groups,)`; a class is in the set if its score is at most the threshold of the row's group.
    - `score`: as for [`eqx_ensemble.conformal.ClassConditional`][].
    """

    threshold: Float[Array, " groups"]
    score: Score = eqx.field(static=True)

    __pdoc__ = brief_doc

    def __call__(
        self, logits: Float[ArrayLike, "*batch classes"], groups: Integer[ArrayLike, "*batch"]
    ) -> Bool[Array, "*batch classes"]:
        """The set of each row."""
        checked = check_logits(logits, members=False)
        own, count = check_groups(groups, self.threshold.size, checked.shape[:-1])
        known = (own >= 0) & (own < count)
        threshold = jnp.where(known, self.threshold[jnp.where(known, own, 0)], jnp.inf)
        scores, threshold = promote(class_scores(self.score, checked), threshold[..., None])
        return ~(scores > threshold)


def class_conditional(
    logits: Float[ArrayLike, "rows classes"],
    labels: Integer[ArrayLike, " rows"],
    *,
    level: float,
    score: Score = "lac",
    row_weights: RowWeightsLike | None = None,
) -> ClassConditional:
    r"""Prediction sets that cover the rows of every class with probability `level` or more (Mondrian).

    The threshold of a class is [`eqx_ensemble.conformal.quantile`][] of the scores of its own held-out rows. A class
    with $n$ such rows is in every set unless $\lceil (n + 1) \, \mathrm{level} \rceil \le n$; a warning names it.

    **Arguments:**

    - `score`: `"lac"`, `"aps"` or `"top_k"`, the score of the function of this name.
    - the others: as for [`eqx_ensemble.conformal.aps`][].

    **Returns:** [`eqx_ensemble.conformal.ClassConditional`][].

    ```python
    logits = jnp.log(jnp.array([[0.6, 0.4]] * 9 + [[0.8, 0.2]] * 9))
    fitted = ee.conformal.class_conditional(
        logits, jnp.repeat(jnp.array([0, 1]), 9), level=0.9
    )
    fitted(logits[:1])  # [[True, True]]: 0.6 or more is enough for class 0, 0.2 or more for class 1
    ```

    ??? cite
        [Vovk, Machine Learning 2013](https://arxiv.org/abs/1209.2673)
    """
    check_word(score, "score", SCORES)
    scores, targets, rows = score_labels(score, logits, labels, level, row_weights)
    num_classes = jnp.shape(logits)[-1]
    threshold = fit_groups(scores, targets, num_classes, fraction(level), rows.counted, noun="classes")
    return ClassConditional(threshold, score)


def group_conditional(
    logits: Float[ArrayLike, "rows classes"],
    labels: Integer[ArrayLike, " rows"],
    groups: Integer[ArrayLike, " rows"],
    *,
    level: float,
    num_groups: int,
    score: Score = "lac",
    row_weights: RowWeightsLike | None = None,
) -> GroupConditional:
    """Prediction sets that cover the rows of every group with probability `level` or more (Mondrian).

    As [`eqx_ensemble.conformal.class_conditional`][], with a threshold for each group. For intervals see
    [`eqx_ensemble.conformal.group_quantile`][].

    **Arguments:**

    - `groups`: integers `(rows,)` from 0 to num_groups - 1, known before the label, such as a patient's hospital.
    - `num_groups`: the number of groups.
    - the others: as for [`eqx_ensemble.conformal.class_conditional`][].

    **Returns:** [`eqx_ensemble.conformal.GroupConditional`][].

    ```python
    logits = jnp.log(jnp.array([[0.6, 0.4]] * 9 + [[0.8, 0.2]] * 9))
    own = jnp.array([0] * 9 + [1] * 9)  # labels, and also groups
    fitted = ee.conformal.group_conditional(logits, own, own, level=0.9, num_groups=2)
    fitted(logits[:2], jnp.array([0, 1]))  # [[True, False], [True, True]]
    ```

    ??? cite
        [Vovk, Machine Learning 2013](https://arxiv.org/abs/1209.2673)
    """
    check_word(score, "score", SCORES)
    scores, _, rows = score_labels(score, logits, labels, level, row_weights)
    own, count = check_groups(groups, num_groups, scores.shape, rows)
    threshold = fit_groups(scores, own, count, fraction(level), rows.counted, noun="groups")
    return GroupConditional(threshold, score)
