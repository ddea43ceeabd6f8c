from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..._pytree import PyTree
from ...distributed import to_host
from .._revive import Revival, Revive, revive_members
from .._state import TrainState
from .._status import Status
from ..compiled._carry import Carry
from ..compiled._limits import stop_at_limits
from ..compiled._optimiser import Optimiser
from ..compiled._selection import reset_best
from ._active import ActiveMembers


class Reviver:
    """Revives members during a run, and counts the revivals of each."""

    def __init__(
        self, how: Revive, optimiser: Optimiser, shared: PyTree, ids: Array, before: list[Revival], *, key: Any
    ) -> None:
        self.revivals = list(before)
        self._how, self._optimiser, self._shared = how, optimiser, shared
        self._ids, self._key = to_host(ids), key
        self._times = (self._ids[:, None] == [revival.member for revival in before]).sum(axis=1)

    def revive(self, members: ActiveMembers) -> None:
        """Revives the members that diverged, except those that were revived `most` times already."""
        slots, carry, inputs = members.slots, members.carry, members.inputs
        lost = np.flatnonzero(to_host(carry.moving.status) == Status.DIVERGED)
        lost = lost[self._times[slots.members[lost]] < self._how.most]
        if len(lost) == 0:
            return
        ids, times = jnp.asarray(slots.distinct(self._ids)), self._times[slots.members[lost]]
        state = TrainState(carry.moving, inputs.fixed, self._shared, ids, carry.step)
        moving, fixed, revived = revive_members(state, self._optimiser, self._how, lost, times, key=self._key)
        if revived:
            self._times[slots.members[lost]] += 1
            self.revivals += revived
            moving = stop_at_limits(moving, inputs.limits, carry.step)
            members.replace(Carry(moving, reset_best(carry.selection, moving, lost), carry.step), fixed)
