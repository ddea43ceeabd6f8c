import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int8

from ... import _axes
from ..._compiled import ProgramKey, Structure, flatten
from ..._pytree import PyTree
from ..._sharding import Layout, constrain_members, constrain_rows
from ...plan import AbstractPlan, Vmap
from ...plan._engine import Cost, NamedVmap, axes_of, sharded_plan
from .._state import MemberConstants, MemberState
from .._status import Status
from .._together import Together, mean_of_members, of_first_member, split_tied
from ._health import Carry, Inputs, revert_diverged_one
from ._loss import Loss
from ._optimiser import Optimiser, update_member
from ._select import Occasion, select
from ._selection import stop_at_limits
from ._windows import Windows


def trace_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, traced only by the first of several calls with the same shapes, and inlined into the calling program.

    Tracing a step takes as long as compiling a small one.
    """
    return jax.jit(fn, inline=True)


def scan(
    body: Callable[[Any, Any], tuple[Any, Any, Bool[Array, ""]]],
    carry: PyTree,
    xs: PyTree,
    length: Int[Array, ""],
    *,
    room: int | None = None,
    slot: Callable[[Int[Array, ""]], Int[Array, ""]] = lambda i: i,
) -> tuple[PyTree, PyTree, Int[Array, ""]]:
    """`jax.lax.scan` over the first `length` of `xs`, known only at run time; `body` may end it early.

    The outputs of iteration `i` are put at `slot(i)` of `room`, by default at `i`; later ones overwrite earlier ones.

    If `xs` have only one element, there is no loop, because XLA's CPU convolutions are slow inside of loops and
    conditionals. The body then runs even if `length` is 0, and the caller reverts it.

    **Returns:** the carry; the outputs, zeros where nothing ran; and the number of iterations.
    """
    most = jax.tree.leaves(xs)[0].shape[0]
    if most == 1:
        carry, y, _ = body(carry, jax.tree.map(lambda x: x[0], xs))
        return carry, jax.tree.map(lambda y: y[None], y), jnp.int32(1)
    body = trace_once(body)
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), xs)
    out = jax.eval_shape(body, carry, one)[1]
    ys = jax.tree.map(lambda x: jnp.zeros((room or most, *x.shape), x.dtype), out)

    def step(state: tuple[Array, Array, PyTree, PyTree]) -> tuple[Array, Array, PyTree, PyTree]:
        i, _, carry, ys = state
        x = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False, allow_negative_indices=False), xs)
        carry, y, stop = body(carry, x)
        ys = jax.tree.map(lambda all, y: jax.lax.dynamic_update_index_in_dim(all, y, slot(i), 0), ys, y)
        return i + 1, stop, carry, ys

    start = (jnp.int32(0), jnp.bool_(0), carry, ys)
    count, _, carry, ys = jax.lax.while_loop(lambda state: (state[0] < length) & ~state[1], step, start)
    return carry, ys, count


NEVER = jnp.iinfo(jnp.int32).max  # the step of a fault that did not occur

# With room for one or two outputs in a loop, XLA compiles its steps differently, which changes their last bits.
_LEAST_ROOM = 3


class Program(eqx.Module):
    """Everything that determines a run's compiled program, and nothing that it changes."""

    loss: Loss
    optimiser: Optimiser = eqx.field(static=True)
    plan: AbstractPlan
    layout: Layout | None = eqx.field(static=True, default=None)
    score: Loss | None = None
    patience: int | None = eqx.field(static=True, default=None)
    halts: bool = eqx.field(static=True, default=False)
    windows: Windows = eqx.field(static=True, default=Windows())
    # The digests of its traced functions, if the run is saved: a global that the loss reads may have changed since the
    # same objects were compiled, and the run must match its checkpoints.
    traced: tuple[str, ...] = eqx.field(static=True, default=())
    program_key: ProgramKey = eqx.field(static=True, default=())

    def step(self, inputs: Inputs, carry: Carry, *, last: bool = False) -> tuple[Carry, PyTree]:
        """One step of all members on the rows of the current step, or on all of the data without a row order.

        It does not check for faults. Outputs are `(members, ...)`. The `last` batch of an epoch is smaller.
        """
        member, own = self._member(inputs, carry, last=last)

        def one_step(part: PyTree) -> tuple[MemberState, PyTree]:
            step, moving, rows_at = member(part)
            return step(moving, rows_at(carry.step), carry.step)

        moving, outputs = _axes.over_leading_axis(self.sharded_plan.run, one_step, own)
        return Carry(moving, carry.selection, carry.step + 1), outputs

    def steps(
        self, inputs: Inputs, carry: Carry, count: Int[Array, ""], *, most: int
    ) -> tuple[Carry, PyTree, Int[Array, " members"]]:
        """`count` steps of at most `most`, without checks for faults.

        If `most` is 1, a step runs even if `count` is 0, and is reverted afterwards.

        The plan maps over members, and the loop over steps is inside: a plan that runs members one after another runs
        all steps of a member while its weights are in the processor's cache.

        **Returns:** the carry; the last outputs of each window, `(members, windows, ...)`; and the first step at which
        a member's loss was not finite, or `NEVER`.
        """
        member, own = self._member(inputs, carry)
        numbers = carry.step + jnp.arange(most, dtype=carry.step.dtype)
        room = min(max(self.windows.most(most), _LEAST_ROOM), most)
        slots = {"room": room, "slot": lambda i: self.windows.index(carry.step, carry.step + i)}

        def all_steps(part: PyTree) -> tuple[MemberState, PyTree, Int[Array, ""]]:
            step, moving, rows_at = member(part)

            def one(state: tuple[MemberState, Int[Array, ""]], number: Int[Array, ""]) -> tuple:
                moving, failed = state
                # Otherwise XLA computes rows in every read of the data, once per array.
                rows = jax.lax.optimization_barrier(rows_at(number))
                moving, outputs = step(moving, rows, number)
                failed = jnp.where(jnp.isfinite(outputs[0]), failed, jnp.minimum(failed, number))
                return (moving, failed), outputs, jnp.bool_(0)

            (moving, failed), outputs, _ = scan(one, (moving, jnp.int32(NEVER)), numbers, count, **slots)
            return moving, outputs, failed

        moving, outputs, failed = _axes.over_leading_axis(self.sharded_plan.run, all_steps, own)
        return Carry(moving, carry.selection, carry.step + count), outputs, failed

    def _member(
        self, inputs: Inputs, carry: Carry, *, last: bool = False
    ) -> tuple[Callable[[PyTree], tuple[Callable[..., Any], MemberState, Callable[..., Any]]], PyTree]:
        """The function `member`, and the arrays of all members over which a plan maps it.

        From one member's part, `member(part)` returns its step, its first state and the function of its rows.
        """
        data = (_axes.Each(inputs.fixed.key), inputs.data, inputs.order)
        own_data, view, _ = _axes.split_members(data)
        of_any_plan = dataclasses.replace(self, plan=Vmap())

        def member(part: PyTree) -> tuple[Callable[..., Any], MemberState, Callable[..., Any]]:
            moving, fixed, own_data = part
            _, data, order = view(own_data)
            rows_at = lambda step: None if order is None else order.batch(step, last=last)
            # Only `fit` has a key: elsewhere a loss may hold values of an outer transformation.
            step = _member_step_once if self.program_key else _member_step
            return ft.partial(step, of_any_plan, fixed, inputs.shared, data), moving, rows_at

        return member, (carry.moving, inputs.fixed, own_data)

    def constrain(self, carry: Carry) -> Carry:
        """The carry, constrained to the devices of its members."""
        if self.layout is None or carry.moving.status.shape[0] % self.layout.members:
            return carry
        moving, selection = constrain_members((carry.moving, carry.selection), self.layout, None)
        return Carry(moving, selection, carry.step)

    @property
    def sharded_plan(self) -> AbstractPlan:
        """The plan on all devices."""
        return sharded_plan(NamedVmap() if isinstance(self.optimiser, Together) else self.plan, self.layout)

    def guarded_step(self, inputs: Inputs, carry: Carry, *, last: bool = False) -> tuple[Carry, PyTree]:
        """One step of all members; those that diverge keep their last finite weights."""
        after, outputs = self.step(inputs, carry, last=last)
        moving, outputs = revert_diverged_one(carry.moving, after.moving, outputs, carry.step)
        return Carry(stop_at_limits(moving, inputs.limits, after.step), carry.selection, after.step), outputs

    def validate(self, inputs: Inputs, carry: Carry, occasion: Any = Occasion.EPOCH_END) -> tuple[Carry, PyTree]:
        """Scores every member on the validation data, keeps its best weights, and stops it by patience or target.

        Members stop only at the end of an epoch, which is the usual `occasion`.
        """
        if self.score is None or carry.selection is None:
            return carry, None
        moving, selection, scores = select(
            self.score,
            carry.moving,
            carry.selection,
            inputs,
            carry.step,
            plan=self.sharded_plan,
            patience=self.patience,
            occasion=jnp.asarray(occasion),
            axes=axes_of(self.layout),
        )
        return Carry(moving, selection, carry.step), scores


