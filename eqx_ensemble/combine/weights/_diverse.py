from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Real

from ._check import check_similarity


def diverse(
    similarity: Float[ArrayLike, "members members"],
    count: int,
    *,
    quality: Real[ArrayLike, " members"] | None = None,
) -> Float[Array, " members"]:
    r"""Equal weights for `count` members that differ from each other, zero for the others.

    Greedy maximisation of the determinant of $q_i S_{ij} q_j$ over the selected members, the greedy mode of a
    determinantal point process. The first member has the largest $q_i^2 S_{ii}$; each step then adds the member that
    increases the determinant most. At equal quality, this is the member least explained by those selected. Copies of
    selected members come last.

    **Arguments:**

    - `similarity`: $S$, a positive semi-definite matrix `(members, members)`: for classes
        `1 - uncertainty.pairwise_disagreement(logits)`, for real targets the correlations of the members' errors.
        Compute it on held-out rows.
    - `count`: the number of members to select.
    - `quality`: $q$, non-negative, `(members,)`, higher is better; equal by default. For example
        `jnp.exp(log_scores.mean(axis=1))` or a power of it: larger powers give diversity less weight.

    **Returns:**

    Convex weights `(members,)`, each 0 or `1 / count`. [`eqx_ensemble.prune`][] selects these members of an ensemble.
    Where members tie, the first is selected. The selection is not differentiable.

    **Raises:**

    - `TypeError` for a similarity that is not floating-point.
    - `ValueError` for a matrix that is not square, symmetric, or positive semi-definite (where concrete), quality that
        is negative or not finite, and a count out of range.

    ```python
    logits = jnp.array([[[2.0, 0.0]] * 4, [[3.0, 0.0]] * 4, [[2.0, 0.0]] * 2 + [[0.0, 2.0]] * 2])
    similarity = 1 - ee.uncertainty.pairwise_disagreement(logits)
    ee.combine.weights.diverse(similarity, 2)  # [0.5, 0.0, 0.5]: the first two vote alike
    ```

    ??? cite
        [Determinantal Point Processes for Machine Learning](https://arxiv.org/abs/1207.6083), Kulesza and Taskar, 2012;
        the algorithm: [Fast Greedy MAP Inference for Determinantal Point
        Process](https://arxiv.org/abs/1709.05135), Chen, Zhang and Zhou, 2018.
    """
    matrix, number, scale = check_similarity("combine.weights.diverse", similarity, count, quality)
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
