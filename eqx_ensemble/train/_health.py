from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from .. import _axes
from ._state import DIVERGED, OK, Moving


def judged(
    before: Moving, after: Moving, losses: Float[Array, "steps members"], step: Int[Array, ""], num_steps: Any
) -> tuple[Moving, Float[Array, "steps members"], Bool[Array, ""]]:
    """Keeps the steps of healthy members, and takes them back from the others.

    A member whose loss or weights stopped being finite keeps its last good weights and is marked diverged; a member
    that had left keeps everything. Weights that are not finite stay so, since an update is added to them: looking at
    the last ones of `num_steps` steps is looking at all. When these are several, whose fault was at an unknown one,
    nothing is kept of any member, and the steps have to be run again in smaller parts.

    **Returns:** the members after the steps; their losses, NaN for members that had left; and whether to run again.
    """
    training = before.status == OK
    good = jnp.all(jnp.isfinite(losses), axis=0) & _finite_members(after.params)
    lost = training & ~good
    again = (num_steps > 1) & jnp.any(lost)
    keep = training & good & ~again
    params, opt_state, model_state = jax.tree.map(
        lambda new, old: _axes.where_members(keep, new, old),
        (after.params, after.opt_state, after.model_state),
        (before.params, before.opt_state, before.model_state),
    )
    diverged = lost & ~again
    status = jnp.where(diverged, jnp.int8(DIVERGED), before.status)
    left = jnp.where(diverged, step, before.left)
    return Moving(params, opt_state, model_state, status, left), jnp.where(training, losses, jnp.nan), again


def _finite_members(stacked: PyTree) -> Bool[Array, " members"]:
    finite = [jnp.all(jnp.isfinite(x), axis=tuple(range(1, x.ndim))) for x in jax.tree.leaves(stacked)]
    return jnp.all(jnp.stack(finite), axis=0)
