import contextlib
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int8

from ... import _axes
from ..._pytree import PyTree
from .._state import MemberConstants, MemberState
from .._status import Status
from ._apart import apart
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
    sums = [_finite_sum(x) for x in jax.tree.leaves(after.params)]
    first = _first_fault(finite_loss, sums)
    training, some = before.status == Status.OK, jnp.asarray(num_steps) > 0
    lost = training & (first >= 0) & some
    again = (num_steps > 1) & jnp.any(lost)
    keep, diverged = _members_to_keep(before.status, first, some & ~again), lost & ~again
    params, opt_state, model_state = jax.tree.map(
        lambda new, old: _axes.where_members(keep, new, old),
        (after.params, after.opt_state, after.model_state),
        (before.params, before.opt_state, before.model_state),
    )
    status = jnp.where(diverged, jnp.int8(Status.DIVERGED), before.status)
    stopped_at = jnp.where(diverged, step, before.stopped_at)
    fault = jnp.where(diverged, first, before.fault)
    outputs = jax.tree.map(lambda x: _or_blank(training, x), outputs)
    return MemberState(params, opt_state, model_state, status, stopped_at, fault), outputs, again


@apart
def _first_fault(finite_loss: Bool[Array, " members"], sums: list[Array]) -> Int[Array, " members"]:
    """The first of each member's loss and `sums` that is not finite, or -1."""
    finite = jnp.stack([finite_loss, *map(jnp.isfinite, sums)])
    return jnp.where(jnp.all(finite, axis=0), -1, jnp.argmin(finite, axis=0).astype(jnp.int32))


@apart
def _members_to_keep(status: Int8[Array, " members"], first: Int[Array, " members"], good: Bool[Array, ""]) -> Array:
    return (status == Status.OK) & (first < 0) & good


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


def _finite_sum(x: Array) -> Array:
    """A sum `(members,)` of parts of the values, so small that it is finite unless one of them is not.

    A product with a constant, because XLA takes much longer to compile a reduction.
    """
    x = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
    if x.ndim == 1:
        return x
    part = jnp.full(x.shape[1:], 0.5 / max(x[0].size, 1), x.dtype)
    return jnp.tensordot(x, part, part.ndim, precision=jax.lax.Precision.HIGHEST)
