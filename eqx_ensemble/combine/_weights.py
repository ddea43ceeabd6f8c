from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from .._boundary import array_function, kinds
from .._brief import brief_repr
from .._caller import caller
from .._check import concrete, value_error
from .._warnings import warn


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

    def __repr__(self) -> str:
        return brief_repr(self)


@array_function
def greedy(
    predictions: kinds.Members, score: Callable[[Array], Any], *, num_steps: int = 50, num_initial: int = 1
) -> Greedy:
    """Greedy selection: each step adds the member that improves the score of the mean prediction most.

    Members are selected with replacement, and the best ensemble of all steps is returned. Of members that tie, the
    first is selected; NaN scores are the worst. For the log score [`eqx_ensemble.combine.stacking`][] finds the
    optimum.

    **Arguments:**

    - `predictions`: `(members, ...)`, whose mean over members is the ensemble's prediction; of rows that no member was
        trained on.
    - `score`: a function that JAX can trace, from the mean prediction `(...)` to a scalar; lower is better.
    - `num_steps`: the number of members to select.
    - `num_initial`: the number of steps that first select the best single members, against overfitting.

    **Returns:** [`eqx_ensemble.combine.Greedy`][].

    ```python
    targets = jnp.array([1.0, 2.0, 3.0])
    predictions = jnp.array([[1.3, 2.3, 3.3], [0.9, 1.9, 2.9], [9.0, 9.0, 9.0]])
    mse = lambda mean: jnp.mean((mean - targets) ** 2)
    found = ee.combine.greedy(predictions, mse, num_steps=10)
    found.counts  # [1, 3, 0]: 0.3 - 3 * 0.1 = 0
    ```

    ??? cite
        [Caruana et al., ICML 2004](https://doi.org/10.1145/1015330.1015432)
    """

    def score_all(total: Array, count: Any) -> Array:
        scores = jax.vmap(lambda one: jnp.asarray(score((total + one) / count), predictions.dtype))(predictions)
        if scores.ndim > 1:
            got = f"got shape {scores.shape[1:]}"
            raise value_error("a `score` that returns one number", got, "Return the mean over rows.")
        return jnp.where(jnp.isnan(scores), jnp.inf, scores)

    nothing = jnp.zeros_like(predictions[0])
    alone = jnp.argsort(score_all(nothing, 1), stable=True)

    def step(total: Array, number: Array) -> tuple[Array, tuple[Array, Array]]:
        scores = score_all(total, (number + 1).astype(predictions.dtype))
        first = alone[jnp.minimum(number, len(predictions) - 1)]
        chosen = jnp.where(number < num_initial, first, jnp.argmin(scores)).astype(jnp.int32)
        return total + predictions[chosen], (chosen, scores[chosen])

    _, (order, scores) = jax.lax.scan(step, nothing, jnp.arange(num_steps))
    # The initial members are a unit: an ensemble of only some of them was never selected.
    best = jnp.argmin(jnp.where(jnp.arange(num_steps) >= num_initial - 1, scores, jnp.inf))
    taken = (jnp.arange(num_steps) <= best).astype(jnp.int32)
    counts = jnp.zeros(len(predictions), jnp.int32).at[order].add(taken)
    return Greedy(counts.astype(predictions.dtype) / (best + 1).astype(predictions.dtype), counts, order, scores)


class Stacking(NamedTuple):
    """Weights, and a bound on their distance from the optimum.

    - `weights`: `(members,)`.
    - `gap`: no other weights have a mean log score that is larger by more than this, in nats.
    - `num_steps`: the number of steps.
    """

    weights: Float[Array, " members"]
    gap: Float[Array, ""]
    num_steps: Int32[Array, ""]

    def __repr__(self) -> str:
        return brief_repr(self)


_MOST_STEPS = 100


def _tolerance(given: dict[str, Any]) -> float:
    exact = given["log_scores"].dtype == jnp.float64
    return given["tolerance"] if given["tolerance"] is not None else 1e-10 if exact else 1e-6


