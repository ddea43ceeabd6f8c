import dataclasses
import functools as ft
import operator
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Int8

from .._axes import Each, ProgramKey, check_some_rows, program_key, split_members
from .._check import check_flag, check_function, check_integers_fit, is_traced
from .._compiled import filter_jit
from .._ensemble import M
from .._foreign import as_hashable, take_in
from .._jaxpr import has_callbacks, plain_jit
from .._pytree import PyTree
from .._suggest import explain_as
from ..plan import AbstractPlan, AnyPlan, Vmap
from ..plan._engine import Pilot, as_plan
from ..sharding._engine import Layout, as_layout
from ._check import check_optimiser_kind
from ._check_member import check_state_arrays
from ._opt_hyper import follow_hyper
from ._state import MemberState, TrainState, check_state, check_train_state
from .compiled._flat import ARRAYS, constants_of
from .compiled._health import Carry, Inputs, nan_is_data
from .compiled._loss import as_loss
from .compiled._optimiser import Optimiser
from .compiled._program import Program

# Training steps as compiled functions of flat lists: flattening Modules takes as long as a small step.


class FlatState(NamedTuple):
    """A state as a list of arrays.

    `constants` are its other leaves. `treedef` is its structure, `top` that of its fields, `moving` that of the first
    field; `is_frozen`: whether all nodes are immutable. `calls` caches the compiled steps of such states, by structure
    and shapes of the batch; `None` if a step must be called with the state itself.
    """

    arrays: list[Any]
    constants: list[Any]
    treedef: Any
    top: Any
    moving: Any
    is_frozen: bool
    calls: dict[Any, Callable[..., Any] | None]

    def update(self, state: TrainState[Any]) -> "FlatState | None":
        """Updates the arrays to those of `state`; `None` if anything else has changed."""
        arrays, constants, treedef = _partition(state)
        unchanged = len(constants) == len(self.constants) and all(map(operator.is_, constants, self.constants))
        return self._replace(arrays=arrays) if treedef == self.treedef and unchanged else None


class LastState:
    """A cache of the arrays of the state that a step returned last, while that state is alive.

    All instances are equal, so that equal steps share their programs. A copy starts empty.
    """

    def __init__(self) -> None:
        self._known: tuple[weakref.ref[Any], weakref.ref[Any], FlatState] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return LastState, ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LastState)

    def __hash__(self) -> int:
        return 0

    def find(self, step: PyTree, state: TrainState[Any]) -> FlatState | None:
        """The arrays of `state`, if it is the last state that `step` returned."""
        known = self._known
        if known is None or known[0]() is not state or known[1]() is not step:
            return None
        return known[2] if known[2].is_frozen else known[2].update(state)

    def remember(self, step: PyTree, state: TrainState[Any], flat: FlatState) -> None:
        """Caches the arrays of a state."""
        self._known = (weakref.ref(state, self._forget), weakref.ref(step), flat)

    def _forget(self, ref: weakref.ref) -> None:
        known = self._known  # another thread may replace it
        if known is not None and known[0] is ref:
            self._known = None


def flatten_state(state: TrainState[Any]) -> FlatState:
    """A state as a list of arrays."""
    arrays, constants, treedef = _partition(state)
    top = jax.tree.structure(state, is_leaf=lambda x: x is not state)
    return FlatState(arrays, constants, treedef, top, jax.tree.structure(state.moving), _is_frozen(treedef), {})


def _partition(state: TrainState[Any]) -> tuple[list[Any], list[Any], Any]:
    leaves, treedef = jax.tree.flatten(state)
    arrays, constants = [], []
    for leaf in leaves:
        (arrays if isinstance(leaf, ARRAYS) else constants).append(leaf)
    return arrays, constants, treedef


@ft.lru_cache(maxsize=64)
def _is_frozen(treedef: Any) -> bool:
    """Whether all nodes are tuples or Modules: a dict or a list could be changed in place."""
    node = treedef.node_data()
    if node is None:
        return True
    kind = node[0]
    if kind is not type(None) and not issubclass(kind, tuple | eqx.Module):
        return False
    return all(map(_is_frozen, treedef.children()))


