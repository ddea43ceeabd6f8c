import equinox as eqx
import jax
from jaxtyping import Array, Float, Int, PyTree

from ._loss import Loss
from ._optimiser import Optimiser, update_member
from ._state import Fixed, Moving


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
    return Moving(params, opt_state, model_state, moving.status, moving.left, moving.fault), (value, aux)
