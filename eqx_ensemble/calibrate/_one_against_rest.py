"""Logistic calibration of each class against the rest, shared by Platt scaling and beta calibration."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._check import needs_message
from .._weighting import class_log_odds
from ._pooling import Rows


class Labels(NamedTuple):
    """One class against the rest: whether each row has this label, and its weight in the mean."""

    hits: Bool[Array, " rows"]
    share: Float[Array, " rows"]


def each_class(
    fit: Callable[[Array, Array, Labels], Array], rows: Rows, mirror: Callable[[Array], Array]
) -> Float[Array, "groups classes params"]:
    """Calls `fit` on log-probabilities and log-odds of each class; for two classes, on the second, and mirrors it."""
    odds = class_log_odds(rows.logs)
    num_classes = rows.logs.shape[-1]
    first = 1 if num_classes == 2 else 0
    hits = rows.labels[None] == jnp.arange(first, num_classes, dtype=rows.labels.dtype)[:, None]
    of_class = lambda logs, odds, hits: fit(logs, odds, Labels(hits, rows.share))
    of_group = jax.vmap(of_class, in_axes=(-1, -1, 0))
    found = jax.vmap(of_group, in_axes=(0, 0, None))(rows.logs[..., first:], odds[..., first:], hits)
    return jnp.concatenate([mirror(found), found], axis=1) if first else found


def along_classes(name: str, fitted: Array, logits: Array) -> Array:
    """Reshapes parameters `(groups, classes)` to broadcast with logits `(groups, *batch, classes)`."""
    if fitted.shape[-1] != logits.shape[-1]:
        got = f"expected {fitted.shape[-1]}, got {logits.shape[-1]}"
        fix = "Pass logits of the same classes, on the last axis."
        raise ValueError(needs_message(name, "logits of the classes that it was fitted on", got, fix))
    return fitted.reshape(fitted.shape[0], *(1,) * (logits.ndim - 2), fitted.shape[-1])


def log_complement(logs: Float[Array, "..."], odds: Float[Array, "..."]) -> Float[Array, "..."]:
    """`-log(1 - p)` from `log(p)` and the log-odds, to machine precision."""
    small = logs < -0.6
    return jnp.where(small, -jnp.log1p(-jnp.exp(jnp.where(small, logs, -1))), odds - logs)


def normalise(margins: Float[Array, "groups *batch classes"]) -> Float[Array, "groups *batch classes"]:
    """Log-probabilities from the log-odds of each class against the rest."""
    logs = jax.nn.log_sigmoid(margins)
    return logs - jax.nn.logsumexp(logs, axis=-1, keepdims=True)
