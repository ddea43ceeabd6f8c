from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int32, Integer, Key

from .._brief import brief_doc
from .._caller import caller
from .._check import (
    CountedRows,
    RowWeightsLike,
    check_counted_rows,
    check_integer,
    check_key,
    check_labels,
    check_logits,
    check_no_nan,
    check_number,
    concrete,
    promote,
)
from .._keys import member_keys
from .._warnings import warn
from .._weighting import at_label, class_log_odds
from ._check import check_level, check_row_logits
from ._quantile import fraction, pair_at_rank, rank_of, value_at_rank_jit


def positions(
    ordered: Float[Array, "*batch classes"], values: Float[Array, "*batch classes"], side: str
) -> Int32[Array, "*batch classes"]:
    """The number of sorted values of each row that are below each value (left), or at most equal to it (right)."""
    find = lambda row, wanted: jnp.searchsorted(row, wanted, side=side)
    return jnp.vectorize(find, signature="(c),(c)->(c)")(ordered, values).astype(jnp.int32)


class Sets(eqx.Module):
    """Fitted adaptive prediction sets: `fitted(logits)` returns booleans `(*batch, classes)`.

    **Attributes:**

    - `threshold`: a class is in the set if its score is at most this.
    - `log_rest`: the logarithm of the remaining probability, which breaks ties.
    - `penalty`, `num_free`: as for [`eqx_ensemble.conformal.raps`][].
    """

    threshold: Float[Array, ""]
    log_rest: Float[Array, ""]
    penalty: Float[Array, ""]
    num_free: Int32[Array, ""]

    __pdoc__ = brief_doc

    def __call__(self, logits: Float[ArrayLike, "*batch classes"]) -> Bool[Array, "*batch classes"]:
        """The set of each row."""
        checked = check_logits(logits, members=False)
        return _sets(checked, None, self)


class RandomisedSets(eqx.Module):
    """Fitted randomised sets: `fitted(logits, key=key)` returns booleans `(*batch, classes)`.

    `key` is one threefry key. `threshold`, `log_rest`, `penalty` and `num_free` are
    those of [`eqx_ensemble.conformal.Sets`][].
    """

    threshold: Float[Array, ""]
    log_rest: Float[Array, ""]
    penalty: Float[Array, ""]
    num_free: Int32[Array, ""]

    __pdoc__ = brief_doc

    def __call__(self, logits: Float[ArrayLike, "*batch classes"], *, key: Any) -> Bool[Array, "*batch classes"]:
        """The set of each row."""
        checked = check_logits(logits, members=False)
        check_key(key)
        return _sets(checked, member_keys(key, 1, purpose="conformal.RandomisedSets"), self)


def aps(
    logits: Float[ArrayLike, "rows classes"],
    labels: Integer[ArrayLike, " rows"],
    *,
    level: float,
    row_weights: RowWeightsLike | None = None,
    key: Any = None,
) -> Sets | RandomisedSets:
    """Adaptive prediction sets with guaranteed coverage: larger where the prediction is uncertain.

    The score of a class is its probability plus that of all more likely classes. The set contains the classes whose
    score is at most [`eqx_ensemble.conformal.quantile`][] of the labels' scores. With a `key`, only a random fraction
    of the class's own probability is added: sets are smaller, more of them are empty, and the coverage is exact. Warns,
    without a key, if sets are more than twice as large as those of [`eqx_ensemble.conformal.lac`][].

    **Arguments:**

    - `logits`: `(rows, classes)`, of held-out rows, also log-probabilities, as of [`eqx_ensemble.combine.mixture`][].
    - `labels`: integers `(rows,)` from 0 to classes - 1.
    - `key`: one random key, for randomised sets.

    **Returns:** [`eqx_ensemble.conformal.Sets`][]; with a key, [`eqx_ensemble.conformal.RandomisedSets`][].

    ```python
    logits = jnp.log(jnp.array([[0.6, 0.3, 0.1]] * 9))
    fitted = ee.conformal.aps(logits, jnp.array([0, 0, 0, 0, 0, 1, 1, 1, 2]), level=0.8)
    fitted(logits[:1])  # [[True, True, False]]
    ```

    ??? cite
        [Romano et al., NeurIPS 2020](https://arxiv.org/abs/2006.02544)
    """
    return _fit("conformal.aps", logits, labels, level, 0.0, 0, row_weights, key)


