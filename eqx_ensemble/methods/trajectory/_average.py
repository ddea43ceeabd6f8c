import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int

from ..._caller import caller
from ..._check import kind_text
from ..._ensemble import Ensemble
from ..._pytree import PyTree
from ...train import TrainState
from ...train._optimiser import only_supported
from ...train._run import Run
from ...train._state import with_weights
from ._check import check_decay, check_inner_optimiser, check_record, check_same_leaves, check_steps, warn_of_few


class RecordState(NamedTuple):
    """The state of an optimiser that records weights: the numbers of steps and snapshots, and the record."""

    inner_state: PyTree
    step: Int[Array, "*members"]
    count: Int[Array, "*members"]
    record: PyTree


class Mean(NamedTuple):
    """The record of `ema` and `swa`."""

    mean: PyTree


class Moments(NamedTuple):
    """The record of `swag`: `squares` are sums of squared deviations, `columns` the last deviations `(rank, ...)`."""

    mean: PyTree
    squares: PyTree
    columns: PyTree


class Weights(NamedTuple):
    """The record of `snapshots`, each array `(size, ...)`."""

    weights: PyTree


Update = Callable[[PyTree, PyTree, Int[Array, ""], Bool[Array, ""]], PyTree]
"""`(record, weights, count, due) -> record`: takes the `count`-th snapshot if it is `due`."""


