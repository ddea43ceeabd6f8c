import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int8

from .._brief import brief_doc
from .._check import check_integers_fit
from .._ensemble import M
from .._foreign import take_in
from .._keys import tag
from .._map import is_per_member, view
from .._mesh import rows_of_mesh
from .._pytree import PyTree
from ..plan import AnyPlan, Blocks, Vmap, as_plan
from ._blocks import axes_of_batch
from ._meeting import MEMBERS, Optimiser
from ._member import Task, choose_trained, flags_of, take_step
from ._state import Status, Trained, TrainState, all_finite, allow_nan, pieces_of, trained_of, with_trained

T = TypeVar("T")


class Metrics(eqx.Module):
    """The results of one step, for every member.

    **Attributes:**

    - `loss`: `(members,)`, before the update; NaN for members that no longer train.
    - `aux`: the loss's auxiliary outputs, each `(members, ...)`; `None` without `has_aux`.
    - `status`: `(members,)`, int8, each an [`eqx_ensemble.train.Status`][].
    """

    loss: Float[Array, "*members"]
    aux: PyTree
    status: Int8[Array, "*members"]

    __pdoc__ = brief_doc


@dataclasses.dataclass(frozen=True)
class Step:
    """A compiled training step; see [`eqx_ensemble.train.make_step`][]."""

    task: Task = dataclasses.field(repr=False)
    plan: AnyPlan

    @allow_nan()
    def __call__(self, state: TrainState[M], batch: PyTree) -> tuple[TrainState[M], Metrics]:
        """Takes one step on one batch, shared by all members except its parts marked [`eqx_ensemble.Each`][]."""
        if not isinstance(state, TrainState):
            raise TypeError(f"A step takes a `TrainState`, as of `train.init`; got `{type(state).__name__}`.")
        batch = take_in(batch, "batch")
        check_integers_fit(batch, argument="batch")
        # `equinox.filter_jit` of a training state takes 2 ms, `jax.jit` of the list of its arrays a third of one.
        leaves, structure = jax.tree.flatten(state)
        given, structure_of_batch = jax.tree.flatten(batch)
        others = tuple(None if eqx.is_array(x) else x for x in (*leaves, *given))
        static = self, structure, structure_of_batch, others
        changed, metrics = _compiled_step(static, [x for x in (*leaves, *given) if eqx.is_array(x)])
        for i, x in changed.items():
            leaves[i] = x
        return jax.tree.unflatten(structure, leaves), metrics


@ft.partial(jax.jit, static_argnums=0)
def _compiled_step(static: tuple, arrays: list[Any]) -> tuple[dict[int, Any], Metrics]:
    """The leaves of the state that a step changes, by their number."""
    step, structure, structure_of_batch, others = static
    left = iter(arrays)
    leaves = [next(left) if x is None else x for x in others]
    before, batch = leaves[: structure.num_leaves], leaves[structure.num_leaves :]
    state, batch = jax.tree.unflatten(structure, before), jax.tree.unflatten(structure_of_batch, batch)
    state, metrics = guarded_step(step.task, state, batch, step.plan)
    return {
        i: x for i, (x, old) in enumerate(zip(jax.tree.leaves(state), before, strict=True)) if x is not old
    }, metrics


def guarded_step(task: Task, state: TrainState, batch: PyTree, plan: AnyPlan) -> tuple[TrainState, Metrics]:
    """One step of all members; one whose loss or weights are not finite keeps what it had, and stops."""
    moving, common, rest = pieces_of(state)

    def one(moving: PyTree, batch: PyTree) -> tuple:
        before = eqx.combine(moving, common, rest)
        batch = jax.tree.map(view, batch, is_leaf=is_per_member)
        key = jax.random.fold_in(jax.random.fold_in(before.keys, tag("loss")), before.step)
        new, (value, aux) = take_step(task, trained_of(before), before, batch, key)
        after, metrics = keep_if_finite(before, new, value, aux)
        return eqx.filter(after, flags_of(moving)), eqx.filter(after, flags_of(common)), metrics

    own, axes = eqx.if_array(0), axes_of_batch(task, batch)
    if isinstance(plan, Blocks) and not task.meets:
        marked, unmarked = eqx.partition(batch, jax.tree.map(lambda a: a == 0, axes, is_leaf=lambda x: x is None))
        moving, _, metrics = plan.run(lambda part: one(part[0], eqx.combine(part[1], unmarked)), (moving, marked))
    else:
        mapped = eqx.filter_vmap(one, in_axes=(own, axes), out_axes=(own, None, own), axis_name=MEMBERS)
        moving, common, metrics = mapped(moving, batch)
    return eqx.combine(moving, common, rest), metrics


