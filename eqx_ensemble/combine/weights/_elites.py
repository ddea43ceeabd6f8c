from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Real

from ..._check import check_word, concrete
from ._check import check_scores_of_members


def elites(scores: Real[ArrayLike, " members"], count: int, *, mode: Literal["min", "max"]) -> Float[Array, " members"]:
    """Equal weights for the `count` members with the best scores, zero for the others.

    **Arguments:**

    - `scores`: one per member, `(members,)`, such as `scores.per_member(scores.nll, logits, labels)`, or the
        `best_score` of a run. Where members tie, the first is selected; NaN is worse than any number.
    - `count`: the number of members to select.
    - `mode`: `"min"` if lower scores are better, `"max"` if higher; for a run's `best_score`, `run.mode`.

    **Returns:**

    Convex weights `(members,)`, each 0 or `1 / count`. The members' indices are `jnp.flatnonzero(weights)`;
    [`eqx_ensemble.prune`][] selects them from an ensemble.

    **Raises:**

    - `ValueError` for scores that are not `(members,)`, fewer than `count` scores that are not NaN (where concrete), a
        count out of range, and another `mode`.

    ```python
    ee.combine.weights.elites(jnp.array([0.3, 0.1, 0.2]), 2, mode="min")  # [0.0, 0.5, 0.5]
    ```
    """
    check_word(mode, "mode", ("min", "max"), name="combine.weights.elites")
    checked, count = check_scores_of_members("combine.weights.elites", scores, count)
    dtype = jnp.float64 if checked.dtype == jnp.float64 else jnp.float32
    host = concrete(scores)  # in its own precision
    if host is None:
        return _elites(_ascending(checked, mode), count, dtype)
    rank = np.argsort(np.argsort(_ascending(host, mode), kind="stable"))
    return jnp.asarray(np.where(rank < count, 1 / count, 0), dtype)


def _ascending(scores: Any, mode: str) -> Any:
    """The scores, negated if higher is better."""
    if mode == "min":
        return scores
    return -scores if jnp.issubdtype(scores.dtype, jnp.floating) else ~scores  # also for unsigned integers


@partial(jax.jit, static_argnames=("count", "dtype"))
def _elites(scores: Real[Array, " members"], count: int, dtype: Any) -> Float[Array, " members"]:
    rank = jnp.argsort(jnp.argsort(scores, stable=True))  # NaN is sorted last
    return jnp.where(rank < count, jnp.asarray(1 / count, dtype), jnp.asarray(0, dtype))
