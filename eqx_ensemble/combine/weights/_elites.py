from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Real

from ..._check import check_word
from ._check import check_scores_of_members


def elites(scores: Real[ArrayLike, " members"], count: int, *, mode: Literal["min", "max"]) -> Float[Array, " members"]:
    """Equal weights for the `count` members with the best scores, none for the others.

    **Arguments:**

    - `scores`: one per member, `(members,)`, such as `scores.per_member(scores.nll, logits, labels)`, or the
        `best_score` of a run. Where members tie, the first is selected; NaN is worse than any number.
    - `count`: how many.
    - `mode`: `"min"` if lower scores are better, `"max"` if higher; for a run's `best_score`, `run.mode`.

    **Returns:**

    Convex weights `(members,)`, each 0 or `1 / count`. The members themselves are `jnp.flatnonzero(weights)`, or what
    [`eqx_ensemble.prune`][] keeps of an ensemble.

    **Raises:**

    - `ValueError` for scores that are not `(members,)`, and where fewer than `count` of them are not NaN; for another
        mode.

    ```python
    ee.combine.weights.elites(jnp.array([0.3, 0.1, 0.2]), 2, mode="min")  # [0.0, 0.5, 0.5]
    ```
    """
    check_word(mode, "mode", ("min", "max"), name="combine.weights.elites")
    checked, count = check_scores_of_members("combine.weights.elites", scores, count)
    if mode == "max":
        checked = -checked if jnp.issubdtype(checked.dtype, jnp.floating) else ~checked  # of unsigned ones, too
    return _elites(checked, count)


@partial(jax.jit, static_argnames="count")
def _elites(scores: Real[Array, " members"], count: int) -> Float[Array, " members"]:
    rank = jnp.argsort(jnp.argsort(scores, stable=True))  # NaN is sorted last
    dtype = jnp.float64 if scores.dtype == jnp.float64 else jnp.float32
    return jnp.where(rank < count, jnp.asarray(1 / count, dtype), jnp.asarray(0, dtype))
