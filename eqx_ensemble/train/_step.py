from collections.abc import Callable
from typing import Any, Generic

import equinox as eqx
from jaxtyping import Array, Float, Int, Int8, PyTree

from .. import _check
from .._ensemble import M
from ..plan import AbstractPlan, Vmap
from ._loss import as_loss
from ._optimiser import Optimiser
from ._program import Carry, Inputs, Program
from ._state import Moving, TrainState


class Metrics(eqx.Module):
    """What one step reports of every member.

    **Attributes:**

    - `loss`: `(members,)`, before the update; NaN for members that no longer train.
    - `aux`: the loss's auxiliary outputs, each `(members, ...)`; `None` without `has_aux`.
    - `status`: `(members,)`: 0 ok, 1 stopped, 2 diverged.
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

    def __call__(self, state: TrainState[M], batch: PyTree) -> tuple[TrainState[M], Metrics]:
        """One step on one batch, shared by all members but for its parts marked [`eqx_ensemble.Each`][]."""
        _check.train_state(state, TrainState)
        moving, step, metrics = _compiled_step(self, state, batch)
        return TrainState(moving, state.fixed, state.shared, state.ids, step), metrics


@eqx.filter_jit
def _compiled_step(step: Step, state: TrainState, batch: PyTree) -> tuple[Moving, Int[Array, ""], Metrics]:
    # What stays is not returned: taking big trees apart costs as much as a small step.
    stateful = state.model_state is not None
    # The same goes for looking at a signature at every call.
    loss = as_loss(step.fn, stateful=stateful, has_aux=step.has_aux, hyper=state.fixed.hyper, name="make_step")
    program = Program(loss, None, step.optimiser, step.plan, None, 0.0, own_rows=False)
    inputs, carry = Inputs(state.fixed, state.shared, batch, None), Carry(state.moving, None, state.step)
    carry, (value, aux) = program.judged_step(inputs, carry, None)
    return carry.moving, carry.step, Metrics(value, aux, carry.moving.status)


def make_step(
    loss: Callable[..., Any],
    optimiser: Optimiser,
    *,
    has_aux: bool = False,
    plan: AbstractPlan | None = None,
) -> Step:
    """A compiled step for your own loop: `state, metrics = step(state, batch)`.

    Gradient, optimiser and freezing run mapped over members; loss and optimiser are written for one. The old state
    stays usable; its memory is needed until the new one is judged, so that donating it would save nothing.

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
    - `plan`: how the members are executed; `eqx_ensemble.plan.Vmap()` if not given.

    **Returns:** the step, a function of a training state and a batch.
    """
    plan = Vmap() if plan is None else plan
    _check.plan(plan, AbstractPlan)
    return Step(loss, optimiser, has_aux, plan)
