import dataclasses
import functools as ft
from collections.abc import Hashable
from typing import Any

import equinox as eqx
import jax

from ..._pytree import PyTree
from ...plan import AbstractPlan, Vmap
from ...plan._cost import Cost, cost_of
from ...plan._pilot import Pilot
from ..compiled._carry import Carry, Inputs
from ..compiled._flat import key_of
from ..compiled._program import Program
from ..data._source import AbstractWork
from ._active import ActiveMembers


class Executor:
    """Calls compiled programs under the plan that the pilot chooses."""

    def __init__(self, program: Program, pilot: Pilot, members: ActiveMembers) -> None:
        self._program, self._pilot, self._members = program, pilot, members

    @property
    def program(self) -> Program:
        """The program under the current plan."""
        if self._program.plan is not self._pilot.plan:
            self._program = dataclasses.replace(self._program, plan=self._pilot.plan)
        return self._program

    @property
    def key(self) -> Hashable:
        """The key of the current program; `None` if it cannot be hashed."""
        return key_of(self.program, self._members.inputs, self._members.carry)

    def call(self, work: AbstractWork) -> tuple[Carry, PyTree]:
        """Runs the work. Returns the carry and the results, which the device may still be computing."""
        inputs, batch, compiled = self._members.inputs, work.batch, work.compiled
        if not self._pilot.is_trial:
            return compiled((self.program, inputs, batch), self._members.carry)
        return self._pilot.call(lambda plan, carry: compiled((self.program, inputs, batch), carry), self._members.carry)

    def inspect(self, *, data: PyTree = None, steps_inside: bool = False, scan: bool | None = None) -> Program:
        """Analyses a step, on the batch `data` if given, to choose the plan. Returns the program under it."""
        program = dataclasses.replace(self._program, plan=Vmap(), layout=None)
        layout, carry, inputs = self._program.layout, self._members.carry, self._members.inputs
        inputs = inputs if data is None else dataclasses.replace(inputs, data=data)
        count = carry.moving.status.shape[0]
        count = count if layout is None else layout.per_device(count)
        options = {"num_members": count, "unit": "step", "steps_inside": steps_inside, "scan": scan}
        self._pilot.look(_step_under, program, inputs, carry, **options)
        return self.program

    def cost(self) -> Cost:
        """The cost of one member's step."""
        program = dataclasses.replace(self.program, layout=None)
        leaves, treedef = jax.tree.flatten((program, self._members.inputs, self._members.carry))
        shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) if eqx.is_array(x) else x for x in leaves)
        return _cost_of(shapes, treedef)


def _step_under(plan: AbstractPlan, program: Program, inputs: Inputs, carry: Carry) -> tuple[Carry, PyTree]:
    """One step under another plan than the program's own."""
    return dataclasses.replace(program, plan=plan).step(inputs, carry)


@ft.lru_cache(maxsize=64)
def _cost_of(leaves: tuple, treedef: Any) -> Cost:
    return cost_of(_own_step, *jax.tree.unflatten(treedef, leaves))


def _own_step(_: AbstractPlan, program: Program, *rest: Any) -> tuple[Carry, PyTree]:
    return program.step(*rest)  # under its own plan, on which a step may depend