def _warn_of_gap(found: Stacking, given: dict[str, Any]) -> Stacking:
    host, tolerance = concrete(found.gap), _tolerance(given)
    if host is not None and not (host <= tolerance).all():
        warn(
            f"`{caller()}` ended {host.max():.2g} nats at most from the best mean log score, above its "
            f"tolerance {tolerance:.2g}.\nRaise `tolerance`, or compute in float64."
        )
    return found


@array_function(finish=_warn_of_gap)
def stacking(
    log_scores: kinds.LogScores, *, row_weights: kinds.RowWeights = None, tolerance: float | None = None
) -> Stacking:
    r"""Stacking of predictive distributions: the weights whose mixture of the members has the best mean log score.

    Maximises $f(w) = \frac1n \sum_i \log \sum_m w_m p_{mi}$ over convex weights, where $p_{mi}$ is the probability or
    density of the observation in row $i$ under member $m$, by a primal-dual interior-point method. The problem is
    convex: no weights improve on $w$ by more than the `gap` $\max_m \nabla_m f(w) - 1$. Members that do not help have
    weight zero: `ensemble[weights > 0]` is the ensemble without them. For other scores see
    [`eqx_ensemble.combine.greedy`][].

    **Arguments:**

    - `log_scores`: natural logarithms of $p_{mi}$, `(members, *batch)`, of rows that no member was trained on. A row
        where every member has -inf changes nothing, because no weights explain it.
    - `row_weights`: numbers `(*batch,)`, or booleans; rows of zero or `False` are ignored, even if NaN.
    - `tolerance`: the largest `gap`, in nats, above which it warns; by default 1e-6 in float32 and 1e-10 in float64.

    **Returns:** [`eqx_ensemble.combine.Stacking`][]. It is not differentiable.

    ```python
    labels = jnp.arange(60) % 3
    logits = jax.random.normal(key, (4, 60, 3))  # members, rows, classes
    log_scores = -ee.scores.per_member(ee.scores.nll, logits, labels, reduction="none")
    found = ee.combine.stacking(log_scores)
    ee.combine.mixture(logits, weights=found.weights)
    ```

    ??? cite
        [Yao et al., Bayesian Analysis 2018](https://doi.org/10.1214/17-BA1091)
    """
    num_members, aim = len(log_scores), _tolerance({"log_scores": log_scores, "tolerance": tolerance})
    logs = jnp.reshape(log_scores, (num_members, -1))
    own = jnp.ones(logs.shape[1], logs.dtype) if row_weights is None else jnp.ravel(row_weights).astype(logs.dtype)
    logs = jnp.where(jnp.all(logs == -jnp.inf, axis=0)[None], 0, logs)  # all weights explain such a row equally
    likelihood = _blocks(jnp.exp(logs - jnp.max(logs, axis=0)[None]), fill=1)
    share = _blocks(own[None] / jnp.sum(own), fill=0)[:, 0]

    equal = jnp.full(num_members, 1 / num_members, logs.dtype)
    start = _Point(equal, jnp.ones_like(equal), jnp.int32(0), equal, _gap(likelihood, share, equal))
    end = jax.lax.while_loop(
        lambda point: (point.gap > aim) & (point.step < _MOST_STEPS),
        lambda point: _step(likelihood, share, point),
        start,
    )
    # Interior weights are never zero: those smaller than their slack converge to zero.
    cleared = jnp.where(end.best < 1 - _gradient(likelihood, share, end.best), 0, end.best)
    cleared = cleared / jnp.sum(cleared)
    gap = _gap(likelihood, share, cleared)
    good = gap <= jnp.maximum(end.gap, aim)
    return Stacking(jnp.where(good, cleared, end.best), jnp.where(good, gap, end.gap), end.step)


class _Point(NamedTuple):
    weights: Float[Array, " members"]
    slack: Float[Array, " members"]  # the dual variables: one minus the gradient at the solution
    step: Int32[Array, ""]
    best: Float[Array, " members"]
    gap: Float[Array, ""]  # of the best


