from collections.abc import Callable
from typing import Any

import equinox as eqx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Int8

from .._axes import Each, check_no_batch, check_some_rows, split_members, warn_of_unmarked
from .._brief import brief_doc
from .._check import check_flag, check_function, check_integers_fit
from .._compiled import CompiledCall
from .._ensemble import M
from .._foreign import as_hashable, take_in
from .._pytree import PyTree
from .._sharding import Layout, layout_for
from ..plan import AbstractPlan, AnyPlan
from ..plan._engine import as_plan
from ._check import check_hyper_used, check_optimiser_kind, check_plan_together
from ._hyper import follow_hyper
from ._state import MemberState, TrainState, check_state, check_train_state
from ._together import bind
from .compiled._health import Carry, Inputs, nan_is_data
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

    __pdoc__ = brief_doc


class Step(eqx.Module):
    """A compiled training step; see [`eqx_ensemble.train.make_step`][]."""

    fn: Callable[..., Any] = eqx.field(static=True)
    optimiser: Optimiser = eqx.field(static=True)
    has_aux: bool = eqx.field(static=True)
    plan: AbstractPlan
    layout: Layout | None = eqx.field(static=True)

    def __call__(self, state: TrainState[M], batch: PyTree) -> tuple[TrainState[M], Metrics]:
        """Takes one step on one batch, shared by all members except its parts marked [`eqx_ensemble.Each`][]."""
        check_train_state(state)
        state = follow_hyper(state, self.optimiser)
        batch = take_in(batch, "batch")
        check_integers_fit(batch, argument="batch")
        with nan_is_data():
            return _call(self, state, batch)


def _call(step: Step, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
    # Constants are not returned, because flattening big trees takes as long as a small step.
    read = step, state.moving, state.fixed, state.shared, (state.ids, state.step, batch)
    moving, (count, metrics) = _compiled_step(read)
    return _next(state, moving, count), metrics


def _next(state: TrainState, moving: MemberState, count: Int[Array, ""]) -> TrainState:
    after = object.__new__(TrainState)  # its constructor takes as long as a small step, too
    vars(after).update(vars(state), moving=moving, step=count)
    return after


def _parts(step: Step, state: TrainState, batch: PyTree) -> tuple[Program, Inputs, Carry]:
    stateful = state.model_state is not None
    loss = as_loss(step.fn, stateful=stateful, has_aux=step.has_aux, hyper=state.fixed.hyper)
    if state.fixed.hyper is not None:
        check_hyper_used(step.optimiser, wants_hyper=loss.wants_hyper)
    program = Program(loss, bind(step.optimiser, state.fixed.tied), step.plan, step.layout)
    inputs = Inputs(state.fixed, state.shared, batch)
    return program, inputs, Carry(state.moving, None, state.step)


def _one_step(step: Step, state: TrainState, batch: PyTree) -> tuple[MemberState, tuple[Int[Array, ""], Metrics]]:
    # Signatures and states are inspected here, while tracing.
    check_state(state, step.optimiser, hyper_of="train.init")
    split_members((Each(state.ids), batch))  # raises for another number of members
    check_no_batch(batch)
    check_some_rows(batch)
    warn_of_unmarked(batch, state.num_members)
    program, inputs, carry = _parts(step, state, batch)
    carry, (value, aux) = program.guarded_step(inputs, carry)
    carry = program.constrain(carry)
    return carry.moving, (carry.step, Metrics(value, aux, carry.moving.status))


def _run_step(read: tuple[Any, ...], _: None) -> tuple[MemberState, tuple[Int[Array, ""], Metrics]]:
    step, moving, fixed, shared, (ids, count, batch) = read
    return _one_step(step, TrainState(moving, fixed, shared, ids, count), batch)


_compiled_step = CompiledCall(_run_step)


class LoopStep(eqx.Module):
    """A step inside a compiled loop, with the layout and the plan of the state from which the loop starts."""

    step: Step

    def __call__(self, state: TrainState[M], batch: PyTree) -> tuple[TrainState[M], Metrics]:
        """Takes one step on one batch."""
        moving, (count, metrics) = _one_step(self.step, state, batch)
        return _next(state, moving, count), metrics


def make_step(
    loss: Callable[..., Any],
    optimiser: Optimiser,
    *,
    has_aux: bool = False,
    plan: AnyPlan = None,
    mesh: Mesh | None = None,
) -> Step:
    """Makes a compiled step for a loop of your own: `state, metrics = step(state, batch)`.

    Loss and optimiser are written for ONE member. The old state stays valid.

    **Arguments:**

    - `loss`: the loss of one member, as for [`eqx_ensemble.fit`][].
    - `optimiser`: the optimiser passed to [`eqx_ensemble.train.init`][].
    - `has_aux`: whether the loss returns auxiliary outputs after its other outputs.
    - `plan`: how the members are executed, by default [`eqx_ensemble.plan.Vmap`][].
    - `mesh`: the devices to run on, the mesh passed to [`eqx_ensemble.train.init`][].

    **Returns:** the step, a function of a training state and a batch.

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
    check_function(loss, "loss", example="lambda model, batch, key: ...")
    check_optimiser_kind(optimiser, together=True)
    check_flag(has_aux, "has_aux")
    plan = as_plan(plan)
    check_plan_together(optimiser, plan)
    loss, optimiser = as_hashable(loss), as_hashable(optimiser)
    return Step(loss, optimiser, has_aux, plan, layout_for(mesh))
