import dataclasses
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Int8

from .._axes import Each, split_members
from .._axes._check_rows import check_some_rows
from .._check import check_flag, check_function, check_integers_fit
from .._compiled import filter_jit
from .._ensemble import M
from .._foreign import as_hashable, take_in
from .._pytree import PyTree
from .._suggest import explain_as
from ..plan import AbstractPlan, AnyPlan, Vmap
from ..plan._auto import as_plan
from ..plan._pilot import Pilot
from ..sharding._layout import Layout, as_layout
from ._check import check_optimiser_kind
from ._check_state import check_state_arrays
from ._flat_step import LastState, call_flat
from ._opt_hyper import follow_hyper
from ._state import MemberState, TrainState, check_state, check_train_state
from .compiled._carry import Carry, Inputs
from .compiled._health import nan_is_data
from .compiled._loss import as_loss
from .compiled._optimiser import Optimiser
from .compiled._program import Program


class Metrics(eqx.Module):
    """The results of one step, for every member.

    **Attributes:**

    - `loss`: `(members,)`, before the update; NaN for members that no longer train.
    - `aux`: the loss's auxiliary outputs, each `(members, ...)`; `None` without `has_aux`.
    - `status`: `(members,)`, int8, each an [`eqx_ensemble.train.Status`][].
    """

    loss: Float[Array, " members"]
    aux: PyTree
    status: Int8[Array, " members"]


class Step(eqx.Module):
    """A compiled training step; see [`eqx_ensemble.train.make_step`][]."""

    fn: Callable[..., Any] = eqx.field(static=True)
    optimiser: Optimiser = eqx.field(static=True)
    has_aux: bool = eqx.field(static=True)
    plan: AbstractPlan
    pilot: Pilot | None = eqx.field(static=True)
    layout: Layout | None = eqx.field(static=True)
    last: LastState = eqx.field(static=True)

    @explain_as("step")
    def __call__(self, state: TrainState[M], batch: PyTree) -> tuple[TrainState[M], Metrics]:
        """Takes one step on one batch, shared by all members except its parts marked [`eqx_ensemble.Each`][]."""
        check_train_state(state)
        state = follow_hyper(state, self.optimiser, name="train.make_step")
        batch = take_in(batch, "batch", name="train.make_step")
        check_integers_fit(batch, argument="batch", name="train.make_step")
        if self.layout is not None and self.layout.splits_weights:
            self = dataclasses.replace(self, layout=self.layout.split_weights(state.moving.params))
        with nan_is_data():
            if self.pilot is None:
                found = call_flat(_one_step, self, state, batch, self.last)
                if found is not None:
                    return found
                moving, step, metrics = _compiled_step(self, state, batch)
            else:
                moving, step, metrics = _step_under_pilot(self, self.pilot, state, batch)
        return TrainState(moving, state.fixed, state.shared, state.ids, step), metrics


def _step_under_pilot(step: Step, pilot: Pilot, state: TrainState, batch: PyTree) -> tuple:
    check_state_arrays(state, name="train.make_step")
    plain = dataclasses.replace(step, plan=Vmap(), pilot=None)
    alone, layout = dataclasses.replace(plain, layout=None), step.layout
    count = state.num_members if layout is None else layout.per_device(state.num_members)
    pilot.look(_step_under, alone, state, batch, num_members=count, unit="step")
    start = time.perf_counter()
    under = lambda plan, state: _compiled_step(dataclasses.replace(plain, plan=plan), state, batch)
    out = pilot.call(under, state)
    pilot.note(1, time.perf_counter() - start, seconds_left=None)
    return out


def _step_under(plan: AbstractPlan, step: Step, state: TrainState, batch: PyTree) -> tuple:
    check_state(state, step.optimiser, name="train.make_step", hyper_of="train.init")
    program, inputs, carry = _parts(dataclasses.replace(step, plan=plan), state, batch)
    return program.step(inputs, carry)