def _member_step(
    program: Program,
    fixed: MemberConstants,
    shared: PyTree,
    data: PyTree,
    moving: MemberState,
    rows: Int[Array, " batch"] | None,
    step: Int[Array, ""],
) -> tuple[MemberState, tuple[Float[Array, ""], PyTree]]:
    """One step of one member, without checks for faults; every plan runs this function."""
    batch = data if rows is None else take_rows(data, rows)
    batch = batch if program.layout is None else constrain_rows(batch, program.layout)
    key = jax.random.fold_in(fixed.key, step)
    rest = (moving.model_state, fixed, shared, batch, key)
    (value, (model_state, aux)), grads = jax.value_and_grad(program.loss, has_aux=True)(moving.params, *rest)
    value_of = lambda params: program.loss(params, *rest)[0]
    optimiser = program.optimiser
    args = moving.params, moving.opt_state
    update = lambda grads, mean_value=None: update_member(
        optimiser, *args, grads, value, value_of, fixed.hyper, mean_value=mean_value
    )
    if isinstance(optimiser, Together):
        params, opt_state = _update_together(program, optimiser, moving.status, value, grads, update)
    else:
        params, opt_state = update(grads)
    moving = MemberState(params, opt_state, model_state, moving.status, moving.stopped_at, moving.fault)
    return moving, (value, aux)


