from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int

from ..._pytree import PyTree
from ...train._optimiser import only_supported


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


class Copies(NamedTuple):
    """The record of `snapshots`, each array `(size, ...)`."""

    weights: PyTree


Wrapped = optax.GradientTransformationExtraArgs
Update = Callable[[PyTree, PyTree, Int[Array, ""], Bool[Array, ""]], PyTree]
"""`(record, weights, count, due) -> record`: takes the `count`-th snapshot if it is `due`."""


def _record(
    optimiser: optax.GradientTransformation,
    init: Callable[[PyTree], PyTree],
    update: Update,
    start: Any,
    every: Any,
    period: Any = None,
) -> Wrapped:
    """Wraps an optimiser to record the weights after steps `start`, `start + every`, `start + 2 * every` ...

    With a `period`, these are the steps of each period.
    """
    inner = optax.with_extra_args_support(optimiser)

    def init_all(params: PyTree) -> RecordState:
        return RecordState(inner.init(params), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), init(params))

    def update_all(updates: PyTree, state: Any, params: Any = None, **extra: Any) -> tuple[PyTree, RecordState]:
        updates, inner_state = inner.update(updates, state.inner_state, params, **only_supported(inner.update, extra))
        weights = optax.apply_updates(params, updates)
        step = jnp.asarray(optax.safe_increment(state.step))
        within = step if period is None else (step - 1) % period + 1
        due = (within >= start) & ((within - start) % every == 0)
        count = state.count + due.astype(state.count.dtype)
        return updates, RecordState(inner_state, step, count, update(state.record, weights, count, due))

    return optax.GradientTransformationExtraArgs(init_all, update_all)


