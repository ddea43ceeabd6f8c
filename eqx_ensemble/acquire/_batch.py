from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Integer, Real

from .._check import RowWeightsLike
from .._weighting import blank_unweighted, weighted_mean
from ._check import Mode, check_best, check_pool, check_samples, check_sign, check_size
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
    r"""A batch of candidates by greedy maximisation of their joint expected improvement (q-EI).

    Members are joint samples of the values of all candidates, so that the criterion of a set $S$ is exact under the
    ensemble: $\sum_m w_m \max(0, \max_{i \in S} f_{mi} - f^*)$. It is submodular: greedy picks reach $1 - 1/e$ of the
    best batch. For Gaussian members pass samples, such as those of
    [`eqx_ensemble.uncertainty.sample_gaussian_mixture`][] with `joint=True`.

    **Arguments:**

    - `predictions`: `(members, candidates)`.
    - `size`: the number of picks.
    - `best`, `mode`, `weights`, `row_weights`: as for [`eqx_ensemble.acquire.expected_improvement`][].
    - `chosen`: indices `(chosen,)` of candidates that already belong to the batch, such as those being evaluated. They
        are not picked again; -1 stands for none.
    - `costs`, `budget`: positive, `(candidates,)` and a number. Each pick then has the largest gain per cost among the
        candidates that the rest of the budget allows.

    **Returns:**

    [`eqx_ensemble.acquire.Picks`][]; of equal candidates, the first. NaN raises `ValueError`. While tracing, candidates
    with NaN are not picked. Indices are -1 where no candidate is left that the budget allows.

    ```python
    predictions = jnp.array([[3.0, 2.9, 0.0], [0.0, 0.0, 1.0]])  # the first two agree
    picks = ee.acquire.batch_expected_improvement(predictions, 2, best=0.0, mode="max")
    picks.indices, picks.values  # [0, 2], [1.5, 2.0]
    ```

    ??? cite
        [Wilson et al., NeurIPS 2018](https://arxiv.org/abs/1805.10196)
    """
    return _batch("expected", size, best, mode, (predictions, weights, row_weights), (chosen, costs, budget))


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
    r"""A batch of candidates by greedy maximisation of the probability that one of them improves (q-PI).

    $\sum_m w_m [\max_{i \in S} f_{mi} > f^*]$, exact under the ensemble, as members are joint samples.

    **Arguments:**

    As [`eqx_ensemble.acquire.batch_expected_improvement`][].

    **Returns:**

    [`eqx_ensemble.acquire.Picks`][].

    ```python
    predictions = jnp.array([[3.0, 2.9, 0.0], [0.0, 0.0, 1.0]])
    picks = ee.acquire.batch_probability_of_improvement(
        predictions, 2, best=0.0, mode="max"
    )
    picks.indices, picks.values  # [0, 2], [0.5, 1.0]
    ```
    """
    return _batch("probability", size, best, mode, (predictions, weights, row_weights), (chosen, costs, budget))


def _batch(kind: str, size: int, best: ArrayLike, mode: Mode, samples: tuple, limits: tuple) -> Picks:
    sign, (values, convex, rows) = check_sign(mode), check_samples(*samples)
    better = sign * (values - check_best(best, values))
    each = (better > 0).astype(values.dtype) if kind == "probability" else jnp.maximum(better, 0)
    pool, taken = check_pool(values, rows, *limits)
    return Picks(*_pick_all(each, convex, taken, pool, check_size(size, "size", pool)))


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