def call_flat(
    fn: Callable[..., Any], step: PyTree, state: TrainState[Any], batch: PyTree, last: LastState
) -> tuple[TrainState[Any], PyTree] | None:
    """The new state and the metrics of `fn(step, state, batch)`; `None` if it cannot be called on flat lists."""
    flat = last.find(step, state) or flatten_state(state)
    own, treedef = jax.tree.flatten(batch)
    if not all(isinstance(x, ARRAYS) for x in own):
        return None
    key = (treedef, *((x.shape, x.dtype) for x in own))
    if key not in flat.calls:
        flat.calls[key] = _compile(fn, step, state, own, treedef)
    call = flat.calls[key]
    if call is None:
        return None
    moving, count, metrics = call(flat.arrays, own)
    fields = (jax.tree.unflatten(flat.moving, moving), state.fixed, state.shared, state.ids, count)
    new = jax.tree.unflatten(flat.top, fields)  # a constructor takes as long as a small step, too
    last.remember(step, new, flat._replace(arrays=[*moving, *flat.arrays[len(moving) : -1], count]))
    return new, metrics


def _compile(
    fn: Callable[..., Any], step: PyTree, state: TrainState[Any], batch: list[Any], treedef: Any
) -> Callable[..., Any] | None:
    """The compiled step; `None` if it needs `equinox.filter_jit`, which explains the errors of calls of Python."""
    leaves, structure = jax.tree.flatten(state)
    settings, step_treedef = jax.tree.flatten(step)
    others = constants_of(leaves)
    if settings or is_traced(state.step) or not all(isinstance(x, ARRAYS) for x in jax.tree.leaves(state.moving)):
        return None
    try:
        hash((structure, others))
    except TypeError:  # a field or a constant is not hashable
        return None
    call, calls_python = _jit(fn, step_treedef, structure, others, program_key((step, state)), treedef)
    arrays = [x for x in leaves if isinstance(x, ARRAYS)]
    shapes = tuple((x.shape, x.dtype) for x in (*arrays, *batch))
    if shapes not in calls_python:
        calls_python[shapes] = has_callbacks(call.trace(arrays, batch).jaxpr.jaxpr)
    return None if calls_python[shapes] else call


@ft.lru_cache(maxsize=64)
def _jit(
    fn: Callable[..., Any], step_treedef: Any, structure: Any, others: tuple, key: ProgramKey, batch_treedef: Any
) -> tuple[Any, dict[Any, bool]]:
    """The step, and whether it calls Python by shapes, for states that differ only in their arrays."""
    del key

    def flat_step(arrays: list[Any], batch: list[Any]) -> tuple[list[Any], Any, PyTree]:
        left = iter(arrays)
        state = jax.tree.unflatten(structure, [next(left) if x is None else x for x in others])
        step = jax.tree.unflatten(step_treedef, ())
        moving, count, metrics = fn(step, state, jax.tree.unflatten(batch_treedef, batch))
        return jax.tree.leaves(moving), count, metrics

    return plain_jit(flat_step), {}


class Metrics(eqx.Module):
    """The results of one step, for every member.

    **Attributes:**

    - `loss`: `(members,)`, before the update; NaN for members that no longer train.
    - `aux`: the loss's auxiliary outputs, each `(members, ...)`; `None` without `has_aux`.
    - `status`: `(members,)`, int8, each an [`eqx_ensemble.train.Status`][].
    """

    loss: Float[Array, " members"]
    aux: PyTree
    status: Int8[Array, " members"]


class Step(eqx.Module):
    """A compiled training step; see [`eqx_ensemble.train.make_step`][]."""

    fn: Callable[..., Any] = eqx.field(static=True)
    optimiser: Optimiser = eqx.field(static=True)
    has_aux: bool = eqx.field(static=True)
    plan: AbstractPlan
    pilot: Pilot | None = eqx.field(static=True)
    layout: Layout | None = eqx.field(static=True)
    last: LastState = eqx.field(static=True)

    @explain_as("step")
    def __call__(self, state: TrainState[M], batch: PyTree) -> tuple[TrainState[M], Metrics]:
        """Takes one step on one batch, shared by all members except its parts marked [`eqx_ensemble.Each`][]."""
        check_train_state(state)
        state = follow_hyper(state, self.optimiser)
        batch = take_in(batch, "batch")
        check_integers_fit(batch, argument="batch")
        if self.layout is not None and self.layout.splits_weights:
            self = dataclasses.replace(self, layout=self.layout.split_weights(state.moving.params))
        with nan_is_data():
            if self.pilot is None:
                found = call_flat(_one_step, self, state, batch, self.last)
                if found is not None:
                    return found
                moving, step, metrics = _compiled_step(self, state, batch)
            else:
                moving, step, metrics = _step_under_pilot(self, self.pilot, state, batch)
        return TrainState(moving, state.fixed, state.shared, state.ids, step), metrics


