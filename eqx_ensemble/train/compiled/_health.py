import contextlib
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ... import _axes
from ..._pytree import PyTree
from .._state import MemberConstants, MemberState
from .._status import Status
from ._order import RowOrder
from ._selection import Limits, Selection


class Carry(eqx.Module):
    """The arrays that a run changes, stacked; donated to every chunk."""

    moving: MemberState
    selection: Selection | None
    step: Int[Array, ""]


class Inputs(eqx.Module):
    """The arrays that a run only reads, of all members or of the active ones; without an order, data are a batch."""

    fixed: MemberConstants
    shared: PyTree
    data: PyTree
    validation: PyTree = None
    limits: Limits = Limits()
    order: RowOrder | None = None


@contextlib.contextmanager
def nan_is_data() -> Iterator[None]:
    """Disables `jax_debug_nans` and `jax_debug_infs`: a NaN affects one member only, and stopped members report NaN."""
    config: Any = jax.config  # its attributes are in no stub
    if not (config.jax_debug_nans or config.jax_debug_infs):
        yield
        return
    with jax.debug_nans(False), jax.debug_infs(False):  # noqa: FBT003 (their one argument)
        yield


def revert_diverged(
    before: MemberState,
    after: MemberState,
    outputs: tuple[Float[Array, "members windows"], PyTree],
    step: Int[Array, ""],
    num_steps: Any,
    *,
    finite_loss: Bool[Array, " members"],
) -> tuple[MemberState, tuple[Float[Array, "members windows"], PyTree], Bool[Array, ""]]:
    """Keeps the steps of healthy members, and reverts the others.

    A member whose loss or weights are no longer finite keeps its last good weights and is marked diverged; a member
    that had stopped keeps its state. Weights that are not finite stay so, because an update is added to them: checking
    the weights after `num_steps` steps checks all steps. If a member diverged at an unknown step of several, all
    members are reverted, and the steps must be rerun in smaller parts. If `num_steps` is 0, all are reverted as well: a
    program with room for one step only has run it nevertheless.

    **Arguments:**

    - `finite_loss`: whether a member's losses were finite in all of the steps; `outputs` may not hold all of them.

    **Returns:** the members after the steps; their losses and auxiliary outputs `(members, windows, ...)`, NaN (zero
    for integers) for members that had stopped; and whether to run again.
    """
    training = before.status == Status.OK
    some = jnp.asarray(num_steps) > 0
    finite = jnp.stack([finite_loss, *map(_finite_members, jax.tree.leaves(after.params))])
    good = jnp.all(finite, axis=0)
    lost = training & ~good & some
    again = (num_steps > 1) & jnp.any(lost)
    keep = training & good & ~again & some
    params, opt_state, model_state = jax.tree.map(
        lambda new, old: _axes.where_members(keep, new, old),
        (after.params, after.opt_state, after.model_state),
        (before.params, before.opt_state, before.model_state),
    )
    diverged = lost & ~again
    status = jnp.where(diverged, jnp.int8(Status.DIVERGED), before.status)
    stopped_at = jnp.where(diverged, step, before.stopped_at)
    fault = jnp.where(diverged, jnp.argmin(finite, axis=0).astype(jnp.int32), before.fault)
    outputs = jax.tree.map(lambda x: _or_blank(training, x), outputs)
    return MemberState(params, opt_state, model_state, status, stopped_at, fault), outputs, again


def revert_diverged_one(
    before: MemberState, after: MemberState, outputs: tuple[Float[Array, " members"], PyTree], step: Int[Array, ""]
) -> tuple[MemberState, tuple[Float[Array, " members"], PyTree]]:
    """`revert_diverged` after a single step, whose outputs are `(members, ...)`."""
    one = jax.tree.map(lambda x: x[:, None], outputs)
    moving, outputs, _ = revert_diverged(before, after, one, step, 1, finite_loss=jnp.isfinite(outputs[0]))
    return moving, jax.tree.map(lambda x: x[:, 0], outputs)


def fault_path(fault: int, params: PyTree) -> str:
    """The first non-finite value of a member: `"loss"`, the path of a weight, or an empty string for none."""
    if fault < 0:
        return ""
    if fault == 0:
        return "loss"
    return jax.tree_util.keystr(jax.tree_util.tree_leaves_with_path(params)[fault - 1][0])


def _or_blank(training: Bool[Array, " members"], x: Array) -> Array:
    blank = jnp.full_like(x, jnp.nan if jnp.issubdtype(x.dtype, jnp.inexact) else 0)
    return _axes.where_members(training, x, blank)


def _finite_members(x: Array) -> Bool[Array, " members"]:
    return jnp.all(jnp.isfinite(x), axis=tuple(range(1, x.ndim)))