def raps(
    logits: Float[ArrayLike, "rows classes"],
    labels: Integer[ArrayLike, " rows"],
    *,
    level: float,
    penalty: float,
    num_free: int,
    row_weights: RowWeightsLike | None = None,
    key: Any = None,
) -> Sets | RandomisedSets:
    r"""Regularised adaptive prediction sets: [`eqx_ensemble.conformal.aps`][] with a penalty on large sets.

    $\lambda \max(0, o - k)$ is added to a class's score, where $o$ is the number of classes that are at least as
    likely. This keeps sets small when there are many classes. Choose `penalty` and `num_free` on other rows.

    **Arguments:**

    - `penalty`: $\lambda$, non-negative.
    - `num_free`: $k$, the number of classes without a penalty.
    - the others, and the result: as for [`eqx_ensemble.conformal.aps`][].

    ```python
    logits = jnp.log(jnp.array([[0.6, 0.3, 0.1]] * 9))
    fitted = ee.conformal.raps(
        logits, jnp.array([0, 0, 0, 0, 0, 1, 1, 1, 2]), level=0.8, penalty=0.1, num_free=1
    )
    fitted.threshold, fitted(logits[:1])  # 0.9 + 0.1 = 1.0, [[True, True, False]]
    ```

    ??? cite
        [Angelopoulos et al., ICLR 2021](https://arxiv.org/abs/2009.14193)
    """
    name = "conformal.raps"
    check_number(penalty, "penalty", least=0)
    check_integer(num_free, "num_free", least=0)
    return _fit(name, logits, labels, level, penalty, num_free, row_weights, key)


def _fit(
    name: str,
    logits: ArrayLike,
    labels: ArrayLike,
    level: float,
    penalty: float,
    num_free: int,
    row_weights: ArrayLike | None,
    key: Any,
) -> Sets | RandomisedSets:
    checked = check_row_logits(logits)
    rows = check_counted_rows(row_weights, checked.shape[:-1])
    targets = check_labels(labels, checked, rows, members=False)
    check_level(level)
    keys = None
    if key is not None:
        check_key(key)
        keys = member_keys(key, 1, purpose="conformal.aps")
    extra = jnp.asarray(penalty, checked.dtype), jnp.asarray(num_free, jnp.int32)
    scores, log_rest = adaptive_scores(rows.blank(checked), keys, *extra)
    blanked = rows.blank(targets)
    of_label = at_label(scores, blanked)
    check_no_nan("logits", of_label, rows)
    rank = rank_of(fraction(level), of_label.size, rows)
    threshold, negative = pair_at_rank(of_label, -at_label(log_rest, blanked), rows.counted, rank)
    if key is not None:
        return RandomisedSets(threshold, -negative, *extra)
    fitted = Sets(threshold, -negative, *extra)
    if name == "conformal.aps":
        _warn_of_large_sets(checked, blanked, rows.counted, rank, fitted)
    return fitted


def _warn_of_large_sets(
    logits: Array, labels: Array, counted: Array | None, rank: Int32[Array, ""], fitted: Sets
) -> None:
    """Warns if sets are more than twice as large as those of `lac` on the same rows."""
    odds = class_log_odds(logits)
    smallest = odds >= -value_at_rank_jit(-at_label(odds, labels), counted, rank)
    sizes = [jnp.mean(jnp.sum(x, axis=-1), where=counted) for x in (smallest, _sets(logits, None, fitted))]
    known = concrete(jnp.stack(sizes))
    if known is None:
        return
    least, size = known
    if size > 2 * max(least, 1):
        warn(
            f"`{caller()}`: the sets have {size:.3g} classes on average on the rows of the fit, those of "
            f"`conformal.lac` {least:.3g}. Pass `key=` for smaller, randomised sets, or use `conformal.lac`."
        )


