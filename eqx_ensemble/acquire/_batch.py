from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Integer

from .._boundary import array_function, kinds
from .._brief import brief_repr
from .._weighting import blank_unweighted, weighted_mean
from ._arguments import Mode, against, argmax, check_size, pool_of, sign_of, without


class Picks(NamedTuple):
    """A batch of candidates in the order of choice: `indices`, and the joint criterion after each pick, `values`.

    Both are `(size,)`. Indices are -1, and values stay the same, where no candidate is left.
    """

    indices: Int32[Array, " size"]
    values: Float[Array, " size"]

    def __repr__(self) -> str:
        return brief_repr(self)


@array_function
def batch_expected_improvement(
    predictions: kinds.PoolSamples,
    size: int,
    *,
    best: kinds.Best,
    mode: Mode,
    weights: kinds.Weights = None,
    row_weights: kinds.PoolRows = None,
    chosen: kinds.Chosen | None = None,
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

    **Returns:**

    [`eqx_ensemble.acquire.Picks`][]; of equal candidates, the first. NaN raises `ValueError`. While tracing, candidates
    with NaN are not picked. Indices are -1 where no candidate is left.

    ```python
    predictions = jnp.array([[3.0, 2.9, 0.0], [0.0, 0.0, 1.0]])  # the first two agree
    picks = ee.acquire.batch_expected_improvement(predictions, 2, best=0.0, mode="max")
    picks.indices, picks.values  # [0, 2], [1.5, 2.0]
    ```

    ??? cite
        [Wilson et al., NeurIPS 2018](https://arxiv.org/abs/1805.10196)
    """
    each = jnp.maximum(sign_of(mode) * (predictions - against(best, predictions)), 0)
    return _pick_all(each, weights, row_weights, chosen, size)


@array_function
def batch_probability_of_improvement(
    predictions: kinds.PoolSamples,
    size: int,
    *,
    best: kinds.Best,
    mode: Mode,
    weights: kinds.Weights = None,
    row_weights: kinds.PoolRows = None,
    chosen: kinds.Chosen | None = None,
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
    each = (sign_of(mode) * (predictions - against(best, predictions)) > 0).astype(predictions.dtype)
    return _pick_all(each, weights, row_weights, chosen, size)


def _pick_all(
    each: Float[Array, "members candidates"],
    weights: Float[Array, " members"] | None,
    row_weights: Bool[Array, " candidates"] | None,
    chosen: Integer[Array, " chosen"] | None,
    size: int,
) -> Picks:
    """The greedy maximum of the mean over members of the largest of the picks' values, which are not negative."""
    check_size(size, "size", each.shape[1])
    each = blank_unweighted(each, weights)
    may_pick, taken = pool_of(each.shape[1], row_weights, chosen)
    reached = jnp.max(jnp.where((taken < 0)[None], 0, each[:, taken]), axis=1, initial=0)

    def step(carry: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        reached, may_pick = carry
        gains = weighted_mean(jnp.maximum(each - reached[:, None], 0), weights)
        index = argmax(gains, may_pick)
        reached = jnp.where(index < 0, reached, jnp.maximum(reached, each[:, index]))
        return (reached, without(may_pick, index)), (index, weighted_mean(reached, weights))

    return Picks(*jax.lax.scan(step, (reached, may_pick), None, size)[1])