def _member_step_once(*args: Any) -> tuple[MemberState, tuple[Float[Array, ""], PyTree]]:
    """`_member_step`, traced once for the analysis of a step and for the program that runs it."""
    try:
        flat = flatten(args)
        call = _traced_step(flat.structure)
    except TypeError:  # something cannot be hashed
        return _member_step(*args)
    return call(flat.arrays)


@ft.lru_cache(maxsize=8)
def _traced_step(structure: Structure) -> Callable[[list[Array]], Any]:
    rest: Any = None

    def run(arrays: list[Array]) -> PyTree:
        nonlocal rest
        dynamic, rest = eqx.partition(_member_step(*structure.combine(arrays)), eqx.is_array)
        return dynamic

    run = trace_once(run)
    return lambda arrays: eqx.combine(run(arrays), rest)


def _update_together(
    program: Program,
    optimiser: Together,
    status: Int8[Array, ""],
    value: Float[Array, ""],
    grads: PyTree,
    update: Callable[[PyTree, Any], tuple[PyTree, PyTree]],
) -> tuple[PyTree, PyTree]:
    """The update of a member with the mean gradient, over all members that train, of what they share."""
    axes = axes_of(program.layout)
    own, shared = split_tied(grads, optimiser.tied)
    finite = [jnp.all(jnp.isfinite(x)) for x in (value, *jax.tree.leaves(grads))]
    chosen = (status == Status.OK) & jnp.all(jnp.stack(finite))
    mean, mean_value = mean_of_members((shared, value), chosen, axes)
    params, opt_state = update(eqx.combine(own, mean), mean_value)
    own, after = split_tied(params, optimiser.tied)
    # A gradient that is not finite ends its member, at the leaf where it is not.
    end = lambda x, grad: jnp.where(chosen, x, x + 0 * grad)
    return eqx.combine(own, jax.tree.map(end, of_first_member(after, chosen, axes), shared)), opt_state


def take_rows(data: PyTree, rows: Int[Array, " batch"]) -> PyTree:
    """Rows of every array; the indices were checked on the host."""
    return jax.tree.map(lambda x: x.at[rows].get(mode="promise_in_bounds"), data)


def in_a_loop(cost: Cost, *, scan: bool | None) -> bool:
    """Whether many steps run in one compiled loop: XLA's CPU convolutions are several times slower there."""
    if scan is not None:
        return scan
    return jax.default_backend() != "cpu" or cost.convolutions == 0
