import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from .. import _axes
from ..plan import AbstractPlan
from ._limits import stopped
from ._loss import Loss
from ._state import OK, Moving


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


def forgotten(selection: Selection | None, moving: Moving, members: np.ndarray) -> Selection | None:
    """What is known of the best weights, without that of `members`, which start again with those of `moving`."""
    if selection is None:
        return None
    fresh = no_selection(moving)
    return jax.tree.map(lambda old, new: old.at[members].set(new[members]), selection, fresh)


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
    """Validates all members; a member's best weights, patience and target follow from its own scores alone."""
    targets = None if inputs.limits.target is None else _axes.Each(inputs.limits.target)
    own, view, _ = _axes.split_members((_axes.Each(inputs.fixed.key), inputs.validation, targets), name="fit")

    def one(part: PyTree) -> PyTree:
        moving, selection, fixed, own = part
        model = eqx.nn.inference_mode(eqx.combine(moving.params, fixed.frozen, inputs.shared))
        key = jax.random.fold_in(fixed.key, step)
        _, validation, target = view(own)
        value, _ = score(model, moving.model_state, validation, key, fixed.hyper)
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
        stops = jnp.bool_(0) if patience is None else waited >= patience
        if target is not None:
            stops |= value <= target
        moving = stopped(moving, stops, step)
        return moving, selection, jnp.where(training, value, jnp.nan)

    return _axes.over_leading_axis(plan.run, one, (moving, selection, inputs.fixed, own))
