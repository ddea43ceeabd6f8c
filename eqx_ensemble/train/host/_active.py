import dataclasses
import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int8

from ..._pytree import PyTree
from ..._sharding import Layout, pad_members, replicate, shard_members
from ...distributed import to_host
from ...plan import AbstractPlan
from ...plan._engine import FEWEST
from .._state import MemberConstants
from .._status import Status
from ..compiled._health import Carry, Inputs
from ..data._rows import Slots


class Latest(NamedTuple):
    """The status of the slots after a call, on the host, and how many of them hold members that train."""

    carry: Any
    status: np.ndarray
    num_training: int


class ActiveMembers:
    """The members in the compiled arrays, and the last state of those that were removed.

    Members that no longer train are removed to save compute, and restored in their order at the end. The remaining
    members are unaffected: their rows and their random streams depend only on their ids.

    **Attributes:**

    - `slots`: the members in the compiled arrays.
    - `inputs`, `carry`: the inputs and the carry of a compiled call, for these members.
    """

    _latest: Latest | None = None

    def __init__(self, inputs: Inputs, carry: Carry, layout: Layout | None) -> None:
        self._all_inputs = inputs
        self._last: tuple[PyTree, PyTree] | None = None  # of all members; out of date for the active ones
        count = carry.moving.status.shape[0]
        self.slots = Slots(np.arange(count), count, layout)
        self.inputs, self.carry = inputs, carry

    def begin(self) -> None:
        """Shards the members over their devices, padded with copies of the last one."""
        layout, inputs, carry = self.slots.layout, self.inputs, self.carry
        if layout is None:
            return
        moving, selection, fixed, limits = shard_members(
            pad_members((carry.moving, carry.selection, inputs.fixed, inputs.limits), layout), layout
        )
        real = shard_members(np.arange(len(self.slots.index)) < self.slots.num_members, layout)
        moving = dataclasses.replace(moving, status=_stop_pads(moving.status, real))
        self.inputs = _own_inputs(self._all_inputs, self.slots, fixed, replicate(inputs.shared, layout), limits)
        self.carry = Carry(moving, selection, replicate(carry.step, layout))

    @property
    def latest(self) -> Latest:
        """What the carry says of its slots; it is copied to the host once."""
        if self._latest is None or self._latest.carry is not self.carry:
            status = to_host(self.carry.moving.status)
            training = np.count_nonzero(status == Status.OK.value)  # NumPy is slow with the enum itself
            self._latest = Latest(self.carry, status, int(training))
        return self._latest

    @property
    def status(self) -> np.ndarray:
        """The status of all members `(members,)`."""
        status = self.latest.status[: len(self.slots.members)]
        if self._last is None:
            return status
        of_all = np.array(to_host(self._last[0].status))
        of_all[self.slots.members] = status
        return of_all

    @property
    def last_step(self) -> int | None:
        """The number of steps after which the last member stopped; `None` while any member trains."""
        if self.latest.num_training:
            return None
        moving = self.all().moving
        status, stopped_at, fault = to_host((moving.status, moving.stopped_at, moving.fault))
        # The loss of a step in which weights failed is recorded, a loss that is not finite is not.
        return int((stopped_at + ((status == Status.DIVERGED) & (fault > 0))).max())

    @property
    def constants(self) -> MemberConstants:
        """The constants of all members."""
        return self._all_inputs.fixed

    def all(self) -> Carry:
        """The carry of all members, in their order."""
        active = self.slots.without_pads((self.carry.moving, self.carry.selection))
        moving, selection = active if self._last is None else _put(self._last, active, self.slots.members)
        return Carry(moving, selection, self.carry.step)

    def replace(self, carry: Carry, fixed: MemberConstants) -> None:
        """Replaces the carry and the constants after a change outside of a compiled program."""
        slots = self.slots
        own = slots.without_pads(fixed)
        own = own if slots.complete else _put(self.constants, own, slots.members)
        self._all_inputs = dataclasses.replace(self._all_inputs, fixed=own)
        moving, selection, fixed = slots.shard((carry.moving, carry.selection, fixed))
        self.inputs, self.carry = dataclasses.replace(self.inputs, fixed=fixed), Carry(moving, selection, carry.step)

    def shrink(self, width: int) -> None:
        """Keeps `width` members in the compiled arrays: those that train, filled up with others."""
        members = self.slots.members
        status = self.latest.status[: len(members)]
        chosen = np.sort(np.argsort(status != Status.OK, kind="stable")[:width])
        carry = self.all()
        self._last = (carry.moving, carry.selection)
        self.slots = dataclasses.replace(self.slots, members=members[chosen])
        inputs = self._all_inputs
        moving, selection, fixed, limits = self.slots.take((*self._last, inputs.fixed, inputs.limits))
        self.inputs = _own_inputs(inputs, self.slots, fixed, inputs.shared, limits)
        self.carry = Carry(moving, selection, carry.step)


def _own_inputs(inputs: Inputs, slots: Slots, fixed: MemberConstants, shared: PyTree, limits: PyTree) -> Inputs:
    data, order = slots.own((inputs.data, inputs.order), whole=True)
    return Inputs(fixed, shared, data, slots.own(inputs.validation), limits, order)


def width_for(members: ActiveMembers, plan: AbstractPlan) -> int:
    """The smallest width that holds all members that train: 1, 5/6 or 2/3 of all, or a half, a quarter, ... of these.

    If the plan runs a few members at a time, each device has whole chunks. If it divides them into blocks, which share
    a program, any whole number of blocks will do.
    """
    count, layout = members.slots.num_members, members.slots.layout
    needed = max(members.latest.num_training, FEWEST)
    blocks = plan.blocks(count).members
    if len(blocks) > 1:
        unit = blocks[0].stop
        return min(len(members.slots.index), math.ceil(needed / unit) * unit)
    num_devices = 1 if layout is None else layout.members
    of_device = -(-count // num_devices)
    chunk = plan.width(of_device)
    unit = num_devices * (chunk if chunk < of_device else 1)
    sizes = [math.ceil(count * part / 2**i) for part in (1, 5 / 6, 2 / 3) for i in range(count.bit_length())]
    enough = [-(-size // unit) * unit for size in sizes if size >= needed]
    return min([len(members.slots.index), *enough])


@eqx.filter_jit
def _stop_pads(status: Int8[Array, " members"], real: Bool[Array, " members"]) -> Int8[Array, " members"]:
    """Marks padding as stopped, so that it is not trained."""
    return jnp.where(real, status, jnp.int8(Status.STOPPED))


@eqx.filter_jit
def _put(all_members: PyTree, active: PyTree, index: Any) -> PyTree:
    def put(x: Any, y: Any) -> Any:
        return x.at[index].set(y) if eqx.is_array(x) else x

    return jax.tree.map(put, all_members, active)
