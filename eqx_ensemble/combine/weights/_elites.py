from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Real

from ..._check import check_word, concrete
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
    dtype = jnp.float64 if checked.dtype == jnp.float64 else jnp.float32
    host = concrete(scores)  # in the precision that it has
    if host is None:
        return _elites(_ascending(checked, mode), count, dtype)
    rank = np.argsort(np.argsort(_ascending(host, mode), kind="stable"))
    return jnp.asarray(np.where(rank < count, 1 / count, 0), dtype)


def _ascending(scores: Any, mode: str) -> Any:
    """Scores of which lower ones are better."""
    if mode == "min":
        return scores
    return -scores if jnp.issubdtype(scores.dtype, jnp.floating) else ~scores  # of unsigned ones, too


@partial(jax.jit, static_argnames=("count", "dtype"))
def _elites(scores: Real[Array, " members"], count: int, dtype: Any) -> Float[Array, " members"]:
    rank = jnp.argsort(jnp.argsort(scores, stable=True))  # NaN is sorted last
    return jnp.where(rank < count, jnp.asarray(1 / count, dtype), jnp.asarray(0, dtype))
