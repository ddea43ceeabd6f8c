import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..._brief import brief_doc
from ..._pytree import PyTree
from .._state import MemberState
from .._status import Status


class Limits(eqx.Module):
    """Each member's maximum number of steps, target score and minimum improvement, `(members,)`, or `None`."""

    steps: Int[Array, "*members"] | None = None
    target: Float[Array, "*members"] | None = None
    min_delta: Float[Array, "*members"] | None = None


def make_limits(
    steps: np.ndarray | None, target: np.ndarray | None, num_members: int, *, min_delta: float = 0.0
) -> Limits:
    """The limits on the device."""
    return Limits(
        None if steps is None else jnp.asarray(steps, jnp.int32),
        None if target is None else jnp.asarray(target, float),
        jax.device_put(np.full(num_members, min_delta, jax.dtypes.canonicalize_dtype(float))),
    )


def stop_at_limits(moving: MemberState, limits: Limits, step: Int[Array, ""]) -> MemberState:
    """Stops the members that have reached their maximum number of steps."""
    if limits.steps is None:
        return moving
    return stop_members(moving, limits.steps <= step, step)


def stop_members(moving: MemberState, chosen: Any, step: Int[Array, ""]) -> MemberState:
    """Stops those of the `chosen` members `(members,)` that are training."""
    stops = (moving.status == Status.OK) & chosen
    status = jnp.where(stops, jnp.int8(Status.STOPPED), moving.status)
    return eqx.tree_at(lambda m: (m.status, m.stopped_at), moving, (status, jnp.where(stops, step, moving.stopped_at)))


def next_limit(limits: np.ndarray, periods: Sequence[int], step: int) -> int | None:
    """The first of the sorted step limits and the multiples of `periods` after `step`, at which a piece must end."""
    after = limits[np.searchsorted(limits, step, side="right") :][:1].tolist()
    return min([*after, *(step - step % period + period for period in periods)], default=None)


Mode = Literal["min", "max"]
"""Whether a lower or a higher score is better."""


class Selection(eqx.Module):
    """The best weights of one member so far, by its own validation score; stacked for all members.

    `score` and `step` are those of the best weights. `waited` counts the epochs without a score better than `bar`, the
    best at the end of an epoch; resuming and continuing a run changes neither. `scored` is the step of the weights that
    were validated last.
    """

    params: PyTree
    model_state: PyTree
    score: Float[Array, "*members"]
    step: Int[Array, "*members"]
    waited: Int[Array, "*members"]
    bar: Float[Array, "*members"]
    scored: Int[Array, "*members"]
    mode: Mode = eqx.field(static=True, default="min")

    __pdoc__ = brief_doc


def worst(mode: Mode) -> float:
    """The worst possible score."""
    return math.inf if mode == "min" else -math.inf


def no_selection(moving: MemberState, mode: Mode, dtype: Any = jnp.float32) -> Selection:
    """Nothing validated yet. The arrays are copies, because both are donated."""
    count = moving.status.shape[0]
    params, model_state = jax.tree.map(jnp.array, (moving.params, moving.model_state))
    score = jnp.full(count, worst(mode), dtype)
    never = jnp.full(count, -1, jnp.int32)
    waited = jnp.zeros(count, jnp.int32)
    return Selection(params, model_state, score, never, waited, score.copy(), never.copy(), mode)


def rescore(selection: Selection, chosen: np.ndarray, scores: np.ndarray) -> Selection:
    """The same best weights, with the `scores` `(members,)` of the `chosen` members; their patience begins anew."""
    new = jnp.asarray(np.where(np.isnan(scores), worst(selection.mode), scores), selection.score.dtype)
    put = lambda old, new: jnp.where(chosen, new, old)
    score, bar, waited = put(selection.score, new), put(selection.bar, new), put(selection.waited, 0)
    return dataclasses.replace(selection, score=score, bar=bar, waited=waited)


def reset_best(selection: Selection | None, moving: MemberState, members: np.ndarray) -> Selection | None:
    """The best weights, with those of `members` reset to their weights in `moving`, without a score."""
    if selection is None:
        return None
    fresh = no_selection(moving, selection.mode, selection.score.dtype)
    return jax.tree.map(lambda old, new: old.at[members].set(new[members]), selection, fresh)
