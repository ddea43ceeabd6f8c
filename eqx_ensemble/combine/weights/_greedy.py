from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int32, Real

from ..._check import RowWeightsLike, check_values, check_word, concrete, value_error
from ..._foreign import from_foreign
from ._check import check_greedy, check_log_scores, check_scores_of_members, check_similarity, check_sparsify


def elites(scores: Real[ArrayLike, " members"], count: int, *, mode: Literal["min", "max"]) -> Float[Array, " members"]:
    """Equal weights for the `count` members with the best scores, zero for the others.

    **Arguments:**

    - `scores`: one per member, `(members,)`, such as `scores.per_member(scores.nll, logits, labels)`, or the
        `best_score` of a run.
    - `count`: the number of members to select.
    - `mode`: `"min"` if lower scores are better, `"max"` if higher; for a run's `best_score`, `run.mode`.

    **Returns:** convex weights `(members,)`, each 0 or `1 / count`.

    ```python
    ee.combine.weights.elites(jnp.array([0.3, 0.1, 0.2]), 2, mode="min")  # [0.0, 0.5, 0.5]
    ```
    """
    check_word(mode, "mode", ("min", "max"))
    checked, count = check_scores_of_members(scores, count)
    dtype = jnp.float64 if checked.dtype == jnp.float64 else jnp.float32
    host = concrete(scores)  # in its own precision
    if host is None:
        return _elites(_ascending(checked, mode), count, dtype)
    rank = np.argsort(np.argsort(_ascending(host, mode), kind="stable"))
    return jnp.asarray(np.where(rank < count, 1 / count, 0), dtype)


def _ascending(scores: Any, mode: str) -> Any:
    """The scores, negated if higher is better."""
    if mode == "min":
        return scores
    return -scores if jnp.issubdtype(scores.dtype, jnp.floating) else ~scores  # also for unsigned integers


@partial(jax.jit, static_argnames=("count", "dtype"))
def _elites(scores: Real[Array, " members"], count: int, dtype: Any) -> Float[Array, " members"]:
    rank = jnp.argsort(jnp.argsort(scores, stable=True))  # NaN is sorted last
    return jnp.where(rank < count, jnp.asarray(1 / count, dtype), jnp.asarray(0, dtype))


def diverse(
    similarity: Float[ArrayLike, "members members"], count: int, *, quality: Real[ArrayLike, " members"] | None = None
) -> Float[Array, " members"]:
    """Equal weights for `count` members that differ from each other, zero for the others.

    The greedy mode of a determinantal point process: each step adds the member that increases the determinant of
    $q_i S_{ij} q_j$ over the selected members most. At equal quality, it is least explained by those selected.

    **Arguments:**

    - `similarity`: $S$, a positive semi-definite matrix `(members, members)` from held-out rows: for classes
        `1 - uncertainty.pairwise_disagreement(logits)`, for real targets the correlations of the members' errors.
    - `count`: the number of members to select.
    - `quality`: $q$, non-negative, `(members,)`, higher is better; equal by default. For example
        `jnp.exp(log_scores.mean(axis=1))`, or a power of it to give diversity less weight.

    **Returns:** convex weights `(members,)`, each 0 or `1 / count`.

    ```python
    logits = jnp.array([[[2.0, 0.0]] * 2, [[3.0, 0.0]] * 2, [[2.0, 0.0], [0.0, 2.0]]])
    similarity = 1 - ee.uncertainty.pairwise_disagreement(logits)
    ee.combine.weights.diverse(similarity, 2)  # [0.5, 0.0, 0.5]: the first two vote alike
    ```

    ??? cite
        [Kulesza and Taskar, 2012](https://arxiv.org/abs/1207.6083); the algorithm: [Chen et al., NeurIPS
        2018](https://arxiv.org/abs/1709.05135)
    """
    matrix, number, scale = check_similarity(similarity, count, quality)
    return _diverse(matrix, scale, number)


