from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int32

from ..._check import check_values
from ._check import check_greedy, check_log_scores, check_score_value


class Greedy(NamedTuple):
    """The members selected greedily, and the score after each step.

    - `weights`: `(members,)`, `counts` divided by their sum.
    - `counts`: how often each member is in the best ensemble of all steps, `(members,)`.
    - `order`: the member selected in each step, `(steps,)`.
    - `scores`: the score after each step, `(steps,)`; lower is better.
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
    mask: Bool[ArrayLike, "*batch"] | None = None,
) -> Greedy:
    r"""Weights by greedy ensemble selection: each step adds the member that improves the mean prediction most.

    Any score can be optimised. Members are selected with replacement: weights are multiples of one over the number of
    selected members. The best ensemble of all steps is returned, not the last. A step costs as much as scoring every
    member once. For the log score [`eqx_ensemble.combine.weights.stacking`][] finds the optimal weights.

    **Arguments:**

    - `predictions`: predictions for held-out rows, `(members, ...)`, whose mean over members is the ensemble's
        prediction. For `score="log"`, the members' log scores `(members, *batch)` as for
        [`eqx_ensemble.combine.weights.stacking`][]: probabilities are averaged.
    - `score`: `"log"` for the mean negative log score, or a function that JAX can trace, from the mean prediction
        `(...)` to a scalar; lower is better. NaN is worse than any number.
    - `num_steps`: the number of members to select.
    - `num_initial`: the number of initial steps that select the best single members, each once. A few such steps
        prevent overfitting while the ensemble has one or two members.
    - `mask`: for `"log"`, booleans `(*batch,)`; rows where it is `False` are ignored, even if they contain NaN.

    **Returns:**

    [`eqx_ensemble.combine.weights.Greedy`][]. Where members tie, the first is selected; where ensembles tie, the
    smallest. The selection is not differentiable.

    **Raises:**

    - `TypeError` for predictions that are not floating-point.
    - `ValueError` for counts out of range, a score that is not a scalar, a `mask` with a score function, and invalid
        log scores as in [`eqx_ensemble.combine.weights.stacking`][].

    ```python
    targets = jnp.array([1.0, 2.0, 3.0])
    predictions = jnp.array([[1.3, 2.3, 3.3], [0.9, 1.9, 2.9], [9.0, 9.0, 9.0]])
    found = ee.combine.weights.greedy(
        predictions, lambda mean: jnp.mean((mean - targets) ** 2), num_steps=10
    )
    found.counts  # [1, 3, 0]: 0.3 - 3 * 0.1 = 0
    ```

    ??? cite
        [Ensemble Selection from Libraries of Models](https://doi.org/10.1145/1015330.1015432)

        ```bibtex
        @inproceedings{caruana2004ensemble,
            author={Rich Caruana and Alexandru Niculescu-Mizil and Geoff Crew and Alex Ksikes},
            title={Ensemble Selection from Libraries of Models},
            booktitle={International Conference on Machine Learning},
            year={2004},
        }
        ```
    """
    name = "combine.weights.greedy"
    checked = check_values(name, "predictions", predictions)
    own = check_greedy(name, score, mask, num_steps, num_initial, checked.shape[0])
    if own is None:
        logs, rows = check_log_scores(name, predictions, mask)
        return _greedy_log(logs, rows, num_steps, num_initial)
    one = jax.eval_shape(own, jax.ShapeDtypeStruct(checked.shape[1:], checked.dtype))
    check_score_value(name, jnp.shape(one))
    judge = lambda total, count: jnp.asarray(own(total / count), checked.dtype)
    return _select(checked, jnp.zeros_like(checked[0]), jnp.add, judge, num_steps, num_initial)


@partial(jax.jit, static_argnames=("num_steps", "num_initial"))
def _greedy_log(
    logs: Float[Array, " members *batch"], mask: Bool[Array, "*batch"] | None, num_steps: int, num_initial: int
) -> Greedy:
    counted = jnp.any(logs > -jnp.inf, axis=0)
    counted = counted if mask is None else counted & mask
    logs = jnp.where(counted[None], logs, 0)
    level = jnp.max(logs, axis=0)
    num_rows = jnp.sum(counted).astype(logs.dtype)
    # The log score of rows that no selected member explains: among infinite scores, fewer such rows are better.
    impossible = float(jnp.finfo(logs.dtype).min) / (2 * counted.size)

    def judge(total: Array, count: Array) -> Array:
        return -jnp.sum(jnp.where(counted, jnp.maximum(total - jnp.log(count), impossible), 0)) / num_rows

    # Differences from the best member of each row: the common part is added to the scores at the end.
    nothing = jnp.full(level.shape, -jnp.inf, logs.dtype)
    found = _select(logs - level[None], nothing, jnp.logaddexp, judge, num_steps, num_initial)
    scores = jnp.where(found.scores < -0.5 * impossible / num_rows, found.scores, jnp.inf)
    return found._replace(scores=scores - jnp.sum(level) / num_rows)


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
