import dataclasses
from typing import Any

import jax
from jaxtyping import PyTree

from ...plan import Vmap
from ...plan._cost import Cost
from ...plan._pilot import Pilot
from ..compiled._carry import Carry
from ..compiled._program import Program, cost_of_step, on_one_device, step_under
from ..data._source import AbstractWork
from ._active import ActiveMembers


class Executor:
    """Calls compiled programs under the plan that the pilot chooses."""

    def __init__(self, program: Program, pilot: Pilot, members: ActiveMembers):
        self._program, self._pilot, self._members = program, pilot, members

    @property
    def program(self) -> Program:
        """The program under its present plan."""
        if self._program.plan is not self._pilot.plan:
            self._program = dataclasses.replace(self._program, plan=self._pilot.plan)
        return self._program

    def call(self, work: AbstractWork) -> tuple[Carry, PyTree]:
        """Runs the work: the carry after it, and its results, which the device may still be computing."""
        inputs, batch, compiled = self._members.inputs, work.batch, work.compiled
        return self._pilot.call(lambda plan, carry: compiled((self.program, inputs, batch), carry), self._members.carry)

    def inspect(
        self, *, data: PyTree = None, rows: Any = None, steps_inside: bool = False, scan: bool | None = None
    ) -> Program:
        """Analyses a step on `rows` of the data, or on `data`, if the plan is still to be chosen."""
        program = on_one_device(dataclasses.replace(self._program, plan=Vmap()))
        layout, carry, inputs = self._program.layout, self._members.carry, self._members.inputs
        inputs = inputs if rows is not None else dataclasses.replace(inputs, data=data)
        count = carry.moving.status.shape[0]
        count = count if layout is None else layout.per_device(count)
        options = {"num_members": count, "unit": "step", "steps_inside": steps_inside, "scan": scan}
        self._pilot.look(step_under, program, inputs, carry, rows, **options)
        return self.program

    def cost(self, rows: jax.ShapeDtypeStruct) -> Cost:
        """What one member's step on such rows costs."""
        return cost_of_step(self.program, self._members.inputs, self._members.carry, rows)
