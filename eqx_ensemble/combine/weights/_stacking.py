from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int, Int32

from ..._caller import caller
from ..._check import RowWeightsLike, check_number, check_positive_int, concrete
from ..._warnings import warn
from ._check import check_log_scores


def bayesian(
    log_scores: Float[ArrayLike, " members *batch"], *, row_weights: RowWeightsLike | None = None
) -> Float[Array, " members"]:
    r"""Weights of Bayesian model averaging: the posterior probabilities of the members under a uniform prior.

    $w_m \propto \exp \sum_i \ell_{mi}$ with the log-likelihood $\ell_{mi}$ of row $i$ under member $m$. One member is
    assumed to be the true model: with many rows, nearly all weight goes to the single best member. If none is,
    [`eqx_ensemble.combine.weights.stacking`][] predicts better.

    **Arguments:**

    - `log_scores`: log evidences `(members,)`, or log-likelihoods `(members, *batch)` of rows that no member was
        trained on. For another prior pass `log_evidences + jnp.log(prior)`.
    - `row_weights`: numbers `(*batch,)`, or booleans. A row of weight 2 counts twice.

    **Returns:** convex weights `(members,)`.

    ```python
    ee.combine.weights.bayesian(jnp.log(jnp.array([2.0, 1.0, 1.0])))  # [0.5, 0.25, 0.25]
    ```

    ??? cite
        [Hoeting et al., Statistical Science 1999](https://doi.org/10.1214/ss/1009212519)
    """
    return _bayesian(*check_log_scores(log_scores, row_weights, relative=False))


@jax.jit
def _bayesian(
    logs: Float[Array, " members *batch"], row_weights: Float[Array, "*batch"] | None
) -> Float[Array, " members"]:
    weigh = lambda values: values if row_weights is None else values * row_weights[None]
    total = lambda values: jnp.sum(weigh(values), axis=tuple(range(1, logs.ndim)))
    best = jnp.argmax(total(logs - jnp.max(logs, axis=0)[None]))
    # Relative to the best member, not to the best of each row, sums over many rows stay small and accurate.
    return jax.nn.softmax(total(logs - jax.lax.stop_gradient(logs[best])[None]))


class Stacking(NamedTuple):
    """Weights, and a bound on their distance from the optimum.

    - `weights`: `(members,)`.
    - `gap`: no other weights have a mean log score that is larger by more than this, in nats.
    - `num_steps`: the number of steps.
    """

    weights: Float[Array, " members"]
    gap: Float[Array, ""]
    num_steps: Int32[Array, ""]


def stacking(
    log_scores: Float[ArrayLike, " members *batch"],
    *,
    row_weights: RowWeightsLike | None = None,
    tolerance: float | None = None,
    max_steps: int = 100,
) -> Stacking:
    r"""Stacking of predictive distributions: the weights whose mixture of the members has the best mean log score.

    Maximises $f(w) = \frac1n \sum_i \log \sum_m w_m p_{mi}$ over convex weights, where $p_{mi}$ is the probability or
    density of the observation in row $i$ under member $m$, by a primal-dual interior-point method. The problem is
    convex: no weights improve on $w$ by more than the `gap` $\max_m \nabla_m f(w) - 1$. Members that do not help have
    weight zero.

    **Arguments:**

    - `log_scores`: natural logarithms of $p_{mi}$, `(members, *batch)`.
    - `tolerance`: the largest `gap`, in nats; by default 1e-6 in float32 and 1e-10 in float64.
    - `max_steps`: after these the search ends with a warning; 5 to 15 usually suffice.

    **Returns:** [`eqx_ensemble.combine.weights.Stacking`][].

    **Raises:** `ValueError` for log scores that are NaN or +inf, and rows where every member has -inf.

    ```python
    labels = jnp.arange(60) % 3
    logits = jax.random.normal(key, (4, 60, 3))  # members, rows, classes
    log_scores = -ee.scores.per_member(ee.scores.nll, logits, labels, reduction="none")
    found = ee.combine.weights.stacking(log_scores)
    ee.combine.mixture(logits, weights=found.weights)
    ```

    ??? cite
        [Yao et al., Bayesian Analysis 2018](https://doi.org/10.1214/17-BA1091)
    """
    if tolerance is not None:
        check_number(tolerance, "tolerance", least=0)
    logs, own = check_log_scores(log_scores, row_weights)
    if tolerance is None:
        tolerance = 1e-10 if logs.dtype == jnp.float64 else 1e-6
    tolerance = float(tolerance)
    found = _stacking(logs, own, tolerance, check_positive_int(max_steps, "max_steps"))
    host = concrete(found.gap)
    if host is not None and not (host <= tolerance).all():
        warn(
            f"`{caller()}` ended {host.max():.2g} nats at most from the best mean log score, above its "
            f"tolerance {tolerance:.2g}.\nRaise `tolerance` or `max_steps`, or compute in float64."
        )
    return found


class _Point(NamedTuple):
    weights: Float[Array, " members"]
    slack: Float[Array, " members"]  # the dual variables: one minus the gradient at the solution
    step: Int32[Array, ""]
    best: Float[Array, " members"]
    gap: Float[Array, ""]  # of the best


_BLOCK = 512
"""The number of rows in a partial sum: the rounding error of a long float32 sum exceeds the gap to be verified."""


@jax.jit
def _stacking(
    logs: Float[Array, " members *batch"],
    row_weights: Float[Array, "*batch"] | None,
    tolerance: float | Float[Array, ""],
    max_steps: int | Int[Array, ""],
) -> Stacking:
    num_members = logs.shape[0]
    logs = jnp.reshape(logs, (num_members, -1))
    counted = jnp.any(logs > -jnp.inf, axis=0)
    own = jnp.where(counted, jnp.ones(counted.shape, logs.dtype) if row_weights is None else jnp.ravel(row_weights), 0)
    logs = jnp.where(counted[None], logs, 0)
    likelihood = _blocks(jnp.exp(logs - jnp.max(logs, axis=0)[None]), fill=1)
    share = _blocks(own[None] / jnp.sum(own), fill=0)[:, 0]

    equal = jnp.full(num_members, 1 / num_members, logs.dtype)
    start = _Point(equal, jnp.ones_like(equal), jnp.int32(0), equal, _gap(likelihood, share, equal))
    end = jax.lax.while_loop(
        lambda point: (point.gap > tolerance) & (point.step < max_steps),
        lambda point: _step(likelihood, share, point),
        start,
    )
    # Interior weights are never zero: those smaller than their slack converge to zero.
    slack = 1 - _gradient(likelihood, share, end.best)
    cleared = jnp.where(end.best < slack, 0, end.best)
    cleared = cleared / jnp.sum(cleared)
    gap = _gap(likelihood, share, cleared)
    good = gap <= jnp.maximum(end.gap, tolerance)
    return Stacking(jnp.where(good, cleared, end.best), jnp.where(good, gap, end.gap), end.step)


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
    num_members, num_rows = values.shape
    width = min(_BLOCK, num_rows)
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