@jax.jit
def adaptive_scores(
    logits: Float[Array, "*batch classes"], keys: Key[Array, "1"] | None, penalty: Array, num_free: Array
) -> tuple[Float[Array, "*batch classes"], Float[Array, "*batch classes"]]:
    """The scores, and the logarithm of the remaining probability, which orders scores that round to one.

    The logarithm is minus infinity for classes of probability zero only.
    """
    logs = jax.nn.log_softmax(logits, axis=-1)
    ordered = jnp.sort(logs, axis=-1)
    # Element i is the logarithm of the probability of the i least likely classes.
    below = jax.lax.cumlogsumexp(ordered, axis=logs.ndim - 1)
    below = jnp.concatenate([jnp.full_like(below[..., :1], -jnp.inf), below], axis=-1)
    # Counts, not sort positions: classes of equal probability have equal scores.
    less, most = positions(ordered, logs, "left"), positions(ordered, logs, "right")
    share = 1.0 if keys is None else jax.random.uniform(keys[0], (*logits.shape[:-1], 1), logits.dtype)
    own = jnp.log((most - less).astype(logits.dtype) - share) + logs
    log_rest = jnp.minimum(_add_logs(jnp.take_along_axis(below, less, axis=-1), own), 0)
    # Nothing remains beyond the last likely class; only impossible ones come after it. A power of two is one float in
    # all precisions.
    last = -(2.0**15) if logits.dtype == jnp.float16 else -(2.0**126)
    log_rest = jnp.where(jnp.isneginf(logs), -jnp.inf, jnp.maximum(log_rest, last))
    extra = jnp.maximum(logits.shape[-1] - less - num_free, 0).astype(logits.dtype) * penalty
    return -jnp.expm1(log_rest) + extra, log_rest


def _add_logs(first: Float[Array, "*batch classes"], second: Float[Array, "*batch classes"]) -> Array:
    """`logaddexp` without its NaN gradient where both are minus infinity."""
    nothing = jnp.isneginf(first), jnp.isneginf(second)
    added = jnp.logaddexp(*(jnp.where(none, 0, x) for none, x in zip(nothing, (first, second), strict=True)))
    return jnp.where(nothing[0], second, jnp.where(nothing[1], first, added))


@jax.jit
def _sets(
    logits: Float[Array, "*batch classes"], keys: Key[Array, "1"] | None, fitted: Sets | RandomisedSets
) -> Bool[Array, "*batch classes"]:
    logits, threshold, least, penalty = promote(logits, fitted.threshold, fitted.log_rest, fitted.penalty)
    scores, rest = adaptive_scores(logits, keys, penalty, fitted.num_free)
    # Only scores above the threshold are excluded: a NaN score is in the set.
    return ~((scores > threshold) | ((scores == threshold) & (rest < least)))


Score = Literal["lac", "aps", "top_k"]
SCORES = ("lac", "aps", "top_k")


@jax.jit
def lac_scores(logits: Float[Array, "*batch classes"]) -> Float[Array, "*batch classes"]:
    """Minus the log-odds of each class: the order of `1 - p`, without its rounding."""
    return -class_log_odds(logits)


@jax.jit
def top_k_scores(logits: Float[Array, "*batch classes"]) -> Float[Array, "*batch classes"]:
    """The number of classes at least as likely as each class; NaN where the logits are NaN."""
    less = positions(jnp.sort(logits, axis=-1), logits, "left")
    unknown = jnp.any(jnp.isnan(logits), axis=-1, keepdims=True)
    return jnp.where(unknown, jnp.nan, (logits.shape[-1] - less).astype(logits.dtype))


def class_scores(score: Score, logits: Float[Array, "*batch classes"]) -> Float[Array, "*batch classes"]:
    """A nonconformity score of each class that orders classes as `score` does."""
    if score == "lac":
        return lac_scores(logits)
    if score == "top_k":
        return top_k_scores(logits)
    # The remaining probability decreases as the score increases; its logarithm does not round.
    return -adaptive_scores(logits, None, jnp.zeros((), logits.dtype), jnp.asarray(0, jnp.int32))[1]


def score_labels(
    score: Score,
    logits: ArrayLike,
    labels: ArrayLike,
    level: float,
    row_weights: ArrayLike | None,
    *,
    argument: str = "logits",
) -> tuple[Array, Array, CountedRows]:
    """Raises for invalid arguments. Returns the labels' scores on held-out rows, the labels and which rows count."""
    checked = check_row_logits(logits, argument=argument)
    rows = check_counted_rows(row_weights, checked.shape[:-1])
    targets = check_labels(labels, checked, rows, argument=argument, members=False)
    check_level(level)
    blanked = rows.blank(targets)
    scores = at_label(class_scores(score, rows.blank(checked)), blanked)
    check_no_nan(argument, scores, rows)
    return scores, blanked, rows
