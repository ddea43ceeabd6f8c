from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Integer, Real

from .._check import RowWeightsLike
from .._weighting import blank_unweighted, weighted_mean
from ._check import Mode, check_best, check_samples, check_sign, check_size, check_start
from ._greedy import Picks, Pool


def batch_expected_improvement(
    predictions: Float[ArrayLike, "members candidates"],
    size: int,
    *,
    best: Real[ArrayLike, "..."],
    mode: Mode,
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: RowWeightsLike | None = None,
    chosen: Integer[ArrayLike, " chosen"] | None = None,
    costs: Real[ArrayLike, " candidates"] | None = None,
    budget: Real[ArrayLike, ""] | None = None,
) -> Picks:
    return _batch(predictions, size, best, mode, weights, row_weights, chosen, costs, budget, count=False)


def batch_probability_of_improvement(
    predictions: Float[ArrayLike, "members candidates"],
    size: int,
    *,
    best: Real[ArrayLike, "..."],
    mode: Mode,
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: RowWeightsLike | None = None,
    chosen: Integer[ArrayLike, " chosen"] | None = None,
    costs: Real[ArrayLike, " candidates"] | None = None,
    budget: Real[ArrayLike, ""] | None = None,
) -> Picks:
    return _batch(predictions, size, best, mode, weights, row_weights, chosen, costs, budget, count=True)


def _batch(
    predictions: ArrayLike,
    size: int,
    best: ArrayLike,
    mode: Mode,
    weights: ArrayLike | None,
    row_weights: ArrayLike | None,
    chosen: ArrayLike | None,
    costs: ArrayLike | None,
    budget: ArrayLike | None,
    *,
    count: bool,
) -> Picks:
    sign = check_sign(mode)
    values, convex, rows = check_samples(predictions, weights, row_weights)
    better = sign * (values - check_best(best, values))
    start = check_start(values.shape[1], values.dtype, rows, chosen, costs, budget)
    size = check_size(size, "size", start.may_pick)
    each = (better > 0).astype(values.dtype) if count else jnp.maximum(better, 0)
    pool = Pool(start.may_pick, start.costs, start.budget, jnp.zeros((), values.dtype))
    return Picks(*_pick_all(each, convex, start.chosen, pool, size))


@partial(jax.jit, static_argnames="size")
def _pick_all(
    each: Float[Array, "members candidates"],
    weights: Float[Array, " members"] | None,
    chosen: Integer[Array, " chosen"],
    pool: Pool,
    size: int,
) -> tuple[Array, Array]:
    """The greedy maximum of the mean over members of the largest of the picks' values, which are not negative."""
    each = blank_unweighted(each, weights)
    taken = jnp.where((chosen < 0)[None], 0, each[:, chosen])
    reached = jnp.max(taken, axis=1, initial=0)

    def step(carry: tuple[Array, Pool], _: None) -> tuple[tuple[Array, Pool], tuple[Array, Array]]:
        reached, pool = carry
        gains = weighted_mean(jnp.maximum(each - reached[:, None], 0), weights)
        index, pool = pool.pick(gains)
        reached = jnp.where(index < 0, reached, jnp.maximum(reached, each[:, index]))
        return (reached, pool), (index, weighted_mean(reached, weights))

    return jax.lax.scan(step, (reached, pool), None, size)[1]
