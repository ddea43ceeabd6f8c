from functools import partial
from typing import Any

import jax
from jaxtyping import Array, ArrayLike, Float, Int32, Key, Real

from .. import _keys
from .._check import RowWeightsLike, check_flag, check_positive_int
from ._check import Mode, check_pool, check_samples, check_sign, check_size
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
    """Thompson sampling: each pick is the best candidate of one member, drawn by its weight.

    A member is a sample of the posterior; members are drawn with replacement. Picks differ unless `replace`: a member
    whose best candidate is taken picks its next best one, as botorch's `MaxPosteriorSampling(replacement=False)`.

    **Arguments:**

    - `predictions`: `(members, candidates)`. For a draw of the noise as well, or of Gaussian members, pass samples.
    - `num_picks`: the number of picks; 1 for a bandit.
    - `mode`: `"max"` or `"min"`.
    - `replace`: whether a candidate may be picked several times.
    - `weights`, `row_weights`: of members and candidates, as for [`eqx_ensemble.acquire.expected_improvement`][].
    - `key`: one threefry key, typed or legacy.

    **Returns:**

    Indices `(picks,)`; while tracing, -1 where no candidate is left.

    ```python
    predictions = jnp.array([[3.0, 2.0, 0.0], [2.0, 3.0, 0.0]])
    ee.acquire.thompson(predictions, 2, mode="max", key=key)  # 0 and 1
    ```

    ??? cite
        [Russo et al., Foundations and Trends in Machine Learning 2018](https://arxiv.org/abs/1707.02038)
    """
    sign, replace = check_sign(mode), check_flag(replace, "replace")
    values, convex, rows = check_samples(predictions, weights, row_weights)
    pool, _ = check_pool(values, rows)
    count = check_positive_int(num_picks, "num_picks") if replace else check_size(num_picks, "num_picks", pool)
    return _picks(sign * values, convex, pool, count, replace, _keys.root(key))


@partial(jax.jit, static_argnames=("num_picks", "replace"))
def _picks(
    values: Float[Array, "members candidates"],
    weights: Float[Array, " members"] | None,
    pool: Pool,
    num_picks: int,
    replace: bool,  # noqa: FBT001
    key: Key[Array, ""],
) -> Int32[Array, " picks"]:
    members = jax.random.choice(key, values.shape[0], (num_picks,), p=weights)

    def step(pool: Pool, member: Array) -> tuple[Pool, Array]:
        index = argmax(values[member], pool.may_pick)
        return pool if replace else pool.remove(index), index

    return jax.lax.scan(step, pool, members)[1]
