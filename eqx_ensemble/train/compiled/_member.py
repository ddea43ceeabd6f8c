from collections.abc import Callable

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int, Key, PyTree

from .._state import MemberConstants, MemberState
from ._loss import Loss
from ._optimiser import Optimiser, update_member


def member_step(
    moving: MemberState,
    fixed: MemberConstants,
    shared: PyTree,
    batch: PyTree,
    step: Int[Array, ""],
    *,
    loss: Loss,
    optimiser: Optimiser,
) -> tuple[MemberState, tuple[Float[Array, ""], PyTree]]:
    """One step of one member, not yet checked for faults; every plan runs this function and no other."""
    key = jax.random.fold_in(fixed.key, step)
    objective = _objective(moving, fixed, shared, batch, key, loss=loss)
    (value, (model_state, aux)), grads = jax.value_and_grad(objective, has_aux=True)(moving.params)
    params, opt_state = update_member(
        optimiser, moving.params, moving.opt_state, grads, value, lambda p: objective(p)[0], fixed.hyper
    )
    return MemberState(params, opt_state, model_state, moving.status, moving.stopped_at, moving.fault), (value, aux)


def member_gradient(
    moving: MemberState, fixed: MemberConstants, shared: PyTree, batch: PyTree, key: Key[Array, ""], *, loss: Loss
) -> tuple[tuple[Float[Array, ""], tuple[PyTree, PyTree]], PyTree]:
    """One member's loss with its state and auxiliary outputs, and the gradient."""
    objective = _objective(moving, fixed, shared, batch, key, loss=loss)
    return jax.value_and_grad(objective, has_aux=True)(moving.params)


def _objective(
    moving: MemberState, fixed: MemberConstants, shared: PyTree, batch: PyTree, key: Key[Array, ""], *, loss: Loss
) -> Callable[[PyTree], tuple[Float[Array, ""], tuple[PyTree, PyTree]]]:
    def objective(params: PyTree) -> tuple[Float[Array, ""], tuple[PyTree, PyTree]]:
        model = eqx.combine(params, fixed.frozen, shared)
        return loss(model, moving.model_state, batch, key, fixed.hyper)

    return objective
