import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ... import _axes
from ..._pytree import PyTree
from ...plan import AbstractPlan
from .._state import MemberState, TrainState
from .._status import Status
from .._together import mean_of_members
from ._health import Inputs, nan_is_data
from ._loss import Loss
from ._selection import Selection, smooth_score, stop_members


class Occasion(enum.IntEnum):
    """The occasion of a validation, which determines the members that it scores.

    - `MEMBERS_STOPPED`: those that stopped within an epoch, at weights not validated yet.
    - `RUN_END`: also those that train, at the end of a run within an epoch.
    - `EPOCH_END`: the same, and patience and target are applied.
    """

    MEMBERS_STOPPED = 0
    RUN_END = 1
    EPOCH_END = 2


@nan_is_data()
def match_dtype(score: Loss, selection: Selection, state: TrainState, validation: PyTree) -> Selection:
    """The selection with scores of the dtype that `score` returns, float32 at least."""
    if jnp.result_type(float) == jnp.float32:  # there is no wider dtype
        return selection
    every, parts = _score_of_all(score, state, validation)
    values = eqx.filter_eval_shape(every, parts)
    dtype = values.dtype if values.dtype.itemsize > 4 else jnp.float32
    names = ("score", "bar", "best", "average", "weight")
    return dataclasses.replace(selection, **{name: getattr(selection, name).astype(dtype) for name in names})


@nan_is_data()
def first_scores(score: Loss, state: TrainState, validation: PyTree) -> Float[Array, " members"]:
    """The scores of members before training."""
    every, parts = _score_of_all(score, state, validation)
    return eqx.filter_jit(every)(parts)


def _score_of_all(score: Loss, state: TrainState, validation: PyTree) -> tuple[Callable[[PyTree], Any], PyTree]:
    """A function that scores all members, and its argument."""

    def one(part: PyTree) -> Array:
        moving, fixed, own = part
        key, data = view(own)
        return score(moving.params, moving.model_state, fixed, state.shared, data, key)[0]

    own, view, _ = _axes.split_members((_axes.Each(state.fixed.key), validation))
    every = lambda parts: _axes.over_leading_axis(lambda fn, parts: jax.vmap(fn)(parts), one, parts)
    return every, (state.moving, state.fixed, own)


def select(
    score: Loss,
    moving: MemberState,
    selection: Selection,
    inputs: Inputs,
    step: Int[Array, ""],
    *,
    plan: AbstractPlan,
    patience: int | None,
    occasion: Int[Array, ""],
    axes: tuple[str, ...],
) -> tuple[MemberState, Selection, Float[Array, " members"]]:
    """Validates all members; a member's best weights, patience and target follow from its own scores alone.

    **Returns:** the members, their best weights, and the scores of those that the `occasion` selects, NaN for others.
    """
    limits = jax.tree.map(_axes.Each, (inputs.limits.target, inputs.limits.min_delta, inputs.limits.newest))
    own, view, _ = _axes.split_members((_axes.Each(inputs.fixed.key), inputs.validation, *limits))

    def one(part: PyTree) -> PyTree:
        moving, selection, fixed, own = part
        training = (moving.status == Status.OK) & (occasion != Occasion.MEMBERS_STOPPED)
        unseen = (moving.status == Status.STOPPED) & (moving.stopped_at != selection.scored)
        at = jnp.where(unseen, moving.stopped_at, step)
        key = jax.random.fold_in(fixed.key, at)
        _, validation, target, min_delta, newest = view(own)
        value, _ = score(moving.params, moving.model_state, fixed, inputs.shared, validation, key)
        value = value.astype(selection.score.dtype)
        sign = 1 if selection.mode == "min" else -1  # negation is exact
        smoothed, average, weight = smooth_score(selection, value, newest)
        judged = training | unseen
        chosen = judged & jnp.isfinite(value)
        least = min_delta.astype(value.dtype)

        def gain(best: Array) -> Array:
            if not fixed.tied:
                return sign * smoothed < sign * best - least
            # The mean change of the members scored now: one that has left would make means differ without any change.
            scored = chosen & jnp.isfinite(best)
            change = mean_of_members(sign * (smoothed - best), scored, axes)
            return chosen & (~jnp.isfinite(best) | (change < -least))

        better = judged & gain(selection.best)
        params, state = jax.tree.map(
            lambda new, old: jnp.where(better, new, old),
            (moving.params, moving.model_state),
            (selection.params, selection.model_state),
        )
        counts = training & (occasion == Occasion.EPOCH_END)
        closer = counts & gain(selection.bar)
        waited = jnp.where(closer, 0, selection.waited + counts.astype(jnp.int32))
        selection = Selection(
            params,
            state,
            jnp.where(better, value, selection.score),
            jnp.where(better, at, selection.step),
            waited,
            jnp.where(closer, smoothed, selection.bar),
            jnp.where(judged, at, selection.scored),
            jnp.where(better, smoothed, selection.best),
            jnp.where(counts, average, selection.average),
            jnp.where(counts, weight, selection.weight),
            selection.mode,
        )
        stops = jnp.bool_(0) if patience is None else waited >= patience
        if target is not None:
            reached = mean_of_members(value, chosen, axes) if fixed.tied else value
            stops |= (sign * reached <= sign * target.astype(value.dtype)) & (chosen | (not fixed.tied))
        moving = stop_members(moving, stops & counts, step)
        return moving, selection, jnp.where(judged, value, jnp.nan)

    return _axes.over_leading_axis(plan.run, one, (moving, selection, inputs.fixed, own))
