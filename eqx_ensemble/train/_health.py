from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from .. import _axes
from ._state import DIVERGED, OK, Moving


def judged(
    before: Moving,
    after: Moving,
    outputs: tuple[Float[Array, "steps members"], PyTree],
    step: Int[Array, ""],
    num_steps: Any,
) -> tuple[Moving, tuple[Float[Array, "steps members"], PyTree], Bool[Array, ""]]:
    """Keeps the steps of healthy members, and takes them back from the others.

    A member whose loss or weights stopped being finite keeps its last good weights and is marked diverged; a member
    that had left keeps everything. Weights that are not finite stay so, since an update is added to them: looking at
    the last ones of `num_steps` steps is looking at all. When these are several, whose fault was at an unknown one,
    nothing is kept of any member, and the steps have to be run again in smaller parts.

    **Returns:** the members after the steps; their losses and auxiliary outputs `(steps, members, ...)`, NaN (or zero,
    for what holds no NaN) for members that had left; and whether to run again.
    """
    training = before.status == OK
    good = jnp.all(jnp.isfinite(outputs[0]), axis=0) & _finite_members(after.params)
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
    outputs = jax.tree.map(lambda x: jnp.swapaxes(_or_blank(training, jnp.swapaxes(x, 0, 1)), 0, 1), outputs)
    return Moving(params, opt_state, model_state, status, left), outputs, again


def judged_one(
    before: Moving, after: Moving, outputs: tuple[Float[Array, " members"], PyTree], step: Int[Array, ""]
) -> tuple[Moving, tuple[Float[Array, " members"], PyTree]]:
    """[`judged`][eqx_ensemble.train._health.judged] after a single step, whose outputs are `(members, ...)`."""
    moving, outputs, _ = judged(before, after, jax.tree.map(lambda x: x[None], outputs), step, 1)
    return moving, jax.tree.map(lambda x: x[0], outputs)


def _or_blank(training: Bool[Array, " members"], x: Array) -> Array:
    blank = jnp.full_like(x, jnp.nan if jnp.issubdtype(x.dtype, jnp.inexact) else 0)
    return _axes.where_members(training, x, blank)


def _finite_members(stacked: PyTree) -> Bool[Array, " members"]:
    finite = [jnp.all(jnp.isfinite(x), axis=tuple(range(1, x.ndim))) for x in jax.tree.leaves(stacked)]
    return jnp.all(jnp.stack(finite), axis=0)
