import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from .. import _axes
from ..plan import AbstractPlan
from ._loss import Loss
from ._state import OK, STOPPED, Moving


class Selection(eqx.Module):
    """The best weights so far of one member, by its own validation score; stacked, of all."""

    params: PyTree
    model_state: PyTree
    score: Float[Array, "*members"]
    step: Int[Array, "*members"]
    waited: Int[Array, "*members"]


def no_selection(moving: Moving) -> Selection:
    """Nothing validated yet. The arrays are copies, because both are donated."""
    count = moving.status.shape[0]
    params, model_state = jax.tree.map(jnp.array, (moving.params, moving.model_state))
    score = jnp.full(count, jnp.inf, jnp.float32)
    return Selection(params, model_state, score, jnp.full(count, -1, jnp.int32), jnp.zeros(count, jnp.int32))


def select(
    score: Loss,
    moving: Moving,
    selection: Selection,
    inputs: PyTree,
    step: Int[Array, ""],
    *,
    plan: AbstractPlan,
    patience: int | None,
    min_delta: float,
) -> tuple[Moving, Selection, Float[Array, " members"]]:
    """Validates all members; a member's best weights and its patience follow from its own scores alone."""
    own, view, _ = _axes.split_members((_axes.Each(inputs.fixed.key), inputs.validation), name="fit")

    def one(part: PyTree) -> PyTree:
        moving, selection, fixed, own = part
        model = eqx.nn.inference_mode(eqx.combine(moving.params, fixed.frozen, inputs.shared))
        key = jax.random.fold_in(fixed.key, step)
        value, _ = score(model, moving.model_state, view(own)[1], key, fixed.hyper)
        value = value.astype(jnp.float32)
        training = moving.status == OK
        better = training & (value < selection.score - min_delta)
        params, state = jax.tree.map(
            lambda new, old: jnp.where(better, new, old),
            (moving.params, moving.model_state),
            (selection.params, selection.model_state),
        )
        waited = jnp.where(better, 0, selection.waited + training.astype(jnp.int32))
        selection = Selection(
            params,
            state,
            jnp.where(better, value, selection.score),
            jnp.where(better, step, selection.step),
            waited,
        )
        if patience is not None:
            stops = training & (waited >= patience)
            status = jnp.where(stops, jnp.int8(STOPPED), moving.status)
            left = jnp.where(stops, step, moving.left)
            moving = eqx.tree_at(lambda m: (m.status, m.left), moving, (status, left))
        return moving, selection, jnp.where(training, value, jnp.nan)

    return _axes.over_leading_axis(plan.run, one, (moving, selection, inputs.fixed, own))
