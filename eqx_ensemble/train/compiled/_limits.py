from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._check import check_limit
from .._state import MemberState
from .._status import Status


class Limits(eqx.Module):
    """Each member's maximum number of steps, target score and minimum improvement, `(members,)`, or `None`."""

    steps: Int[Array, "*members"] | None = None
    target: Float[Array, "*members"] | None = None
    min_delta: Float[Array, "*members"] | None = None


def make_limits(max_steps: Any, target: Any, num_members: int, *, min_delta: float) -> Limits:
    """The limits, each from a scalar or from one value per member, checked."""
    steps = check_limit(max_steps, "max_steps", num_members, name="fit", whole=True)
    target = check_limit(target, "target", num_members, name="fit")
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