def ema(optimiser: optax.GradientTransformation, decay: Any = 0.999, *, start: Any = 0, every: Any = 1) -> Wrapped:
    r"""Keeps a debiased exponential moving average of each member's weights.

    After snapshot $n$ it is $\sum_i d^{\,n-i} w_i\, (1-d) / (1-d^n)$ with decay $d$, in at least 32 bits. It is part of
    the optimiser state; updates do not change.

    **Arguments:**

    - `optimiser`: the whole optax optimiser: `ema(optax.chain(...))`, as the record needs the final updates. With
        hyperparameters: `lambda hyper: ee.methods.trajectory.ema(optax.adam(hyper["lr"]), hyper["decay"])`.
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

    def update(record: Mean, weights: PyTree, count: Int[Array, ""], due: Bool[Array, ""]) -> Mean:
        number = jnp.maximum(count, 1).astype(jnp.result_type(float))
        log = jnp.log1p(jnp.asarray(decay - 1).astype(number.dtype))  # exact for decays close to 1
        return Mean(_move_mean(record.mean, weights, jnp.expm1(log) / jnp.expm1(number * log), due))

    return _record(optimiser, lambda params: Mean(_zeros_like(params)), update, start, every)


def swa(optimiser: optax.GradientTransformation, *, start: Any = 0, every: Any = 1) -> Wrapped:
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

    def update(record: Mean, weights: PyTree, count: Int[Array, ""], due: Bool[Array, ""]) -> Mean:
        return Mean(_move_mean(record.mean, weights, _reciprocal(count), due))

    return _record(optimiser, lambda params: Mean(_zeros_like(params)), update, start, every)


def swag(optimiser: optax.GradientTransformation, *, rank: int = 20, start: Any = 0, every: Any = 1) -> Wrapped:
    """SWAG: keeps a Gaussian approximation of each member's weights along its trajectory.

    The mean and variance of all snapshots (`ddof=0`), and the deviations of the last `rank`, from the mean so far, for
    [`eqx_ensemble.methods.trajectory.sample`][] and [`eqx_ensemble.methods.trajectory.average`][]. Several members are
    MultiSWAG.

    **Arguments:**

    - `optimiser`, `start`, `every`: as for [`eqx_ensemble.methods.trajectory.ema`][], in steps; of real weights.
    - `rank`: the number of deviations, 0 (diagonal only) or at least 2, each of the memory of the weights.

    **Returns:** an optax optimiser.

    ```python
    optimiser = ee.methods.trajectory.swag(optax.sgd(0.05), rank=10, start=750, every=10)
    ```

    ??? cite
        [Maddox et al. 2019](https://arxiv.org/abs/1902.02476); MultiSWAG: [Wilson and Izmailov
        2020](https://arxiv.org/abs/2002.08791)
    """

    def init(params: PyTree) -> Moments:
        return Moments(_zeros_like(params), _zeros_like(params), _zeros_like(params, rank) if rank else None)

    def update(record: Moments, weights: PyTree, count: Int[Array, ""], due: Bool[Array, ""]) -> Moments:
        mean = _move_mean(record.mean, weights, _reciprocal(count), due)
        away = lambda w, m: w.astype(m.dtype) - m
        squares = jax.tree.map(
            lambda s, w, old, new: jnp.where(due, s + away(w, old) * away(w, new), s),
            record.squares, weights, record.mean, mean,
        )  # fmt: skip
        if not rank:
            return Moments(mean, squares, None)
        index = jnp.where(due, (count - 1) % rank, rank)  # an index beyond the end is dropped
        put = lambda columns, w, m: columns.at[index].set(away(w, m), mode="drop")
        return Moments(mean, squares, jax.tree.map(put, record.columns, weights, mean))

    return _record(optimiser, init, update, start, every)


def snapshots(
    optimiser: optax.GradientTransformation, size: int, *, every: Any, start: Any = 0, period: Any = None
) -> Wrapped:
    """Keeps the last `size` snapshots of each member's weights, in its optimiser state.

    With a cyclic learning rate and `every` equal to its period they are a snapshot ensemble, with a sampler samples
    (`start` ends the burn-in).

    **Arguments:**

    - `optimiser`, `every`, `start`: as for [`eqx_ensemble.methods.trajectory.ema`][].
    - `size`: the number of snapshots. Each takes the memory of one copy of the weights.
    - `period`: the steps per cycle, after which `start` and `every` count from zero again; by default no cycles.

    **Returns:** an optax optimiser; [`eqx_ensemble.methods.trajectory.snapshot_ensemble`][] makes an ensemble of it.

    ```python
    cycle = optax.cosine_decay_schedule(0.1, 200)
    sgd = optax.sgd(lambda step: cycle(step % 200))
    optimiser = ee.methods.trajectory.snapshots(sgd, 5, every=200)
    ```

    ??? cite
        [Huang et al. 2017](https://arxiv.org/abs/1704.00109)
    """

    def init(params: PyTree) -> Copies:
        return Copies(jax.tree.map(lambda x: jnp.zeros((size, *jnp.shape(x)), jnp.asarray(x).dtype), params))

    def update(record: Copies, weights: PyTree, count: Int[Array, ""], due: Bool[Array, ""]) -> Copies:
        index = jnp.where(due, (count - 1) % size, size)  # an index beyond the end is dropped
        put = lambda kept, w: kept.at[index].set(w, mode="drop")
        return Copies(jax.tree.map(put, record.weights, weights))

    return _record(optimiser, init, update, start, every, period)


def _zeros_like(params: PyTree, *axes: int) -> PyTree:
    """Zeros `(*axes, ...)` for sums, with at least 32 bits."""

    def zeros(x: Any) -> Array:
        x = jnp.asarray(x)
        return jnp.zeros((*axes, *x.shape), jnp.float32 if jnp.finfo(x.dtype).bits < 32 else x.dtype)

    return jax.tree.map(zeros, params)


def _move_mean(mean: PyTree, weights: PyTree, rate: Any, due: Bool[Array, ""]) -> PyTree:
    """Moves the mean towards the weights by `rate` if a snapshot is `due`."""

    def move(old: Array, new: Array) -> Array:
        return jnp.where(due, old + rate.astype(old.dtype) * (new.astype(old.dtype) - old), old)

    return jax.tree.map(move, mean, weights)


def _reciprocal(count: Int[Array, ""]) -> Array:
    """One over the number of snapshots; unlike the quotient of integers, in double precision if enabled."""
    return 1 / jnp.maximum(count, 1).astype(jnp.result_type(float))
