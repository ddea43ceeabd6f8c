from typing import Any

import jax
from jaxtyping import Array, Int32

from .._boundary import PoolRows, PoolSamples, Weights, array_function
from .._keys import root
from ._arguments import Mode, argmax, check_size, pool_of, sign_of, without


@array_function
def thompson(
    predictions: PoolSamples,
    num_picks: int,
    *,
    mode: Mode,
    replace: bool = False,
    weights: Weights = None,
    row_weights: PoolRows = None,
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
    if not replace:
        check_size(num_picks, "num_picks", predictions.shape[1])
    may_pick, _ = pool_of(predictions.shape[1], row_weights, None)
    members = jax.random.choice(root(key), predictions.shape[0], (num_picks,), p=weights)

    def step(may_pick: Array, member: Array) -> tuple[Array, Array]:
        index = argmax(sign_of(mode) * predictions[member], may_pick)
        return may_pick if replace else without(may_pick, index), index

    return jax.lax.scan(step, may_pick, members)[1]
