import dataclasses
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from .. import _axes
from ._program import Carry, Inputs
from ._state import OK, Fixed

_FEWEST = 4  # below three members a compiler arranges sums differently, and leaving would show in the others' last bits


class Roster:
    """Which members are in the compiled arrays, and what became of those that are not.

    Members that no longer train leave the arrays when that pays, and are back in their places at the end. The others
    do not notice: their rows and their randomness follow from their ids.
    """

    def __init__(self, carry: Carry, inputs: Inputs):
        self.num_members = len(np.asarray(carry.moving.status))
        self.present = np.arange(self.num_members)
        self._all_inputs = inputs
        self._last: tuple[PyTree, PyTree] | None = None  # of all members; out of date for those present
        self._speedup = 1.0
        self._before: tuple[int, float] | None = None

    @property
    def complete(self) -> bool:
        """Whether all members are in the compiled arrays."""
        return len(self.present) == self.num_members

    def status(self, carry: Carry) -> np.ndarray:
        """The status of all members `(members,)`."""
        status = np.asarray(carry.moving.status)
        if self._last is None:
            return status
        everyone = np.array(self._last[0].status)
        everyone[self.present] = status
        return everyone

    def whole(self, carry: Carry) -> Carry:
        """The carry with all members in their places."""
        if self._last is None:
            return carry
        moving, selection = _put(self._last, (carry.moving, carry.selection), jnp.asarray(self.present))
        return Carry(moving, selection, carry.step)

    @property
    def fixed(self) -> Fixed:
        """What all members bring along."""
        return self._all_inputs.fixed

    def keep(self, inputs: Inputs) -> None:
        """Takes note that members present have been replaced, with what they bring along."""
        fixed = inputs.fixed if self.complete else _put(self.fixed, inputs.fixed, jnp.asarray(self.present))
        self._all_inputs = dataclasses.replace(self._all_inputs, fixed=fixed)

    def spread(self, outputs: PyTree) -> PyTree:
        """Outputs `(..., members, ...)` with the members on axis 1 in their places; NaN or zero for the absent."""
        if self.complete:
            return outputs
        return jax.tree.map(self._spread, outputs)

    def _spread(self, x: np.ndarray) -> np.ndarray:
        fill = np.nan if jnp.issubdtype(x.dtype, jnp.inexact) else 0
        everyone = np.full((x.shape[0], self.num_members, *x.shape[2:]), fill, x.dtype)
        everyone[:, self.present] = x
        return everyone

    def own(self, data: PyTree) -> PyTree:
        """Data of which the parts marked `Each` hold the members present only."""
        if self.complete:
            return data
        is_each = lambda x: isinstance(x, _axes.Each)
        take = lambda x: _axes.Each(_take(x.value, jnp.asarray(self.present))) if is_each(x) else x
        return jax.tree.map(take, data, is_leaf=is_each)

    def width_for(self, carry: Carry) -> int:
        """How many members the arrays would hold without those that left: half as many as before, or a quarter, ..."""
        training = int((np.asarray(carry.moving.status) == OK).sum())
        width = len(self.present)
        while (half := math.ceil(width / 2)) >= max(training, _FEWEST):
            width = half
        return width

    def pays(self, width: int, *, seconds_left: float, seconds_to_compile: float) -> bool:
        """Whether what fewer members save is more than another compiled program costs."""
        if width == len(self.present):
            return False
        return seconds_left * (1 - (width / len(self.present)) ** self._speedup) > seconds_to_compile

    def measured(self, seconds_per_step: float) -> None:
        """Learns from the first step times after a change how time depends on the number of members."""
        if self._before is not None and self._before[0] > len(self.present):
            members, seconds = self._before
            gain = math.log(seconds / max(seconds_per_step, 1e-9)) / math.log(members / len(self.present))
            self._speedup = float(np.clip(gain, 0, 1))
        self._before = (len(self.present), seconds_per_step)

    def shrink(self, carry: Carry, width: int) -> tuple[Carry, Inputs]:
        """The arrays of `width` members: those that train, and as many others as that takes."""
        status = np.asarray(carry.moving.status)
        chosen = np.sort(np.argsort(status != OK, kind="stable")[:width])
        whole = self.whole(carry)
        self._last = (whole.moving, whole.selection)
        self.present = self.present[chosen]
        index = jnp.asarray(self.present)
        moving, selection = _take(self._last, index)
        inputs = self._all_inputs
        fixed, limits = _take((inputs.fixed, inputs.limits), index)
        inputs = Inputs(fixed, inputs.shared, self.own(inputs.data), self.own(inputs.validation), limits)
        return Carry(moving, selection, carry.step), inputs


@eqx.filter_jit
def _take(tree: PyTree, index: Int[Array, " members"]) -> PyTree:
    return jax.tree.map(lambda x: x[index] if eqx.is_array(x) else x, tree)


@eqx.filter_jit
def _put(everyone: PyTree, present: PyTree, index: Int[Array, " members"]) -> PyTree:
    def put(x: Any, y: Any) -> Any:
        return x.at[index].set(y) if eqx.is_array(x) else x

    return jax.tree.map(put, everyone, present)