def record_path(
    optimiser: optax.GradientTransformation,
    *,
    start: Any,
    every: Any,
    name: str,
    period: Any = None,
    init: Callable[[PyTree], PyTree],
    update: Update,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimiser to record the weights after steps `start`, `start + every`, `start + 2 * every` ...

    With a `period`, these are the steps of each period.
    """
    inner = optax.with_extra_args_support(optimiser)

    def init_all(params: PyTree) -> RecordState:
        return RecordState(inner.init(params), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), init(params))

    def update_all(updates: PyTree, state: Any, params: Any = None, **extra: Any) -> tuple[PyTree, RecordState]:
        if params is None:
            raise ValueError(f"`{name}` records weights: call `update(grads, state, params)` with the weights.")
        updates, inner_state = inner.update(updates, state.inner_state, params, **only_supported(inner.update, extra))
        weights = optax.apply_updates(params, updates)
        step = jnp.asarray(optax.safe_increment(state.step))
        within = step if period is None else (step - 1) % period + 1
        due = (within >= start) & ((within - start) % every == 0)
        count = state.count + due.astype(state.count.dtype)
        return updates, RecordState(inner_state, step, count, update(state.record, weights, count, due))

    return optax.GradientTransformationExtraArgs(init_all, update_all)


def zeros_like(params: PyTree, *axes: int) -> PyTree:
    """Zeros `(*axes, ...)` for sums, with at least 32 bits."""

    def zeros(x: Any) -> Array:
        x = jnp.asarray(x)
        return jnp.zeros((*axes, *x.shape), jnp.float32 if jnp.finfo(x.dtype).bits < 32 else x.dtype)

    return jax.tree.map(zeros, params)


def move_mean(mean: PyTree, weights: PyTree, rate: Any, due: Bool[Array, ""]) -> PyTree:
    """Moves the mean towards the weights by `rate` if a snapshot is `due`."""

    def move(old: Array, new: Array) -> Array:
        return jnp.where(due, old + jnp.asarray(rate).astype(old.dtype) * (new.astype(old.dtype) - old), old)

    return jax.tree.map(move, mean, weights)


def reciprocal(count: Int[Array, ""]) -> Array:
    """One over the number of snapshots; unlike the quotient of integers, in double precision if enabled."""
    return 1 / jnp.maximum(count, 1).astype(jnp.result_type(float))


def find_record(source: Any, kinds: tuple[type, ...], wrappers: str, example: str) -> tuple[TrainState, RecordState]:
    """The training state of a run, and the record of its optimiser by one of these wrappers."""
    if not isinstance(source, Run | TrainState):
        raise TypeError(
            f"`{caller()}` needs the run that `fit` returned, or a training state; got {kind_text(source)}.\n"
            "An ensemble does not hold what the optimiser recorded."
        )
    state = source if isinstance(source, TrainState) else source.train_state
    if state.together is not None:
        raise TypeError(
            f"`{caller()}` needs members that are trained independently of each other; those of `train.Together` are "
            "not, and its two optimisers record each only a part of the weights."
        )
    found = [(x, is_last) for x, is_last in _records(state.opt_state) if isinstance(x.record, kinds)]
    check_record([is_last for _, is_last in found], wrappers, example)
    ((record, _),) = found
    check_same_leaves(state.params, record.record[0])
    return state, record


def _records(node: PyTree, *, is_last: bool = True) -> Iterator[tuple[RecordState, bool]]:
    """Yields all records of an optimiser state, and whether each wrapper is the last transformation."""
    if isinstance(node, RecordState):
        yield node, is_last
        yield from _records(node.inner_state, is_last=is_last)
        return
    children, treedef = jax.tree.flatten(node, is_leaf=lambda x: x is not node)
    if treedef == jax.tree.structure(0):
        return
    for i, child in enumerate(children):
        ends = type(node) is not tuple or i == len(children) - 1  # a tuple is a chain, whose last part is applied last
        yield from _records(child, is_last=is_last and ends)


@eqx.filter_jit
def weights_or_current(found: PyTree, params: PyTree, count: Int[Array, " members"], repeats: int = 1) -> PyTree:
    """The recorded weights in the dtypes of the current ones, which replace them for members without a snapshot."""

    def choose(x: Array, current: Array) -> Array:
        current = jnp.repeat(current, repeats, axis=0)
        has_any = jnp.repeat(count > 0, repeats).reshape(-1, *[1] * (current.ndim - 1))
        return jnp.where(has_any, x.astype(current.dtype), current)

    return jax.tree.map(choose, found, params)


def as_ensemble(state: TrainState, params: PyTree) -> Ensemble[Any]:
    """The ensemble of `state`, with other trained arrays."""
    return with_weights(state, params, jax.tree.map(lambda _: None, params)).ensemble


def ema(
    optimiser: optax.GradientTransformation, decay: Any = 0.999, *, start: Any = 0, every: Any = 1
) -> optax.GradientTransformationExtraArgs:
    r"""Keeps a debiased exponential moving average of each member's weights.

    After snapshot $n$ it is $\sum_i d^{\,n-i} w_i\, (1-d) / (1-d^n)$ with decay $d$, in at least 32 bits. It is part of
    the optimiser state; updates do not change.

    **Arguments:**

    - `optimiser`: the whole optax optimiser: `ema(optax.chain(...))`. With hyper-parameters: `lambda hyper:
        ee.methods.trajectory.ema(optax.adam(hyper["lr"]), hyper["decay"])`.
    - `decay`: $d$, from 0 to below 1. The average spans about `1 / (1 - decay)` snapshots.
    - `start`: the step of the first snapshot; by default `every`.
    - `every`: the number of steps between snapshots.

    **Returns:** an optax optimiser; [`eqx_ensemble.methods.trajectory.average`][] makes an ensemble of its state.

    ```python
    optimiser = ee.methods.trajectory.ema(optax.adam(1e-3), 0.99)
    ```

    ??? cite
        [Polyak and Juditsky 1992](https://doi.org/10.1137/0330046); the debiasing: [Kingma and Ba
        2015](https://arxiv.org/abs/1412.6980)
    """
    check_inner_optimiser(optimiser)
    check_decay(decay)
    check_steps(start, every)

    def update(record: Mean, weights: PyTree, count: Int[Array, ""], due: Bool[Array, ""]) -> Mean:
        log = _log(decay)
        number = jnp.maximum(count, 1).astype(jnp.result_type(float))
        return Mean(move_mean(record.mean, weights, jnp.expm1(log) / jnp.expm1(number * log), due))

    init = lambda params: Mean(zeros_like(params))
    return record_path(optimiser, start=start, every=every, name="methods.trajectory.ema", init=init, update=update)


def swa(
    optimiser: optax.GradientTransformation, *, start: Any = 0, every: Any = 1
) -> optax.GradientTransformationExtraArgs:
    """Keeps the mean of snapshots of each member's weights: stochastic weight averaging.

    Keep the learning rate large enough to explore around an optimum. The authors start after three quarters of the run
    and take one snapshot per epoch.

    **Arguments:**

    - `optimiser`, `start`, `every`: as for [`eqx_ensemble.methods.trajectory.ema`][], in steps.

    **Returns:** an optax optimiser; [`eqx_ensemble.methods.trajectory.average`][] makes an ensemble of its state.

    ```python
    optimiser = ee.methods.trajectory.swa(optax.sgd(0.05), start=750, every=10)
    ```

    ??? cite
        [Izmailov et al. 2018](https://arxiv.org/abs/1803.05407)
    """
    check_inner_optimiser(optimiser)
    check_steps(start, every)

    def update(record: Mean, weights: PyTree, count: Int[Array, ""], due: Bool[Array, ""]) -> Mean:
        return Mean(move_mean(record.mean, weights, reciprocal(count), due))

    init = lambda params: Mean(zeros_like(params))
    return record_path(optimiser, start=start, every=every, name="methods.trajectory.swa", init=init, update=update)


def average(run: Any) -> Ensemble[Any]:
    """Returns the ensemble of the members' averaged weights.

    A member without a snapshot keeps its weights, with a warning. BatchNorm needs
    [`eqx_ensemble.methods.trajectory.update_batch_norm`][] afterwards.

    **Arguments:**

    - `run`: the run or training state of training with `ema`, `swa` or `swag`. The
        best weights of a run are not used.

    **Returns:** the ensemble.

    **Raises:** `ValueError` unless the optimiser state has exactly one average of all weights.

    ```python
    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 4, key=key)
    data = jnp.ones((100, 3)), jnp.zeros((100, 1))
    optimiser = ee.methods.trajectory.swa(optax.sgd(0.05), start=10, every=5)
    run = ee.fit(ensemble, loss, optimiser, data, steps=40, key=key)
    ee.methods.trajectory.average(run)  # four members
    ```
    """
    state, found = find_record(run, (Mean, Moments), "`ema`, `swa` or `swag`", "swa(optax.adam(1e-3))")
    warn_of_few(found.count, least=1, effect="Their current weights are returned.")
    params = weights_or_current(found.record.mean, state.params, found.count)
    return as_ensemble(state, params)


def _log(decay: Any) -> Any:
    """The logarithm of a decay, in double precision for Python numbers."""
    if isinstance(decay, jax.Array):
        return jnp.log(decay)
    return math.log(decay) if decay > 0 else -math.inf