@partial(jax.jit, static_argnames="count")
def _diverse(
    similarity: Float[Array, "members members"], quality: Float[Array, " members"], count: int
) -> Float[Array, " members"]:
    """Computes one row of the Cholesky factor per step; `left` is the variance not yet explained."""
    scaled = quality[:, None] * similarity * quality[None]
    rounding = 8 * jnp.finfo(scaled.dtype).eps * jnp.max(jnp.diagonal(scaled))

    def step(carry: tuple[Array, Array, Array], number: Any) -> tuple[tuple[Array, Array, Array], None]:
        rows, left, selected = carry
        known = jnp.where(left > rounding, left, 0)
        chosen = jnp.argmax(jnp.where(selected, -1, known))
        pivot = jnp.sqrt(jnp.maximum(left[chosen], rounding))
        explained = jnp.matmul(rows.T, rows[:, chosen], precision="highest")
        row = (scaled[chosen] - explained) / jnp.where(pivot > 0, pivot, 1)
        return (rows.at[number].set(row), left - row**2, selected.at[chosen].set(True)), None

    none = jnp.zeros(similarity.shape[0], bool)
    start = jnp.zeros((count, similarity.shape[0]), scaled.dtype), jnp.diagonal(scaled), none
    (_, _, selected), _ = jax.lax.scan(step, start, jnp.arange(count))
    return jnp.where(selected, jnp.asarray(1 / count, scaled.dtype), 0)


class Sparse(NamedTuple):
    """The members with enough weight.

    - `members`: their indices `(left,)`, in increasing order.
    - `weights`: their weights `(left,)`, which sum to one.
    """

    members: Int32[Array, " left"]
    weights: Float[Array, " left"]


def sparsify(
    weights: Real[ArrayLike, " members"], *, above: float | int = 0.0, num_members: int | None = None
) -> Sparse:
    """Keeps the members with enough weight, and normalises their weights. Not inside `jax.jit`.

    **Arguments:**

    - `weights`: `(members,)`.
    - `above`: keeps members whose normalised weight exceeds this. Members of weight zero are always removed.
    - `num_members`: keeps at most this many, those with the largest weights.

    **Returns:** [`eqx_ensemble.combine.weights.Sparse`][].

    ```python
    ee.combine.weights.sparsify(jnp.array([0.5, 0.01, 0.0, 0.49]), above=0.05)
    # members [0, 3]
    ```
    """
    exact = check_sparsify(weights, above, num_members)
    order = np.argsort(-exact, kind="stable")
    left = np.sort(order[: int((exact > above).sum())][:num_members])
    dtype = jnp.float64 if jnp.asarray(from_foreign(weights)).dtype == jnp.float64 else jnp.float32
    return Sparse(jnp.asarray(left, jnp.int32), jnp.asarray(exact[left] / exact[left].sum(), dtype))


class Greedy(NamedTuple):
    """The members selected greedily, and the score after each step.

    - `weights`: `(members,)`, `counts` divided by their sum.
    - `counts`: `(members,)`, how often each member is in the best ensemble.
    - `order`, `scores`: `(steps,)`, the member selected in each step, and the score after it.
    """

    weights: Float[Array, " members"]
    counts: Int32[Array, " members"]
    order: Int32[Array, " steps"]
    scores: Float[Array, " steps"]


def greedy(
    predictions: Float[ArrayLike, "members ..."],
    score: Callable[[Array], Any] | Literal["log"] = "log",
    *,
    num_steps: int = 50,
    num_initial: int = 0,
    row_weights: RowWeightsLike | None = None,
) -> Greedy:
    """Weights by greedy ensemble selection: each step adds the member that improves the mean prediction most.

    Members are selected with replacement, and the best ensemble of all steps is returned. For the log score
    [`eqx_ensemble.combine.weights.stacking`][] finds the optimum.

    **Arguments:**

    - `predictions`: `(members, ...)`, whose mean over members is the ensemble's prediction. For `score="log"`, log
        scores `(members, *batch)` as for [`eqx_ensemble.combine.weights.stacking`][]: probabilities are averaged.
    - `score`: `"log"` for the mean negative log score, or a function that JAX can trace, from the mean prediction
        `(...)` to a scalar; lower is better.
    - `num_steps`: the number of members to select.
    - `num_initial`: the number of steps that first select the best single members, against overfitting.
    - `row_weights`: for `"log"` only.

    **Returns:** [`eqx_ensemble.combine.weights.Greedy`][].

    ```python
    targets = jnp.array([1.0, 2.0, 3.0])
    predictions = jnp.array([[1.3, 2.3, 3.3], [0.9, 1.9, 2.9], [9.0, 9.0, 9.0]])
    found = ee.combine.weights.greedy(
        predictions, lambda mean: jnp.mean((mean - targets) ** 2), num_steps=10
    )
    found.counts  # [1, 3, 0]: 0.3 - 3 * 0.1 = 0
    ```

    ??? cite
        [Caruana et al., ICML 2004](https://doi.org/10.1145/1015330.1015432)
    """
    checked = check_values("predictions", predictions)
    own = check_greedy(score, row_weights, num_steps, num_initial, checked.shape[0])
    if own is None:
        logs, own_weights = check_log_scores(predictions, row_weights)
        return _greedy_log(logs, own_weights, num_steps, num_initial)
    one = jax.eval_shape(own, jax.ShapeDtypeStruct(checked.shape[1:], checked.dtype))
    if (shape := jnp.shape(one)) != ():
        needs = "a `score` that returns one number for one combined prediction"
        raise value_error(needs, f"got shape {shape}", "Return the mean over rows.")
    judge = lambda total, count: jnp.asarray(own(total / count), checked.dtype)
    return _select(checked, jnp.zeros_like(checked[0]), jnp.add, judge, num_steps, num_initial)