def _step(likelihood: Float[Array, "blocks members rows"], share: Float[Array, "blocks rows"], point: _Point) -> _Point:
    """One Newton step towards a tenth of the complementarity gap, or one expectation-maximisation step if it fails."""
    weights, slack = point.weights, point.slack
    mixed = _mixture(likelihood, weights)
    gradient = _gradient(likelihood, share, weights)
    value = _mean_log(share, mixed)

    # Scaled by the square roots of the weights, the system stays well conditioned as weights go to zero.
    root = jnp.sqrt(weights)
    scaled = root[None, :, None] * likelihood * (jnp.sqrt(share) / mixed)[:, None]
    curvature = jnp.einsum("bmr,bnr->mn", scaled, scaled, precision="highest") + jnp.diag(slack)
    aim = 0.1 * jnp.dot(weights, slack) / weights.size
    factor = jax.scipy.linalg.cho_factor(curvature)
    change = root * jax.scipy.linalg.cho_solve(factor, root * (gradient - 1) + aim / root)
    slack_change = aim / weights - slack - slack / weights * change

    moved = weights + _length(weights, change) * change
    moved = moved / jnp.sum(moved)
    new_slack = slack + _length(slack, slack_change) * slack_change
    rounding = 8 * jnp.finfo(weights.dtype).eps * (1 + jnp.abs(value))
    better = _mean_log(share, _mixture(likelihood, moved)) >= value - rounding
    good = better & jnp.all(jnp.isfinite(new_slack))
    moved = jnp.where(good, moved, weights * gradient)
    gap = _gap(likelihood, share, moved)
    return _Point(
        moved,
        jnp.where(good, new_slack, slack),
        point.step + 1,
        jnp.where(gap < point.gap, moved, point.best),
        jnp.minimum(gap, point.gap),
    )


def _blocks(values: Float[Array, "members rows"], *, fill: int) -> Float[Array, "blocks members block_rows"]:
    """The rows in blocks: the rounding error of one long float32 sum exceeds the gap to be verified."""
    num_members, num_rows = values.shape
    width = min(512, num_rows)
    padded = jnp.pad(values, ((0, 0), (0, -num_rows % width)), constant_values=fill)
    return jnp.swapaxes(jnp.reshape(padded, (num_members, -1, width)), 0, 1)


def _mixture(
    likelihood: Float[Array, "blocks members rows"], weights: Float[Array, " members"]
) -> Float[Array, "blocks rows"]:
    return jnp.einsum("m,bmr->br", weights, likelihood, precision="highest")


def _mean_log(share: Float[Array, "blocks rows"], mixed: Float[Array, "blocks rows"]) -> Float[Array, ""]:
    return jnp.sum(jnp.einsum("br,br->b", share, jnp.log(mixed), precision="highest"))


def _gradient(
    likelihood: Float[Array, "blocks members rows"],
    share: Float[Array, "blocks rows"],
    weights: Float[Array, " members"],
) -> Float[Array, " members"]:
    per_block = jnp.einsum("bmr,br->bm", likelihood, share / _mixture(likelihood, weights), precision="highest")
    gradient = jnp.sum(per_block, axis=0)
    # Its weighted mean is one: rounding errors of the sums are nearly equal for all members.
    return gradient / jnp.dot(weights, gradient)


def _gap(
    likelihood: Float[Array, "blocks members rows"],
    share: Float[Array, "blocks rows"],
    weights: Float[Array, " members"],
) -> Float[Array, ""]:
    return jnp.max(_gradient(likelihood, share, weights)) - 1


def _length(values: Float[Array, " members"], change: Float[Array, " members"]) -> Float[Array, ""]:
    """The step length, at most 1, that keeps positive values positive."""
    falls = change < 0
    return jnp.minimum(1, 0.99 * jnp.min(jnp.where(falls, -values / jnp.where(falls, change, -1), jnp.inf)))
