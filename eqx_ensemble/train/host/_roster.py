import dataclasses
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int8, PyTree

from ... import _axes
from ...distributed import to_host
from ...sharding._layout import Layout
from ...sharding._shard import pad_members, replicate, replicate_rows, shard_members, shard_rows
from .._state import MemberConstants
from .._status import Status
from ..compiled._program import Carry, Inputs

_FEWEST = 4  # below three members a compiler arranges sums differently, and leaving would show in the others' last bits


class Roster:
    """Which members are in the compiled arrays, and what became of those that are not.

    Members that no longer train leave the arrays when that pays, and are back in their places at the end. The others
    do not notice: their rows and their randomness follow from their ids.
    """

    def __init__(self, carry: Carry, inputs: Inputs, *, layout: Layout | None = None):
        self.num_members = carry.moving.status.shape[0]
        self.present = np.arange(self.num_members)
        self._layout = layout
        self._all_inputs = inputs
        self._last: tuple[PyTree, PyTree] | None = None  # of all members; out of date for those present
        self._speedup = 1.0
        self._before: tuple[int, float] | None = None

    def first(self, inputs: Inputs, carry: Carry) -> tuple[Inputs, Carry]:
        """What the compiled arrays hold at the beginning: all members, and those that pad them on a mesh."""
        if self._layout is None:
            return inputs, carry
        layout = self._layout
        moving, selection, fixed, limits = shard_members(
            pad_members((carry.moving, carry.selection, inputs.fixed, inputs.limits), layout), layout
        )
        real = shard_members(np.arange(len(self.places)) < self.num_members, layout)
        moving = dataclasses.replace(moving, status=_status_of(moving.status, real))
        data, validation = self.own(inputs.data, whole=True), self.own(inputs.validation)
        inputs = Inputs(fixed, replicate(inputs.shared, layout), data, validation, limits)
        return inputs, Carry(moving, selection, replicate(carry.step, layout))

    def in_place(self, inputs: Inputs, carry: Carry) -> tuple[Inputs, Carry]:
        """What was changed outside of a compiled program, back on its devices."""
        moving, selection, fixed = self._spread_out((carry.moving, carry.selection, inputs.fixed))
        return dataclasses.replace(inputs, fixed=fixed), Carry(moving, selection, carry.step)

    @property
    def places(self) -> np.ndarray:
        """The positions of the members in the compiled arrays; those that pad them are copies of the last one."""
        return self.present if self._layout is None else pad_members(self.present, self._layout)

    def distinct(self, ids: np.ndarray) -> np.ndarray:
        """The ids of what the compiled arrays hold, those that pad members among themselves."""
        own = ids[self.present]
        return np.concatenate([own, ids.max() + 1 + np.arange(len(self.places) - len(own), dtype=ids.dtype)])

    @property
    def complete(self) -> bool:
        """Whether all members are in the compiled arrays."""
        return len(self.present) == self.num_members

    def status(self, carry: Carry) -> np.ndarray:
        """The status of all members `(members,)`."""
        status = to_host(carry.moving.status)[: len(self.present)]
        if self._last is None:
            return status
        everyone = np.array(to_host(self._last[0].status))
        everyone[self.present] = status
        return everyone

    def whole(self, carry: Carry) -> Carry:
        """The carry with all members in their places."""
        here = self._without_pads((carry.moving, carry.selection))
        moving, selection = here if self._last is None else _put(self._last, here, self.present)
        return Carry(moving, selection, carry.step)

    @property
    def fixed(self) -> MemberConstants:
        """What all members bring along."""
        return self._all_inputs.fixed

    def keep(self, inputs: Inputs) -> None:
        """Takes note that members present have been replaced, with what they bring along."""
        fixed = self._without_pads(inputs.fixed)
        fixed = fixed if self.complete else _put(self.fixed, fixed, self.present)
        self._all_inputs = dataclasses.replace(self._all_inputs, fixed=fixed)

    def spread(self, outputs: PyTree) -> PyTree:
        """Outputs `(..., members, ...)` with the members on axis 1 in their places; NaN or zero for the absent."""
        if len(self.places) > len(self.present):
            outputs = jax.tree.map(lambda x: x[:, : len(self.present)], outputs)
        return outputs if self.complete else jax.tree.map(self._spread, outputs)

    def _spread(self, x: np.ndarray) -> np.ndarray:
        fill = np.nan if jnp.issubdtype(x.dtype, jnp.inexact) else 0
        everyone = np.full((x.shape[0], self.num_members, *x.shape[2:]), fill, x.dtype)
        everyone[:, self.present] = x
        return everyone

    def own(self, data: PyTree, *, whole: bool = False) -> PyTree:
        """Data of which the parts marked `Each` hold what the compiled arrays do; with `whole` rows, or in parts."""
        if len(self.places) == self.num_members:
            return data
        take = lambda value: self._put_rows(_axes.Each(_take(value, self.places)), whole=whole)
        return _axes.map_each(take, data)

    def _put_rows(self, each: _axes.Each, *, whole: bool) -> _axes.Each:
        if self._layout is None:
            return each
        return replicate_rows(each, self._layout) if whole else shard_rows(each, self._layout)

    def width_for(self, carry: Carry) -> int:
        """How many members the arrays would hold without those that left: half as many as before, or a quarter, ..."""
        training = int((to_host(carry.moving.status) == Status.OK).sum())
        width, whole = len(self.places), lambda count: count if self._layout is None else self._layout.width(count)
        while max(training, _FEWEST) <= (half := whole(math.ceil(width / 2))) < width:
            width = half
        return width

    def pays(self, width: int, *, seconds_left: float, seconds_to_compile: float) -> bool:
        """Whether what fewer members save is more than another compiled program costs."""
        before = len(self.places)
        if width == before:
            return False
        return seconds_left * (1 - (width / before) ** self._speedup) > seconds_to_compile

    def measured(self, seconds_per_step: float) -> None:
        """Learns from the first step times after a change how time depends on the number of members."""
        width = len(self.places)
        if self._before is not None and self._before[0] > width:
            before, seconds = self._before
            gain = math.log(seconds / max(seconds_per_step, 1e-9)) / math.log(before / width)
            self._speedup = float(np.clip(gain, 0, 1))
        self._before = (width, seconds_per_step)

    def shrink(self, carry: Carry, width: int) -> tuple[Carry, Inputs]:
        """The arrays of `width` members: those that train, and as many others as that takes."""
        status = to_host(carry.moving.status)[: len(self.present)]
        chosen = np.sort(np.argsort(status != Status.OK, kind="stable")[:width])
        whole = self.whole(carry)
        self._last = (whole.moving, whole.selection)
        self.present = self.present[chosen]
        inputs = self._all_inputs
        moving, selection, fixed, limits = self._of_present((*self._last, inputs.fixed, inputs.limits))
        data, validation = self.own(inputs.data, whole=True), self.own(inputs.validation)
        inputs = Inputs(fixed, inputs.shared, data, validation, limits)
        return Carry(moving, selection, carry.step), inputs

    def _of_present(self, tree: PyTree) -> PyTree:
        """What belongs to the members present, and to those that pad them."""
        return self._spread_out(_take(tree, self.places))

    def _without_pads(self, tree: PyTree) -> PyTree:
        """What belongs to the members present only."""
        count = len(self.present)
        return tree if len(self.places) == count else self._spread_out(_take(tree, np.arange(count)))

    def _spread_out(self, tree: PyTree) -> PyTree:
        return tree if self._layout is None else shard_members(tree, self._layout)


@eqx.filter_jit
def _status_of(status: Int8[Array, " members"], real: Bool[Array, " members"]) -> Int8[Array, " members"]:
    """Members that pad others have stopped before they begin."""
    return jnp.where(real, status, jnp.int8(Status.STOPPED))


@eqx.filter_jit
def _take(tree: PyTree, index: Any) -> PyTree:
    return jax.tree.map(lambda x: x[index] if eqx.is_array(x) else x, tree)


@eqx.filter_jit
def _put(everyone: PyTree, present: PyTree, index: Any) -> PyTree:
    def put(x: Any, y: Any) -> Any:
        return x.at[index].set(y) if eqx.is_array(x) else x

    return jax.tree.map(put, everyone, present)
