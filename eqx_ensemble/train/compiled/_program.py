import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from ... import _axes
from ..._check import Kinds
from ...plan import AbstractPlan
from ...plan._cost import Cost
from ...plan._sharded import sharded_plan
from ...sharding._constrain import constrain_carry, constrain_member, constrain_rows
from ...sharding._layout import Layout
from .._state import MemberConstants, MemberState
from ._carry import Carry, Inputs
from ._health import revert_diverged_one
from ._limits import stop_at_limits
from ._loss import Loss
from ._optimiser import Optimiser, update_member
from ._scan import scan
from ._select import Occasion, select


class Program(eqx.Module):
    """All that decides a run's compiled program, and nothing that changes in it."""

    loss: Loss
    optimiser: Optimiser = eqx.field(static=True)
    plan: AbstractPlan
    layout: Layout | None = eqx.field(static=True, default=None)
    score: Loss | None = None
    patience: int | None = eqx.field(static=True, default=None)
    own_rows: bool = eqx.field(static=True, default=False)
    halts: bool = eqx.field(static=True, default=False)
    # What its functions were traced to, where that is saved with the run: a global that the loss reads may have changed
    # since the same objects were compiled, and the run has to be what its checkpoints say.
    traced: tuple[str, ...] = eqx.field(static=True, default=())
    numbers: Kinds = eqx.field(static=True, default=())

    def step(self, inputs: Inputs, carry: Carry, rows: Int[Array, "*members batch"] | None) -> tuple[Carry, PyTree]:
        """One step of all members on the given rows of the data; on the data themselves when `rows` is `None`.

        It is not yet checked for faults. Outputs are `(members, ...)`.
        """
        member, own = self._member(inputs, carry, rows)

        def one_step(part: PyTree) -> tuple[MemberState, PyTree]:
            step, moving, rows = member(part)
            return step(moving, rows, carry.step)

        moving, outputs = _axes.over_leading_axis(self.sharded_plan.run, one_step, own)
        return Carry(moving, carry.selection, carry.step + 1), outputs

    def steps(
        self, inputs: Inputs, carry: Carry, rows: Int[Array, "*members steps batch"], count: Int[Array, ""]
    ) -> tuple[Carry, PyTree]:
        """The first `count` steps of `rows`, not yet checked for faults. Outputs are `(members, steps, ...)`.

        Where `rows` hold one step only, it runs even if `count` is 0, and is reverted afterwards.

        The plan maps over members, and the loop over steps is inside: a plan that runs members one after another runs
        all steps of a member while its weights are in the processor's cache.
        """
        member, own = self._member(inputs, carry, rows)

        def all_steps(part: PyTree) -> tuple[MemberState, PyTree]:
            step, moving, rows = member(part)

            def one(state: tuple[MemberState, Array], rows: Int[Array, " batch"]) -> tuple:
                moving, outputs = step(state[0], rows, state[1])
                return (moving, state[1] + 1), outputs, jnp.bool_(0)

            (moving, _), outputs, _ = scan(one, (moving, carry.step), rows, count)
            return moving, outputs

        moving, outputs = _axes.over_leading_axis(self.sharded_plan.run, all_steps, own)
        return Carry(moving, carry.selection, carry.step + count), outputs

    def _member(self, inputs: Inputs, carry: Carry, rows: PyTree) -> tuple[Callable[[PyTree], tuple], PyTree]:
        """`member`, and the arrays of all members that a plan maps it over.

        Of one member's part, `member(part)` returns its step, its first state and its rows.
        """
        own_data, view, _ = _split_data(inputs.data, inputs.fixed)

        def member(part: PyTree) -> tuple:
            moving, fixed, own_data, own_rows = part
            step = ft.partial(_member_step, self, fixed, inputs.shared, view(own_data))
            return step, moving, own_rows if self.own_rows else rows

        return member, (carry.moving, inputs.fixed, own_data, rows if self.own_rows else None)

    def constrain(self, carry: Carry) -> Carry:
        """The carry, constrained to the devices of its members."""
        if self.layout is None or carry.moving.status.shape[0] % self.layout.members:
            return carry
        moving, selection = constrain_carry((carry.moving, carry.selection), self.layout)
        return Carry(moving, selection, carry.step)

    @property
    def sharded_plan(self) -> AbstractPlan:
        """The plan on all devices."""
        return sharded_plan(self.plan, self.layout)

    def guarded_step(
        self, inputs: Inputs, carry: Carry, rows: Int[Array, "*members batch"] | None
    ) -> tuple[Carry, PyTree]:
        """One step of all members, after which those that diverged keep their last good weights."""
        after, outputs = self.step(inputs, carry, rows)
        moving, outputs = revert_diverged_one(carry.moving, after.moving, outputs, carry.step)
        return Carry(stop_at_limits(moving, inputs.limits, after.step), carry.selection, after.step), outputs

    def validate(self, inputs: Inputs, carry: Carry, occasion: Any = Occasion.EPOCH_END) -> tuple[Carry, PyTree]:
        """Scores every member on the validation data, keeps its best weights, stops it when its patience ends.

        The last only at the end of an epoch, which is the usual `occasion`.
        """
        if self.score is None or carry.selection is None:
            return carry, None
        moving, selection, scores = select(
            self.score,
            carry.moving,
            carry.selection,
            inputs,
            carry.step,
            plan=self.sharded_plan,
            patience=self.patience,
            occasion=jnp.asarray(occasion),
        )
        return Carry(moving, selection, carry.step), scores


def _member_step(
    program: Program,
    fixed: MemberConstants,
    shared: PyTree,
    data: PyTree,
    moving: MemberState,
    rows: Int[Array, " batch"] | None,
    step: Int[Array, ""],
) -> tuple[MemberState, tuple[Float[Array, ""], PyTree]]:
    """One step of one member, not yet checked for faults; every plan runs this function and no other."""
    batch = data if rows is None else take_rows(data, rows)
    batch = batch if program.layout is None else constrain_rows(batch, program.layout)
    key = jax.random.fold_in(fixed.key, step)
    rest = (moving.model_state, fixed, shared, batch, key)
    (value, (model_state, aux)), grads = jax.value_and_grad(program.loss, has_aux=True)(moving.params, *rest)
    value_of = lambda params: program.loss(params, *rest)[0]
    params, opt_state = update_member(
        program.optimiser, moving.params, moving.opt_state, grads, value, value_of, fixed.hyper
    )
    moving = MemberState(params, opt_state, model_state, moving.status, moving.stopped_at, moving.fault)
    moving = moving if program.layout is None else constrain_member(moving, program.layout)
    return moving, (value, aux)


def _split_data(data: PyTree, fixed: MemberConstants) -> tuple[PyTree, Callable[[PyTree], PyTree], int]:
    own, view, count = _axes.split_members((_axes.Each(fixed.key), data), name="fit")
    return own, lambda part: view(part)[1], count


def take_rows(data: PyTree, rows: Int[Array, " batch"]) -> PyTree:
    """Rows of every array; the indices were checked on the host."""
    return jax.tree.map(lambda x: x.at[rows].get(mode="promise_in_bounds"), data)


def in_a_loop(cost: Cost, *, scan: bool | None) -> bool:
    """Whether many steps run in one compiled loop: XLA's CPU convolutions are several times slower there."""
    if scan is not None:
        return scan
    return jax.default_backend() != "cpu" or cost.convolutions == 0
