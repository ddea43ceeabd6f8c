"""ONE member: a step of its training, an epoch, and what is decided at the epoch's end.

The unit of all bookkeeping is the epoch. Inside it steps are bare: no check, no select. At its end a member either
keeps what the epoch gave it, if it trains and everything is finite, or it gets back what it had at the epoch's start.
So divergence, patience, targets and limits are one `jnp.where` per epoch. A check in every step costs 13 to 21 % of the
time of small members on CPUs, and buys only that a diverged member keeps the weights of its last good step.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from .._keys import tag
from .._map import is_per_member, view
from .._marks import Shared
from .._mesh import sharding
from .._pytree import PyTree
from ._convolutions import as_products
from ._meeting import MEMBERS, JointLoss, JointOptimiser, alone, mean_of_members, members_meet, of_all
from ._optimiser import update
from ._order import stream
from ._state import Status, Trained, TrainState, all_finite, trained_of, weights_of, with_trained


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """What is computed for one member, the static argument of compiled programs.

    Two tasks are equal if the programs traced from them are (`digest`): an edited function, class, global or config
    object is another task, and the same cell of a notebook, run again, the same one. Of a program that calls Python, a
    trace shows no more than that it does: then the functions must be the same, as for `jax.jit`.
    """

    loss: Callable[..., Any]
    optimiser: Any
    score: Callable[..., Any] | None = None
    has_aux: bool = False
    num_rows: int = 0  # of an epoch; 0 for batches of an iterable
    batch_size: int = 0
    epoch: int = 0  # steps of an epoch
    part: int = 0  # steps that are kept or given back at once: an epoch, or an equal part of a long one
    permutations: int = 1  # that a part may touch
    shuffle: bool = True
    patience: int | None = None
    min_delta: float = 0.0
    mode: Literal["min", "max"] = "min"
    room: int = 1  # parts of a call
    per_step: bool = True  # whether losses are recorded
    rows_of_mesh: Any = None  # where the rows of a batch lie, if devices can share them evenly
    products: bool = False  # whether convolutions become products
    calls_python: bool = False  # by `jax.pure_callback` and the like
    outputs: Any = dataclasses.field(default=None, repr=False)  # shapes of a step's auxiliary outputs
    bytes_of_step: int = 0  # that a step of one member writes
    digest: str = ""

    @property
    def joint(self) -> bool:
        """Whether the loss is that of all members."""
        return isinstance(self.loss, JointLoss)

    @property
    def meets(self) -> bool:
        """Whether a member's results depend on the others."""
        return members_meet(self.loss, self.optimiser, self.score)

    def _key(self) -> tuple:
        skipped = ("loss", "optimiser", "score", "outputs", "bytes_of_step")
        fields = [getattr(self, x.name) for x in dataclasses.fields(self) if x.name not in skipped]
        return (*fields, self.meets)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Task) or self._key() != other._key():
            return False
        return not self.calls_python or (self.loss is other.loss and self.score is other.score)

    def __hash__(self) -> int:
        return hash(self._key())


def arguments(fn: Callable[..., Any], model: Any, state: Any, batch: Any, key: Any, hyper: Any) -> tuple:
    """What a user's loss or score of one member is called with, by position and by name."""
    __tracebackhide__ = True
    named = {"hyper": hyper} if takes_hyper(fn) else {}
    # A `State` can be used once, and a line search calls the loss again: each call gets a copy.
    states = () if state is None else (jax.tree.map(lambda x: x, state),)
    check_takes(fn, "model, batch, key" if state is None else "model, state, batch, key", named)
    return (model, *states, batch, key), named


def check_takes(fn: Callable[..., Any], names: str, named: dict[str, Any]) -> None:
    """Raises unless a loss or score can be called with arguments by position and by name."""
    __tracebackhide__ = True
    try:
        inspect.signature(fn).bind(*names.split(","), **named)
    except TypeError as error:
        text = f"A loss or score is called `loss({names})`. `{getattr(fn, '__name__', fn)}` cannot be: {error}.\n"
        raise TypeError(f"{text}Give it all of these parameters, also those that it does not use.") from None
    except ValueError:
        return  # which has no signature


