import dataclasses
import time
from collections.abc import Callable
from typing import Any, Generic

import equinox as eqx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Int8, PyTree

from .. import _check
from .._ensemble import M
from ..plan import AbstractPlan, AnyPlan, Vmap
from ..plan._auto import as_plan
from ..plan._pilot import Pilot
from ..sharding._layout import Layout, as_layout
from ._state import MemberState, TrainState
from .compiled._carry import Carry, Inputs
from .compiled._health import nan_is_data
from .compiled._loss import as_loss
from .compiled._optimiser import Optimiser
from .compiled._program import Program


class Metrics(eqx.Module):
    """What one step reports of every member.

    **Attributes:**

    - `loss`: `(members,)`, before the update; NaN for members that no longer train.
    - `aux`: the loss's auxiliary outputs, each `(members, ...)`; `None` without `has_aux`.
    - `status`: `(members,)`, int8, each an [`eqx_ensemble.train.Status`][].
    """

    loss: Float[Array, " members"]
    aux: PyTree
    status: Int8[Array, " members"]


class Step(eqx.Module, Generic[M]):
    """A compiled training step; see [`eqx_ensemble.train.make_step`][]."""

    fn: Callable[..., Any] = eqx.field(static=True)
    optimiser: Optimiser = eqx.field(static=True)
    has_aux: bool = eqx.field(static=True)
    plan: AbstractPlan
    pilot: Pilot | None = eqx.field(static=True)
    layout: Layout | None = eqx.field(static=True)

    def __call__(self, state: TrainState[M], batch: PyTree) -> tuple[TrainState[M], Metrics]:
        """One step on one batch, shared by all members but for its parts marked [`eqx_ensemble.Each`][]."""
        _check.train_state(state, TrainState)
        _check.check_integers_fit(batch, argument="batch", name="train.make_step")
        if self.layout is not None and self.layout.splits_weights:
            self = dataclasses.replace(self, layout=self.layout.split_weights(state.moving.params))
        with nan_is_data():
            if self.pilot is None:
                moving, step, metrics = _compiled_step(self, state, batch)
            else:
                moving, step, metrics = _piloted(self, self.pilot, state, batch)
        return TrainState(moving, state.fixed, state.shared, state.ids, step), metrics


def _piloted(step: Step, pilot: Pilot, state: TrainState, batch: PyTree) -> tuple:
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
    program, inputs, carry = _parts(dataclasses.replace(step, plan=plan), state, batch)
    return program.step(inputs, carry, None)


def _parts(step: Step, state: TrainState, batch: PyTree) -> tuple[Program, Inputs, Carry]:
    stateful = state.model_state is not None
    loss = as_loss(step.fn, stateful=stateful, has_aux=step.has_aux, hyper=state.fixed.hyper, name="make_step")
    program = Program(loss, step.optimiser, step.plan, step.layout)
    inputs = Inputs(state.fixed, state.shared, batch)
    return program, inputs, Carry(state.moving, None, state.step)


@eqx.filter_jit
def _compiled_step(step: Step, state: TrainState, batch: PyTree) -> tuple[MemberState, Int[Array, ""], Metrics]:
    # What stays is not returned: taking big trees apart costs as much as a small step. The same goes for looking at a
    # signature at every call.
    program, inputs, carry = _parts(step, state, batch)
    carry, (value, aux) = program.guarded_step(inputs, carry, None)
    carry = program.constrain(carry)
    return carry.moving, carry.step, Metrics(value, aux, carry.moving.status)


def make_step(
    loss: Callable[..., Any],
    optimiser: Optimiser,
    *,
    has_aux: bool = False,
    plan: AnyPlan = None,
    mesh: Mesh | None = None,
) -> Step:
    """A compiled step for your own loop: `state, metrics = step(state, batch)`.

    Gradient, optimiser and freezing run mapped over members; loss and optimiser are written for one. The old state
    stays usable; its memory is needed until the new one is checked, so that donating it would save nothing.

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

    **Arguments:**

    - `loss`: `loss(model, batch, key) -> value` of one member; `loss(model, state, batch, key) -> (value, state)` for
        stateful members. A parameter named `hyper` receives the member's hyper-parameters.
    - `optimiser`: what was given to [`eqx_ensemble.train.init`][].
    - `has_aux`: the loss returns auxiliary outputs after its other outputs.
    - `plan`: how the members are executed; `eqx_ensemble.plan.Vmap()` if not given. `"auto"` tries others as soon as
        your loop has lasted long enough to be worth it; `step.plan.explain()` says what was found.
    - `mesh`: the devices to run on, from [`eqx_ensemble.make_mesh`][]: the one that was given to
        [`eqx_ensemble.train.init`][].

    **Returns:** the step, a function of a training state and a batch.
    """
    _check.check_function(loss, "loss", name="make_step", example="lambda model, batch, key: ...")
    _check.optax_or_function(optimiser, name="make_step")
    _check.check_flag(has_aux, "has_aux", name="make_step")
    plan = as_plan(plan)
    pilot = Pilot(plan, name="train.make_step") if plan.chosen is not plan else None
    return Step(loss, optimiser, has_aux, plan, pilot, as_layout(mesh, name="make_step"))
