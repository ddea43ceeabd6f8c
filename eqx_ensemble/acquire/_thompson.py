from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int32, Key, Real

from .. import _keys
from .._check import RowWeightsLike, check_flag, check_positive_int
from ._check import Mode, check_samples, check_sign, check_size, check_start
from ._greedy import Pool, argmax


def thompson(
    predictions: Float[ArrayLike, "members candidates"],
    num_picks: int,
    *,
    mode: Mode,
    replace: bool = False,
    weights: Real[ArrayLike, " members"] | None = None,
    row_weights: RowWeightsLike | None = None,
    key: Any,
) -> Int32[Array, " picks"]:
    sign, replace = check_sign(mode), check_flag(replace, "replace")
    values, convex, rows = check_samples(predictions, weights, row_weights)
    may_pick = check_start(values.shape[1], values.dtype, rows, None, None, None).may_pick
    check = check_positive_int if replace else partial(check_size, may_pick=may_pick)
    return _picks(sign * values, convex, may_pick, check(num_picks, "num_picks"), replace, _keys.root(key))


@partial(jax.jit, static_argnames=("num_picks", "replace"))
def _picks(
    values: Float[Array, "members candidates"],
    weights: Float[Array, " members"] | None,
    may_pick: Bool[Array, " candidates"],
    num_picks: int,
    replace: bool,  # noqa: FBT001
    key: Key[Array, ""],
) -> Int32[Array, " picks"]:
    members = jax.random.choice(key, values.shape[0], (num_picks,), p=weights)

    def step(pool: Pool, member: Array) -> tuple[Pool, Array]:
        index = argmax(values[member], pool.may_pick)
        return pool if replace else pool.remove(index), index

    pool = Pool(may_pick, None, None, jnp.zeros((), values.dtype))
    return jax.lax.scan(step, pool, members)[1]