def _parts(step: Step, state: TrainState, batch: PyTree) -> tuple[Program, Inputs, Carry]:
    stateful = state.model_state is not None
    loss = as_loss(step.fn, stateful=stateful, has_aux=step.has_aux, hyper=state.fixed.hyper, name="train.make_step")
    program = Program(loss, step.optimiser, step.plan, step.layout)
    inputs = Inputs(state.fixed, state.shared, batch)
    return program, inputs, Carry(state.moving, None, state.step)


def _one_step(step: Step, state: TrainState, batch: PyTree) -> tuple[MemberState, Int[Array, ""], Metrics]:
    # Constants are not returned, because flattening big trees takes as long as a small step. For the same
    # reason signatures and states are inspected here, while tracing.
    check_state(state, step.optimiser, name="train.make_step", hyper_of="train.init")
    split_members((Each(state.ids), batch), name="train.make_step")  # raises for another number of members
    check_some_rows(batch, name="train.make_step")
    program, inputs, carry = _parts(step, state, batch)
    carry, (value, aux) = program.guarded_step(inputs, carry)
    carry = program.constrain(carry)
    return carry.moving, carry.step, Metrics(value, aux, carry.moving.status)


_compiled_step = filter_jit(_one_step)


class LoopStep(eqx.Module):
    """A step inside a compiled loop, with the layout and the plan of the state from which the loop starts."""

    step: Step

    def __call__(self, state: TrainState[M], batch: PyTree) -> tuple[TrainState[M], Metrics]:
        """Takes one step on one batch."""
        moving, count, metrics = _one_step(self.step, state, batch)
        return TrainState(moving, state.fixed, state.shared, state.ids, count), metrics


def step_in_loop(step: Step, state: TrainState) -> LoopStep:
    """The step for a compiled loop. With `plan="auto"` it uses the plan that was found so far."""
    layout = None if step.layout is None else step.layout.split_weights(state.moving.params)
    return LoopStep(dataclasses.replace(step, plan=step.plan.choice or step.plan, pilot=None, layout=layout))


def make_step(
    loss: Callable[..., Any],
    optimiser: Optimiser,
    *,
    has_aux: bool = False,
    plan: AnyPlan = None,
    mesh: Mesh | None = None,
) -> Step:
    """Makes a compiled step for a loop of your own: `state, metrics = step(state, batch)`.

    Gradient, optimiser and divergence checks are mapped over members; loss and optimiser are written for ONE. The old
    state stays valid: it is needed to revert diverged members, so donating it would save no memory.

    **Arguments:**

    - `loss`: `loss(model, batch, key) -> value` of one member; `loss(model, state, batch, key) -> (value, state)` for
        stateful members. A parameter named `hyper` receives the member's hyper-parameters.
    - `optimiser`: the optimiser passed to [`eqx_ensemble.train.init`][].
    - `has_aux`: whether the loss returns auxiliary outputs after its other outputs.
    - `plan`: how the members are executed, by default [`eqx_ensemble.plan.Vmap`][]. `"auto"` measures other plans once
        the loop has run long enough for that to pay off; `step.plan.explain()` shows the result.
    - `mesh`: the devices to run on, the mesh passed to [`eqx_ensemble.train.init`][].

    **Returns:** the step, a function of a training state and a batch.

    **Raises:** `TypeError` for a loss or an optimiser of another type.

    ```python
    def mse(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, key=key)
    optimiser = optax.adam(1e-2)
    state = ee.train.init(ensemble, optimiser, key=key)
    step = ee.train.make_step(mse, optimiser)
    for _ in range(3):
        state, metrics = step(state, (jnp.ones((8, 3)), jnp.zeros((8, 1))))
    metrics.loss.shape  # (4,)
    ```
    """
    check_function(loss, "loss", name="train.make_step", example="lambda model, batch, key: ...")
    check_optimiser_kind(optimiser, name="train.make_step")
    check_flag(has_aux, "has_aux", name="train.make_step")
    plan = as_plan(plan)
    pilot = Pilot(plan, name="train.make_step") if plan.choice is not plan else None
    loss, optimiser = as_hashable(loss), as_hashable(optimiser)
    return Step(loss, optimiser, has_aux, plan, pilot, as_layout(mesh, name="train.make_step"), LastState())