@partial(jax.jit, static_argnames=("num_steps", "num_initial"))
def _greedy_log(
    logs: Float[Array, " members *batch"], row_weights: Float[Array, "*batch"] | None, num_steps: int, num_initial: int
) -> Greedy:
    counted = jnp.any(logs > -jnp.inf, axis=0)
    own = jnp.where(counted, jnp.ones(counted.shape, logs.dtype) if row_weights is None else row_weights, 0)
    logs = jnp.where(counted[None], logs, 0)
    level = jnp.max(logs, axis=0)
    total_weight = jnp.sum(own)
    # The log score of rows that no selected member explains: among infinite scores, fewer such rows are better.
    impossible = float(jnp.finfo(logs.dtype).min) / (2 * counted.size)

    def judge(total: Array, count: Array) -> Array:
        return -jnp.sum(own * jnp.maximum(total - jnp.log(count), impossible)) / total_weight

    # Differences from the best member of each row: the common part is added to the scores at the end.
    nothing = jnp.full(level.shape, -jnp.inf, logs.dtype)
    found = _select(logs - level[None], nothing, jnp.logaddexp, judge, num_steps, num_initial)
    least = jnp.min(jnp.where(own > 0, own, jnp.inf))
    scores = jnp.where(found.scores < -0.5 * impossible * least / total_weight, found.scores, jnp.inf)
    return found._replace(scores=scores - jnp.sum(own * level) / total_weight)


def _select(
    predictions: Float[Array, "members ..."],
    nothing: Float[Array, "..."],
    add: Callable[[Array, Array], Array],
    judge: Callable[[Array, Array], Array],
    num_steps: int,
    num_initial: int,
) -> Greedy:
    """Adds one member per step to a running total, initially `nothing`; `judge` scores the total and its count."""
    num_members = predictions.shape[0]
    judge_all = lambda total, count: jax.vmap(lambda one: judge(add(total, one), count))(predictions)
    known = lambda scores: jnp.where(jnp.isnan(scores), jnp.inf, scores)
    alone = jnp.argsort(known(judge_all(nothing, jnp.ones((), predictions.dtype))), stable=True)

    def step(total: Array, number: Array) -> tuple[Array, tuple[Array, Array]]:
        scores = known(judge_all(total, (number + 1).astype(predictions.dtype)))
        first = alone[jnp.minimum(number, num_members - 1)]
        chosen = jnp.where(number < num_initial, first, jnp.argmin(scores)).astype(jnp.int32)
        return add(total, predictions[chosen]), (chosen, scores[chosen])

    _, (order, scores) = jax.lax.scan(step, nothing, jnp.arange(num_steps))
    # The initial members are a unit: an ensemble of only some of them was never selected.
    eligible = jnp.arange(num_steps) >= num_initial - 1
    best = jnp.argmin(jnp.where(eligible, scores, jnp.inf))
    taken = (jnp.arange(num_steps) <= best).astype(jnp.int32)
    counts = jnp.zeros(num_members, jnp.int32).at[order].add(taken)
    return Greedy(counts.astype(predictions.dtype) / (best + 1).astype(predictions.dtype), counts, order, scores)