def call(fn: Callable[..., Any], *of: Any) -> Any:
    """A user's loss or score of one member; a loss that is trained is called without this frame."""
    args, named = arguments(fn, *of)
    return fn(*args, **named)


def takes_hyper(fn: Callable[..., Any]) -> bool:
    """Whether a function has a parameter named `hyper`."""
    try:
        return "hyper" in inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return False


def take_step(task: Task, now: Trained, state: TrainState, batch: PyTree, key: Any) -> tuple[Trained, tuple[Any, Any]]:
    """One step of one member. Returns what it changed, the loss before it and the auxiliary outputs."""
    where = task.rows_of_mesh
    if where is not None and all(x.shape[0] % where.mesh.shape["data"] == 0 for x in jax.tree.leaves(batch)):
        batch = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, where), batch)
    value, grads, model_state, aux, loss_of = gradient_of(task, now, state, batch, key)
    if where is not None:  # else XLA divides them as it likes, which JAX may not be able to tell
        aux = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, sharding(where.mesh)), aux)
    new = update_weights(task, now._replace(model_state=model_state), state, value, grads, loss_of)
    if task.joint:  # others see at once what a member that has stopped would give back at the end
        new = choose_trained(state.status == Status.OK, new, now)
    return new, (value, aux)


def gradient_of(task: Task, now: Trained, state: TrainState, batch: PyTree, key: Any) -> tuple:
    """The loss, its gradients by the member's and by the common weights, the new state of the model, the auxiliary
    outputs, and the function that was differentiated.
    """
    __tracebackhide__ = True  # IPython and pytest leave such frames out when a loss raises
    fixed = weights_of(state).fixed

    def loss_of(weights: tuple[PyTree, PyTree]) -> tuple[Any, tuple[Any, Any]]:
        __tracebackhide__ = True
        model = eqx.combine(*weights, fixed)
        args, named = arguments(task.loss, model, now.model_state, batch, key, state.hyper)
        out = task.loss(*args, **named)
        value, *more = out if task.has_aux or now.model_state is not None else (out,)
        model_state, *aux = more if now.model_state is not None else (None, *more)
        aux = jax.tree.map(lambda x: jnp.asarray(x) if eqx.is_array_like(x) else x, aux[0] if task.has_aux else None)
        return value, (model_state, aux)

    differentiated: Any = as_products(loss_of) if task.products else loss_of
    (value, (model_state, aux)), grads = eqx.filter_value_and_grad(differentiated, has_aux=True)((now.own, now.common))
    return value, grads, model_state, aux, differentiated


def update_weights(
    task: Task, now: Trained, state: TrainState, value: Any, grads: tuple[PyTree, PyTree], loss_of: Callable[..., Any]
) -> Trained:
    """The optimiser's part of a step, given the loss and its gradients by the member's and by the common weights."""
    own_grads = grads[0]
    if isinstance(task.optimiser, JointOptimiser):
        now, own_grads = task.optimiser.meet(state, now, value, grads, joint=task.joint)

    def value_of(own: PyTree) -> Any:
        if task.joint:
            raise TypeError("A line search of one member cannot evaluate a `JointLoss`: use an optimiser without one.")
        return loss_of((own, now.common))[0]

    own, opt_state = update(alone(task.optimiser), own_grads, now.opt_state, now.own, value, value_of, state.hyper)
    return now._replace(own=own, opt_state=opt_state)


def choose(chosen: Any, new: PyTree, old: PyTree) -> PyTree:
    """The arrays of `new` where `chosen`, else of `old`."""
    return jax.tree.map(lambda a, b: jnp.where(chosen, a, b) if eqx.is_array(a) else a, new, old)


def choose_trained(keep: Bool[Array, ""], new: Trained, old: Trained) -> Trained:
    """What was trained if the member keeps it; what members train together if any of them does."""
    kept = choose(keep, Trained(*new[:3]), Trained(*old[:3]))
    if new.common_state is None:
        return kept._replace(common=new.common)
    any_keeps = jax.lax.psum(keep.astype(jnp.int32), MEMBERS) > 0
    common, common_state = choose(any_keeps, new[3:], old[3:])
    return kept._replace(common=common, common_state=common_state)