def keep_if_finite(before: TrainState, new: Trained, value: Any, aux: PyTree) -> tuple[TrainState, Metrics]:
    """The state of one member after a step that it keeps, if it trains and all is finite, and the step's results."""
    trains = before.status == Status.OK
    finite = all_finite((new.own, new.common)) & jnp.isfinite(value)
    after = with_trained(before, choose_trained(trains & finite, new, trained_of(before)))
    after = dataclasses.replace(
        after,
        step=before.step + (trains & finite).astype(jnp.int32),
        status=jnp.where(trains & ~finite, jnp.int8(Status.DIVERGED), before.status),
        loss=jnp.where(trains, value, before.loss).astype(before.loss.dtype),
    )
    return after, Metrics(jnp.where(trains, value, jnp.nan), aux, after.status)


def make_step(
    loss: Callable[..., Any],
    optimiser: Optimiser,
    *,
    has_aux: bool = False,
    plan: AnyPlan | None = None,
    mesh: Mesh | None = None,
) -> Step:
    """Makes a compiled training step of all members, for a loop of your own.

    Every member takes the step that training it alone would take. A member whose loss or weights are not finite keeps
    its last finite weights and stops. As with `jax.jit`, a loss that is edited in place is another one only after
    `jax.clear_caches()`.

    **Arguments:**

    - `loss`, `optimiser`, `has_aux`: as for [`eqx_ensemble.fit`][]. The optimiser is that of
        [`eqx_ensemble.train.init`][].
    - `plan`: how the members are executed, by default [`eqx_ensemble.plan.Vmap`][].
    - `mesh`: the devices that share the rows of a batch. The members run where the state's arrays are.

    **Returns:** the step, a function of a training state and a batch that returns the next state and
    [`eqx_ensemble.train.Metrics`][].

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
    if not callable(loss):
        raise TypeError("`make_step` needs `loss` to be a function, `lambda model, batch, key: ...`.")
    # As a function, a step is equal to itself alone.
    task = Task(loss, optimiser, has_aux=has_aux, rows_of_mesh=rows_of_mesh(mesh), digest=str(next(_numbers)))
    return Step(task, as_plan(plan, Vmap()))


_numbers = iter(range(2**62))


def scan_steps(
    step: Callable[[T, Any], tuple[T, Any]], state: T, batches: PyTree = None, *, length: int | None = None
) -> tuple[T, PyTree]:
    """Runs many steps in one compiled loop: `jax.lax.scan` for states that hold more than arrays.

    Equal, within float rounding, to `for batch in batches: state, metrics = step(state, batch)`. It is compiled once
    for each `step` and each shape of its arguments: define `step` once.

    **Arguments:**

    - `step`: a step of [`eqx_ensemble.train.make_step`][], or any `step(state, batch) -> (state, outputs)`.
    - `state`: the state before the first step: any PyTree that holds ensembles or training states.
    - `batches`: a PyTree of arrays `(steps, ...)`. In parts marked [`eqx_ensemble.Each`][], `steps` comes before
        `members`.
    - `length`: the number of steps, required without batches.

    **Returns:** the last state, and the outputs of all steps, each array `(steps, ...)`.

    ```python
    ensemble, optimiser = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, key=key), optax.adam(1e-2)
    step = ee.train.make_step(lambda model, x, key: jnp.mean(jax.vmap(model)(x) ** 2), optimiser)
    state = ee.train.init(ensemble, optimiser, key=key)
    state, metrics = ee.train.scan_steps(step, state, jnp.ones((100, 32, 3)))  # 100 batches of 32 rows
    metrics.loss.shape  # (100, 4)
    ```
    """
    batches = take_in(batches, "batches")
    check_integers_fit(batches, argument="batches")
    return _scan(step, state, batches, length)


@eqx.filter_jit
def _scan(step: Callable[..., Any], state: PyTree, batches: PyTree, length: int | None) -> tuple[PyTree, PyTree]:
    arrays, rest = eqx.partition(state, eqx.is_array)

    def body(arrays: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        state, outputs = step(eqx.combine(arrays, rest), batch)
        return eqx.filter(state, eqx.is_array), outputs

    arrays, outputs = jax.lax.scan(body, arrays, batches, length=length)
    return eqx.combine(arrays, rest), outputs
