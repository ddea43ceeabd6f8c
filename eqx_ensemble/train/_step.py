from collections.abc import Callable
from typing import Any, Generic

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int, Int8, PyTree

from .. import _axes, _check
from .._ensemble import M
from ..plan import AbstractPlan, Vmap
from ._health import judged_one
from ._loss import Loss, as_loss
from ._optimiser import Optimiser, update_member
from ._state import Fixed, Moving, TrainState


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


def member_step(
    moving: Moving,
    fixed: Fixed,
    shared: PyTree,
    batch: PyTree,
    step: Int[Array, ""],
    *,
    loss: Loss,
    optimiser: Optimiser,
) -> tuple[Moving, tuple[Float[Array, ""], PyTree]]:
    """One step of one member, not yet judged; every plan runs this function and no other."""
    key = jax.random.fold_in(fixed.key, step)

    def objective(params: PyTree) -> tuple[Float[Array, ""], tuple[PyTree, PyTree]]:
        model = eqx.combine(params, fixed.frozen, shared)
        return loss(model, moving.model_state, batch, key, fixed.hyper)

    (value, (model_state, aux)), grads = jax.value_and_grad(objective, has_aux=True)(moving.params)
    params, opt_state = update_member(
        optimiser, moving.params, moving.opt_state, grads, value, lambda p: objective(p)[0], fixed.hyper
    )
    return Moving(params, opt_state, model_state, moving.status, moving.left), (value, aux)


def all_members_step(
    moving: Moving,
    fixed: Fixed,
    shared: PyTree,
    step: Int[Array, ""],
    own: PyTree,
    batch_of: Callable[[PyTree], PyTree],
    *,
    loss: Loss,
    optimiser: Optimiser,
    plan: AbstractPlan,
) -> tuple[Moving, tuple[Float[Array, " members"], PyTree]]:
    """One step of all members under a plan, not yet judged.

    `own` holds arrays with the `members` axis from which, for one member, `batch_of` makes that member's batch.
    """

    def one(part: tuple[Moving, Fixed, PyTree]) -> PyTree:
        moving, fixed, own = part
        return member_step(moving, fixed, shared, batch_of(own), step, loss=loss, optimiser=optimiser)

    return _axes.over_leading_axis(plan.run, one, (moving, fixed, own))


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
    marked = (_axes.Each(state.ids), batch)
    own, view, _ = _axes.split_members(marked, name="make_step")
    moving, (value, aux) = all_members_step(
        state.moving,
        state.fixed,
        state.shared,
        state.step,
        own,
        lambda own: view(own)[1],
        loss=loss,
        optimiser=step.optimiser,
        plan=step.plan,
    )
    moving, (value, aux) = judged_one(state.moving, moving, (value, aux), state.step)
    return moving, state.step + 1, Metrics(value, aux, moving.status)


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