class Clock(NamedTuple):
    """Where a call begins: the steps of the run that are done, those of the whole run, and the parts to train."""

    done: Any
    end: Any
    parts: Any

    def part(self, task: Task, done: Any, xp: Any = jnp) -> tuple[Any, Any]:
        """The steps of the part after `done` steps, and whether members are scored at its end."""
        left = task.epoch - done % task.epoch
        count = xp.minimum(xp.minimum(left, task.part), self.end - done)
        return count, (count == left) | (done + count == self.end)


class Curves(NamedTuple):
    """What a call records: losses `(parts, steps)`, auxiliary outputs, scores `(parts,)`, and whether the member
    trained in each part `(parts,)`.
    """

    loss: Any
    aux: Any
    score: Any
    trains: Any


def train(moving: PyTree, common: PyTree, rest: PyTree, inputs: dict, clock: Clock, task: Task) -> tuple:
    """Trains one member for some parts of epochs.

    `moving`, `common` and `rest` are parts of its `TrainState`: its own arrays, those which all members train together,
    and everything else. Returns the first two, and the curves.
    """
    inputs = jax.tree.map(view, inputs, is_leaf=is_per_member)
    state = eqx.combine(moving, common, rest)
    words = jax.random.key_data(jax.random.fold_in(state.keys, tag("rows")))
    words = of_all(words)[0] if task.joint else words  # one stream of rows for all
    key = jax.random.fold_in(state.keys, tag("loss"))
    blank = lambda shape: jnp.full(shape, jnp.nan, state.loss.dtype)
    steps = (task.part,) if task.per_step else ()
    curves = Curves(
        blank((task.room, *steps)),
        jax.tree.map(lambda x: jnp.zeros((task.room, *steps, *x.shape), x.dtype), task.outputs),
        blank((task.room,)),
        jnp.zeros(task.room, bool),
    )

    def one_part(i: Any, carry: tuple) -> tuple:
        moving, common, curves, done = carry
        before = eqx.combine(moving, common, rest)
        count, ends = clock.part(task, done)
        step = jax.lax.pmax(before.step, MEMBERS) if task.joint else before.step
        rows = rows_of_part(task, words, step, inputs["rows"])

        def one_step(j: Any, carry: tuple) -> tuple:
            now, values, auxs = carry
            batch = jax.tree.map(lambda x: x.at[rows[j]].get(mode="promise_in_bounds"), inputs["data"])
            own_key = jax.random.fold_in(key, step + j)
            now, (value, aux) = take_step(task, now, before, batch, own_key)
            values = values.at[j].set(value.astype(values.dtype))
            return now, values, jax.tree.map(lambda xs, x: xs.at[j].set(x), auxs, aux)

        auxs = jax.tree.map(lambda x: jnp.zeros((task.part, *x.shape), x.dtype), task.outputs)
        start = (trained_of(before), blank((task.part,)), auxs)
        trained, values, auxs = jax.lax.fori_loop(0, count, one_step, start)
        after = end_part(task, before, trained, values, count, ends, inputs)
        curves = record(task, curves, i, before, after, values, auxs, count, ends)
        moving, common = (eqx.filter(after, own) for own in flags)
        return moving, common, curves, done + count

    flags = flags_of(moving), flags_of(common)
    start = (moving, common, curves, clock.done)
    moving, common, curves, _ = jax.lax.fori_loop(0, clock.parts, one_part, start)
    return moving, common, curves


def flags_of(tree: PyTree) -> PyTree:
    """Where a tree holds something."""
    return jax.tree.map(lambda x: x is not None, tree, is_leaf=lambda x: x is None)


def rows_of_part(task: Task, words: Any, step: Any, own_rows: Any) -> Any:
    """The rows of all batches of a part, computed at once: inside the steps they would take a quarter of the time."""
    shape = {"length": task.num_rows, "batch_size": task.batch_size, "steps": task.part}
    if task.shuffle:
        rows = stream(words, step, permutations=task.permutations, **shape)
    else:
        first = step % task.epoch * task.batch_size
        surplus = task.epoch * task.batch_size - task.num_rows
        place = step // task.epoch * surplus + first + jnp.arange(task.part * task.batch_size, dtype=jnp.int32)
        rows = (place % task.num_rows).reshape(task.part, task.batch_size)
    return rows if own_rows is None else own_rows[rows]