def _step_under_pilot(step: Step, pilot: Pilot, state: TrainState, batch: PyTree) -> tuple:
    check_state_arrays(state)
    plain = dataclasses.replace(step, plan=Vmap(), pilot=None)
    alone, layout = dataclasses.replace(plain, layout=None), step.layout
    count = state.num_members if layout is None else layout.per_device(state.num_members)
    pilot.look(_step_under, alone, state, batch, num_members=count, unit="step")
    start = time.perf_counter()
    under = lambda plan, state: _compiled_step(dataclasses.replace(plain, plan=plan), state, batch)
    out = pilot.call(under, state)
    pilot.note(1, time.perf_counter() - start, seconds_left=None)
    return out


def _step_under(plan: AbstractPlan, step: Step, state: TrainState, batch: PyTree) -> tuple:
    check_state(state, step.optimiser, hyper_of="train.init")
    program, inputs, carry = _parts(dataclasses.replace(step, plan=plan), state, batch)
    return program.step(inputs, carry)


def _parts(step: Step, state: TrainState, batch: PyTree) -> tuple[Program, Inputs, Carry]:
    stateful = state.model_state is not None
    loss = as_loss(step.fn, stateful=stateful, has_aux=step.has_aux, hyper=state.fixed.hyper)
    program = Program(loss, step.optimiser, step.plan, step.layout)
    inputs = Inputs(state.fixed, state.shared, batch)
    return program, inputs, Carry(state.moving, None, state.step)


def _one_step(step: Step, state: TrainState, batch: PyTree) -> tuple[MemberState, Int[Array, ""], Metrics]:
    # Constants are not returned, because flattening big trees takes as long as a small step. For the same
    # reason signatures and states are inspected here, while tracing.
    check_state(state, step.optimiser, hyper_of="train.init")
    split_members((Each(state.ids), batch))  # raises for another number of members
    check_some_rows(batch)
    program, inputs, carry = _parts(step, state, batch)
    carry, (value, aux) = program.guarded_step(inputs, carry)
    carry = program.constrain(carry)
    return carry.moving, carry.step, Metrics(value, aux, carry.moving.status)


_compiled_step = filter_jit(_one_step)


class LoopStep(eqx.Module):
    """A step inside a compiled loop, with the layout and the plan of the state from which the loop starts."""

    step: Step

    def __call__(self, state: TrainState[M], batch: PyTree) -> tuple[TrainState[M], Metrics]:
        """Takes one step on one batch."""
        moving, count, metrics = _one_step(self.step, state, batch)
        return TrainState(moving, state.fixed, state.shared, state.ids, count), metrics


def step_in_loop(step: Step, state: TrainState) -> LoopStep:
    """The step for a compiled loop. With `plan="auto"` it uses the plan that was found so far."""
    layout = None if step.layout is None else step.layout.split_weights(state.moving.params)
    return LoopStep(dataclasses.replace(step, plan=step.plan.choice or step.plan, pilot=None, layout=layout))


def make_step(
    loss: Callable[..., Any],
    optimiser: Optimiser,
    *,
    has_aux: bool = False,
    plan: AnyPlan = None,
    mesh: Mesh | None = None,
) -> Step:
    """Makes a compiled step for a loop of your own: `state, metrics = step(state, batch)`.

    Gradient, optimiser and divergence checks are mapped over members; loss and optimiser are written for ONE. The old
    state stays valid: it is needed to revert diverged members, so donating it would save no memory.

    **Arguments:**

    - `loss`: `loss(model, batch, key) -> value` of one member; `loss(model, state, batch, key) -> (value, state)` for
        stateful members. A parameter named `hyper` receives the member's hyper-parameters.
    - `optimiser`: the optimiser passed to [`eqx_ensemble.train.init`][].
    - `has_aux`: whether the loss returns auxiliary outputs after its other outputs.
    - `plan`: how the members are executed, by default [`eqx_ensemble.plan.Vmap`][]. `"auto"` measures other plans once
        the loop has run long enough for that to pay off; `step.plan.explain()` shows the result.
    - `mesh`: the devices to run on, the mesh passed to [`eqx_ensemble.train.init`][].

    **Returns:** the step, a function of a training state and a batch.

    **Raises:** `TypeError` for a loss or an optimiser of another type.

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
    """
    check_function(loss, "loss", example="lambda model, batch, key: ...")
    check_optimiser_kind(optimiser)
    check_flag(has_aux, "has_aux")
    plan = as_plan(plan)
    pilot = Pilot(plan, name="train.make_step") if plan.choice is not plan else None
    loss, optimiser = as_hashable(loss), as_hashable(optimiser)
    return Step(loss, optimiser, has_aux, plan, pilot, as_layout(mesh), LastState())
