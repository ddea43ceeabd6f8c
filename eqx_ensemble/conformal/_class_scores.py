from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._weighting import class_log_odds
from ._classes import adaptive_scores
from ._positions import positions

Score = Literal["lac", "aps", "top_k"]
SCORES = ("lac", "aps", "top_k")


@jax.jit
def lac_scores(logits: Float[Array, "*batch classes"]) -> Float[Array, "*batch classes"]:
    """Minus the log-odds of each class: the order of `1 - p`, without its rounding."""
    return -class_log_odds(logits)


@jax.jit
def top_k_scores(logits: Float[Array, "*batch classes"]) -> Float[Array, "*batch classes"]:
    """The number of classes at least as likely as each class; NaN where the logits are NaN."""
    less = positions(jnp.sort(logits, axis=-1), logits, "left")
    unknown = jnp.any(jnp.isnan(logits), axis=-1, keepdims=True)
    return jnp.where(unknown, jnp.nan, (logits.shape[-1] - less).astype(logits.dtype))


def class_scores(score: Score, logits: Float[Array, "*batch classes"]) -> Float[Array, "*batch classes"]:
    """A nonconformity score of each class that orders classes as `score` does."""
    if score == "lac":
        return lac_scores(logits)
    if score == "top_k":
        return top_k_scores(logits)
    # The remaining probability decreases as the score increases; its logarithm does not round.
    return -adaptive_scores(logits, None, jnp.zeros((), logits.dtype), jnp.asarray(0, jnp.int32))[1]