def end_part(
    task: Task, before: TrainState, trained: Trained, values: Any, count: Any, ends: Any, inputs: dict
) -> TrainState:
    """The state of a member at the end of a part: what it keeps, and its status."""
    used = jnp.arange(task.part, dtype=jnp.int32) < count
    trains = before.status == Status.OK
    finite = all_finite((trained.own, trained.common)) & jnp.all(jnp.isfinite(values) | ~used)
    state = with_trained(before, choose_trained(trains & finite, trained, trained_of(before)))
    mean = jnp.sum(jnp.where(used, values, 0)) / jnp.maximum(count, 1).astype(values.dtype)
    state = dataclasses.replace(
        state,
        step=jnp.where(trains & finite, before.step + count, before.step),
        status=jnp.where(trains & ~finite, jnp.int8(Status.DIVERGED), before.status),
        loss=jnp.where(trains, mean, before.loss),
    )
    if task.score is not None:
        dynamic, static = eqx.partition(state, eqx.is_array)
        judged = lambda x: eqx.filter(judge(task, eqx.combine(x, static), inputs), eqx.is_array)
        state = eqx.combine(jax.lax.cond(ends, judged, lambda x: x, dynamic), static)
    if (limit := inputs["limits"].get("steps")) is None:
        return state
    over = (state.step >= limit) & (state.status == Status.OK)
    return dataclasses.replace(state, status=jnp.where(over, jnp.int8(Status.STOPPED), state.status))


def judge(task: Task, state: TrainState, inputs: dict) -> TrainState:
    """Scores a member, keeps its best weights, and stops it by patience or at its target."""
    model = eqx.nn.inference_mode(state.ensemble.stacked)
    score_of: Any = task.score
    out = call(score_of, model, state.model_state, inputs["validation"], state.keys, state.hyper)
    score = jnp.asarray(out[0] if isinstance(out, tuple) else out, state.score.dtype).reshape(())
    trains = state.status == Status.OK
    state = dataclasses.replace(state, score=jnp.where(trains, score, state.score))
    if state.together is not None:
        score = mean_of_members(score, trains & jnp.isfinite(score))
    sign = 1 if task.mode == "min" else -1
    # An undefined score is no improvement, and the first defined one is.
    better = trains & (sign * score < sign * state.best_score - task.min_delta)
    waited = jnp.where(better, 0, state.waited + trains.astype(jnp.int32))
    weights = weights_of(state)
    stops = trains & (waited >= (jnp.iinfo(waited.dtype).max if task.patience is None else task.patience))
    if (target := inputs["limits"].get("target")) is not None:
        stops = stops | (trains & (sign * score <= sign * target.astype(score.dtype)))
    together = state.together
    if together is not None:
        any_better = jax.lax.psum(better.astype(jnp.int32), MEMBERS) > 0
        together = Shared((together.value[0], choose(any_better, weights.common, together.value[1])))
    return dataclasses.replace(
        state,
        best=choose(better, (weights.own, state.model_state), state.best),
        best_score=jnp.where(better, score, state.best_score),
        best_step=jnp.where(better, state.step, state.best_step),
        waited=waited,
        status=jnp.where(stops, jnp.int8(Status.STOPPED), state.status),
        together=together,
    )


def record(
    task: Task,
    curves: Curves,
    i: Any,
    before: TrainState,
    after: TrainState,
    values: Any,
    auxs: Any,
    count: Any,
    ends: Any,
) -> Curves:
    """The curves with those of a part: NaN, or zero for integers, for a member that does not train."""
    trains = before.status == Status.OK
    if not task.per_step:
        values, auxs = after.loss, jax.tree.map(lambda x: x[jnp.maximum(count - 1, 0)], auxs)
    put = lambda all, x: all.at[i].set(jnp.where(trains, x, jnp.nan if eqx.is_inexact_array(x) else jnp.zeros_like(x)))
    is_scored = trains & (after.status != Status.DIVERGED) & ends & (task.score is not None)
    score = jnp.where(is_scored, after.score, jnp.nan)
    aux = jax.tree.map(put, curves.aux, auxs)
    return Curves(put(curves.loss, values), aux, curves.score.at[i].set(score), curves.trains.at[i].set(trains))
