import contextlib
import dataclasses
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..._pytree import PyTree
from ...checkpoint._exit import hold_exit, is_exit_asked
from ...distributed import broadcast_from_first, to_host
from .._revive import Revival, Revive, revive_members
from .._state import TrainState
from .._status import Status
from ..compiled._carry import Carry
from ..compiled._optimiser import Optimiser
from ..compiled._selection import reset_best, stop_at_limits, stop_members
from ._active import ActiveMembers
from ._saving import Saving


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


_SECONDS = 1.0


class Interruption:
    """Defers Ctrl-C until the state of a run is consistent.

    Between a donating call and the assignment of its result, the old state is deleted and the new one not yet assigned:
    a `KeyboardInterrupt` there loses both. In this context the first Ctrl-C is only recorded; the second one raises. If
    the run is saved, a signal of `checkpoint.exit_on_signal` is deferred as well.
    """

    def __init__(self, *, is_saved: bool) -> None:
        self._noted, self._is_saved = False, is_saved
        self._before = None
        self._held = contextlib.ExitStack()

    @property
    def is_requested(self) -> bool:
        """Whether the end of the run is requested."""
        return self._noted or (self._is_saved and is_exit_asked())

    def __enter__(self) -> "Interruption":
        own = threading.current_thread() is threading.main_thread()
        if own and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._note)
        if self._is_saved:
            self._held.enter_context(hold_exit())
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._held.close()
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted:
            raise KeyboardInterrupt
        self._noted = True


class Stopping:
    """Decides when a run ends, stops members after their `max_seconds`, and revives those that diverged."""

    def __init__(
        self,
        interruption: Interruption,
        saving: Saving,
        reviver: Reviver | None,
        *,
        on_diverge: Literal["freeze", "raise"] | Revive,
        lost_before: int,
        max_seconds: np.ndarray | None,
    ) -> None:
        self._interruption, self._saving, self._reviver = interruption, saving, reviver
        self._most_lost = lost_before if on_diverge == "raise" else None
        self._max_seconds = max_seconds
        self._ended = False

    @property
    def ended_early(self) -> bool:
        """Whether Ctrl-C or a callback ended the run."""
        return self._interruption.is_requested or self._ended

    def end(self) -> None:
        """Ends the run at this boundary, as Ctrl-C does. All processes must call it."""
        self._ended = True

    @property
    def seconds_between_looks(self) -> float:
        """The time between inspections of the results of steps on batches; 0 for every step.

        It is 0 if a diverged member must end the run or be revived before the next step, and with several processes,
        which must inspect the same steps.
        """
        if self._most_lost is not None or self._reviver is not None or jax.process_count() > 1:
            return 0.0
        return _SECONDS if self._max_seconds is None else _SECONDS / 100

    def must_end(self) -> bool:
        """Whether the run ends regardless of its members: it is interrupted, or cannot be saved."""
        return self._interruption.is_requested or self._saving.error is not None

    def should_stop(self, members: ActiveMembers, *, begun: bool) -> bool:
        """Whether the run ends: it is interrupted, a save failed, no member trains, or one diverged under `"raise"`."""
        status = to_host(members.carry.moving.status)
        if self._saving.error is not None:
            return True
        failed = self._most_lost is not None and (members.status == Status.DIVERGED).sum() > self._most_lost
        interrupted = broadcast_from_first(self._interruption.is_requested) and begun  # a run has at least one step
        return bool(interrupted or self._ended or failed or not (status == Status.OK).any())

    def stop(self, members: ActiveMembers, chosen: np.ndarray) -> None:
        """Stops those of the `chosen` members `(members,)` that are training."""
        carry, here = members.carry, chosen[members.slots.index]
        if here.any():
            members.carry = dataclasses.replace(carry, moving=stop_members(carry.moving, here, carry.step))

    def handle_stopped(self, members: ActiveMembers) -> None:
        """Stops members after their `max_seconds`, and revives those that diverged."""
        if self._max_seconds is not None:
            self.stop(members, broadcast_from_first(self._saving.seconds) >= self._max_seconds)
        self.revive(members)

    def revive(self, members: ActiveMembers) -> None:
        """Revives members that diverged, if `on_diverge` says so."""
        if self._reviver is not None:
            self._reviver.revive(members)
