import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int

from ..._ensemble import Ensemble
from ..._pytree import PyTree
from ._check import check_decay, check_inner_optimiser, check_steps, warn_of_few
from ._record import (
    Mean,
    Moments,
    as_ensemble,
    find_record,
    move_mean,
    reciprocal,
    record_path,
    weights_or_current,
    zeros_like,
)


def ema(
    optimiser: optax.GradientTransformation, decay: Any = 0.999, *, start: Any = 0, every: Any = 1
) -> optax.GradientTransformationExtraArgs:
    r"""Keeps an exponential moving average of each member's weights.

    After snapshot $n$ the average is $\sum_i d^{\,n-i} w_i\, (1-d) / (1-d^n)$ with decay $d$; the debiased average
    after the first snapshot is that snapshot. The updates of the optimiser do not change. The average is part of each
    member's optimiser state, with which it is saved and resumed, and stays valid if the member stops or diverges. It is
    stored in at least 32 bits.

    Wrap the whole optimiser, `ema(optax.chain(...))`: only its final updates determine the weights.

    **Arguments:**

    - `optimiser`: an optax optimiser. With hyper-parameters:
        `lambda hyper: ee.methods.path.ema(optax.adam(hyper["lr"]), hyper["decay"])`.
    - `decay`: $d$, from 0 to below 1. The average spans about `1 / (1 - decay)` snapshots.
    - `start`: the step of the first snapshot; by default `every`.
    - `every`: the number of steps between snapshots.

    **Returns:** an optax optimiser; [`eqx_ensemble.methods.path.average`][] makes an ensemble of its state.

    **Raises:** `TypeError` or `ValueError` for invalid arguments.

    ```python
    optimiser = ee.methods.path.ema(optax.adam(1e-3), 0.99)
    ```

    ??? cite

        Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging" (SIAM Journal on Control and
        Optimization, 1992); the debiasing: Kingma and Ba, "Adam" (ICLR 2015).
    """
    name = "methods.path.ema"
    check_inner_optimiser(optimiser, name=name)
    check_decay(decay, name=name)
    check_steps(start, every, name=name)

    def update(record: Mean, weights: PyTree, count: Int[Array, ""], due: Bool[Array, ""]) -> Mean:
        log = _log(decay)
        number = jnp.maximum(count, 1).astype(jnp.result_type(float))
        return Mean(move_mean(record.mean, weights, jnp.expm1(log) / jnp.expm1(number * log), due))

    init = lambda params: Mean(zeros_like(params))
    return record_path(optimiser, start=start, every=every, init=init, update=update, name=name)


def swa(
    optimiser: optax.GradientTransformation, *, start: Any = 0, every: Any = 1
) -> optax.GradientTransformationExtraArgs:
    """Keeps the mean of snapshots of each member's weights: stochastic weight averaging.

    All snapshots have equal weight. It helps if the learning rate stays large enough for the weights to explore around
    an optimum, for example with `optax.join_schedules` to a constant rate at `start`; the authors start after three
    quarters of the run and take one snapshot per epoch. The updates of the optimiser do not change.

    **Arguments:**

    - `optimiser`, `start`, `every`: as for [`eqx_ensemble.methods.path.ema`][], in steps.

    **Returns:** an optax optimiser; [`eqx_ensemble.methods.path.average`][] makes an ensemble of its state.

    **Raises:** `TypeError` or `ValueError` for invalid arguments.

    ```python
    optimiser = ee.methods.path.swa(optax.sgd(0.05), start=750, every=10)
    ```

    ??? cite

        Izmailov, Podoprikhin, Garipov, Vetrov and Wilson, "Averaging Weights Leads to Wider Optima and Better
        Generalization" (UAI 2018).
    """
    name = "methods.path.swa"
    check_inner_optimiser(optimiser, name=name)
    check_steps(start, every, name=name)

    def update(record: Mean, weights: PyTree, count: Int[Array, ""], due: Bool[Array, ""]) -> Mean:
        return Mean(move_mean(record.mean, weights, reciprocal(count), due))

    init = lambda params: Mean(zeros_like(params))
    return record_path(optimiser, start=start, every=every, init=init, update=update, name=name)


def average(run: Any) -> Ensemble[Any]:
    """Returns the ensemble of the members' averaged weights.

    Members keep their ids and untrained leaves. A member that stopped or diverged has its average up to that step; one
    without a snapshot keeps its current weights, with a warning. BatchNorm statistics are not valid for averaged
    weights: use [`eqx_ensemble.methods.path.update_batch_norm`][].

    **Arguments:**

    - `run`: the run, the training state or the [`eqx_ensemble.train.Progress`][] of training with
        [`eqx_ensemble.methods.path.ema`][], [`eqx_ensemble.methods.path.swa`][] or
        [`eqx_ensemble.methods.path.swag`][]. The best weights of a run are not used.

    **Returns:** the ensemble.

    **Raises:** `TypeError` for anything else; `ValueError` unless the optimiser state has exactly one average of all
    weights.

    ```python
    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 4, key=key)
    data = jnp.ones((100, 3)), jnp.zeros((100, 1))
    optimiser = ee.methods.path.swa(optax.sgd(0.05), start=10, every=5)
    run = ee.fit(ensemble, loss, optimiser, data, steps=40, key=key)
    ee.methods.path.average(run).ids  # [0, 1, 2, 3]
    ```
    """
    name = "methods.path.average"
    state, found = find_record(run, (Mean, Moments), name=name)
    warn_of_few(found.count, state.ids, least=1, effect="Their current weights are returned.", name=name)
    params = weights_or_current(found.record.mean, state.params, found.count)
    return as_ensemble(state, params, state.fixed.frozen, state.ids)


def _log(decay: Any) -> Any:
    """The logarithm of a decay, in double precision for Python numbers."""
    if isinstance(decay, jax.Array):
        return jnp.log(decay)
    return math.log(decay) if decay > 0 else -math.inf
