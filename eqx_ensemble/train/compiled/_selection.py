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
from .._state import MemberState, copy_arrays, put_new
from .._status import Status


class Limits(eqx.Module):
    """Each member's maximum number of steps, target score and minimum improvement, `(members,)`, or `None`.

    `newest` is the weight of a new score in an endless average of scores, one without smoothing.
    """

    steps: Int[Array, "*members"] | None = None
    target: Float[Array, "*members"] | None = None
    min_delta: Float[Array, "*members"] | None = None
    newest: Float[Array, "*members"] | None = None


def make_limits(
    steps: np.ndarray | None,
    target: np.ndarray | None,
    num_members: int,
    *,
    min_delta: float = 0.0,
    smooth: float = 0.0,
) -> Limits:
    """The limits on the device."""
    numbers = lambda value: jax.device_put(np.full(num_members, value, jax.dtypes.canonicalize_dtype(float)))
    return Limits(
        None if steps is None else jnp.asarray(steps, jnp.int32),
        None if target is None else jnp.asarray(target, float),
        numbers(min_delta),
        numbers(1 - smooth),  # a decay near one would round to it
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
    """The best weights of one member so far, by its own smoothed validation score; stacked for all members.

    `score`, `step` and `best` are the score of the best weights, their step, and their smoothed score. `waited` counts
    the epochs without a smoothed score better than `bar`, the best at the end of an epoch. `average` is the average of
    the scores at ends of epochs so far, and `weight` the sum of their weights in it; resuming and continuing a run
    changes none of these four. `scored` is the step of the weights that were validated last.
    """

    params: PyTree
    model_state: PyTree
    score: Float[Array, "*members"]
    step: Int[Array, "*members"]
    waited: Int[Array, "*members"]
    bar: Float[Array, "*members"]
    scored: Int[Array, "*members"]
    best: Float[Array, "*members"]
    average: Float[Array, "*members"] = eqx.field(repr=False)
    weight: Float[Array, "*members"] = eqx.field(repr=False)
    mode: Mode = eqx.field(static=True, default="min")

    __pdoc__ = brief_doc


def worst(mode: Mode) -> float:
    """The worst possible score."""
    return math.inf if mode == "min" else -math.inf


def no_selection(moving: MemberState, mode: Mode, dtype: Any = jnp.float32) -> Selection:
    """Nothing validated yet. The arrays are copies, because both are donated."""
    count = moving.status.shape[0]
    params, model_state = copy_arrays((moving.params, moving.model_state))
    score = lambda value: put_new(np.full(count, value, dtype))
    number = lambda value: put_new(np.full(count, value, np.int32))
    first = (score(worst(mode)), number(-1), number(0), score(worst(mode)), number(-1), score(worst(mode)))
    return Selection(params, model_state, *first, score(0), score(0), mode)


def smooth_score(
    selection: Selection, value: Float[Array, ""], newest: Float[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """The smoothed score of one member with a new score `value`, and the average and its weight from then on.

    The average moves towards the score by the score's share of the weights, so that equal scores give exactly that
    score, as a division by the sum of weights would not: patience must not begin anew by a rounding. A score that is
    not finite is its own smoothed score, and leaves the average as it is.
    """
    newest = newest.astype(value.dtype)
    weight = selection.weight + newest * (1 - selection.weight)
    moved = selection.average + newest / weight * (value - selection.average)
    average = jnp.where(newest == 1, value, moved)
    known = jnp.isfinite(average)
    return average, jnp.where(known, average, selection.average), jnp.where(known, weight, selection.weight)


def rescore(selection: Selection, chosen: np.ndarray, scores: np.ndarray) -> Selection:
    """The same best weights, with the `scores` `(members,)` of the `chosen` members.

    Their averages and their patience begin anew.
    """
    new = jnp.asarray(np.where(np.isnan(scores), worst(selection.mode), scores), selection.score.dtype)
    put = lambda old, new: jnp.where(chosen, new, old)
    begun = {"score": new, "best": new, "bar": new, "waited": 0, "average": 0, "weight": 0}
    return dataclasses.replace(selection, **{name: put(getattr(selection, name), x) for name, x in begun.items()})


def reset_best(selection: Selection | None, moving: MemberState, members: np.ndarray) -> Selection | None:
    """The best weights, with those of `members` reset to their weights in `moving`, without a score."""
    if selection is None:
        return None
    fresh = no_selection(moving, selection.mode, selection.score.dtype)
    return jax.tree.map(lambda old, new: old.at[members].set(new[members]), selection, fresh)
