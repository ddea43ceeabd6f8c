from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from ..._caller import caller
from ..._check import check_counter, check_positive_int, is_traced
from ..._ensemble import Ensemble
from ..._pytree import PyTree
from ...distributed import to_host
from ._average import Weights, as_ensemble, find_record, record_path
from ._check import check_inner_optimiser, check_learning_rate, check_period, check_steps, warn_of_few

Schedule = Callable[[Any], Float[Array, ""]]
"""An optax schedule of learning rates."""


def snapshot_schedule(init_value: Any, period: int) -> Schedule:
    r"""The cyclic cosine learning rate of snapshot ensembles: $\frac{a_0}{2}\big(\cos(\pi\, (t \bmod P) / P) + 1\big)$.

    **Arguments:**

    - `init_value`: $a_0$, the rate at the start of each cycle; the authors use 0.1 to 0.2 with SGD.
    - `period`: $P$, the steps per cycle; the authors use 40 epochs. Take snapshots `every=period`.

    **Returns:** a schedule for optax.

    ```python
    schedule = ee.methods.trajectory.snapshot_schedule(0.1, period=20)
    schedule(0), schedule(19), schedule(20)  # 0.1, 6.2e-4, 0.1
    ```

    ??? cite
        [Huang et al. 2017](https://arxiv.org/abs/1704.00109)
    """
    init_value = check_learning_rate(init_value, "init_value")
    period = check_counter(period, "period")

    def schedule(count: Any) -> Float[Array, ""]:
        part = jnp.asarray(count % period, jnp.result_type(float)) / period
        return init_value / 2 * (jnp.cos(jnp.pi * part) + 1)

    return schedule


def fast_geometric_schedule(init_value: Any, end_value: Any, period: int) -> Schedule:
    """The cyclic triangular learning rate of fast geometric ensembles.

    It falls from `init_value` to `end_value` in the first half of a cycle and rises back in the second. Take snapshots
    at the minima: `snapshots(optax.sgd(schedule), size, every=period, start=period // 2)`.

    **Arguments:**

    - `init_value`, `end_value`: the largest and the smallest rate; the authors use 0.05 and 0.0005 with SGD.
    - `period`: the steps per cycle, an even number; the authors use 2 to 4 epochs.

    **Returns:** a schedule for optax.

    ```python
    schedule = ee.methods.trajectory.fast_geometric_schedule(0.05, 0.0005, period=40)
    schedule(19), schedule(39)  # 0.0005, 0.05
    ```

    ??? cite
        [Garipov et al. 2018](https://arxiv.org/abs/1802.10026)
    """
    init_value = check_learning_rate(init_value, "init_value")
    end_value = check_learning_rate(end_value, "end_value")
    period = check_counter(period, "period")
    if period % 2:
        raise ValueError(f"`{caller()}` needs an even `period`, got {period}: the rate is smallest after half of it.")

    def schedule(count: Any) -> Float[Array, ""]:
        part = jnp.asarray(count % period + 1, jnp.result_type(float)) / period
        fraction = jnp.abs(2 * part - 1)  # 1 at the ends of a cycle, 0 in the middle
        return fraction * init_value + (1 - fraction) * end_value

    return schedule


def snapshots(
    optimiser: optax.GradientTransformation, size: int, *, every: Any, start: Any = 0, period: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Keeps the last `size` snapshots of each member's weights, in its optimiser state.

    With [`eqx_ensemble.methods.trajectory.snapshot_schedule`][] and `every` equal to its period they are a snapshot
    ensemble, with [`eqx_ensemble.methods.trajectory.fast_geometric_schedule`][] a fast geometric ensemble,
    with a sampler samples (`start` ends the burn-in).

    **Arguments:**

    - `optimiser`, `every`, `start`: as for [`eqx_ensemble.methods.trajectory.ema`][].
    - `size`: the number of snapshots. Each takes the memory of one copy of the weights.
    - `period`: the steps per cycle, after which `start` and `every` count from zero again; by default no cycles.

    **Returns:** an optax optimiser; [`eqx_ensemble.methods.trajectory.snapshot_ensemble`][] makes an ensemble of it.

    ```python
    schedule = ee.methods.trajectory.snapshot_schedule(0.1, period=200)
    optimiser = ee.methods.trajectory.snapshots(optax.sgd(schedule), 5, every=200)
    ```

    ??? cite
        [Huang et al. 2017](https://arxiv.org/abs/1704.00109)
    """
    check_inner_optimiser(optimiser)
    size = check_positive_int(size, "size")
    check_steps(start, every)
    check_period(period, start, every)

    def init(params: PyTree) -> Weights:
        return Weights(jax.tree.map(lambda x: jnp.zeros((size, *jnp.shape(x)), jnp.asarray(x).dtype), params))

    def update(record: Weights, weights: PyTree, count: Int[Array, ""], due: Bool[Array, ""]) -> Weights:
        index = jnp.where(due, (count - 1) % size, size)  # an index beyond the end is dropped
        put = lambda kept, w: kept.at[index].set(w, mode="drop")
        return Weights(jax.tree.map(put, record.weights, weights))

    return record_path(
        optimiser,
        start=start,
        every=every,
        name="methods.trajectory.snapshots",
        period=period,
        init=init,
        update=update,
    )


def snapshot_ensemble(run: Any) -> Ensemble[Any]:
    """Returns an ensemble of the snapshots recorded by [`eqx_ensemble.methods.trajectory.snapshots`][].

    Snapshots of one member are adjacent, the oldest first. Members without any are left out, with a warning. BatchNorm
    needs [`eqx_ensemble.methods.trajectory.update_batch_norm`][] afterwards.

    **Arguments:**

    - `run`: the run or training state.

    **Returns:** the ensemble; [`eqx_ensemble.methods.trajectory.snapshot_owners`][] tells whose snapshots they are.

    **Raises:** `TypeError` inside `jax.jit`; `ValueError` if no member has a snapshot.

    ```python
    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 2, key=key)
    data = jnp.ones((100, 3)), jnp.zeros((100, 1))
    schedule = ee.methods.trajectory.snapshot_schedule(0.1, period=20)
    optimiser = ee.methods.trajectory.snapshots(optax.sgd(schedule), 5, every=20)
    run = ee.fit(ensemble, loss, optimiser, data, steps=100, key=key)
    members = ee.methods.trajectory.snapshot_ensemble(run)  # 10 members
    ee.methods.trajectory.snapshot_owners(run)  # [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]
    ```
    """
    state, found, pairs = _kept_weights(run)
    warn_of_few(found.count, least=1, effect="They are left out.")
    members, slots = pairs.T
    params = jax.tree.map(lambda x: x[members, slots], found.record.weights)
    return as_ensemble(state[members], params)


def snapshot_owners(run: Any) -> Int[np.ndarray, " snapshots"]:
    """The positions of the members whose snapshots [`eqx_ensemble.methods.trajectory.snapshot_ensemble`][] returns.

    **Arguments:**

    - `run`: the run or training state.

    **Returns:** one position for each snapshot.

    ```python
    def loss(model, x, key):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 2, key=key)
    optimiser = ee.methods.trajectory.snapshots(optax.sgd(0.1), 2, every=4)
    run = ee.fit(ensemble, loss, optimiser, jnp.ones((32, 3)), steps=8, key=key)
    ee.methods.trajectory.snapshot_owners(run)  # [0, 0, 1, 1]
    ```
    """
    return _kept_weights(run)[2][:, 0]


def _kept_weights(run: Any) -> tuple[Any, Any, np.ndarray]:
    """The state, the record, and the member and the slot of each snapshot, the oldest first."""
    state, found = find_record(run, (Weights,), "`snapshots`", "snapshots(optax.sgd(0.05), 5, every=200)")
    if is_traced(found.count):
        raise TypeError(f"`{caller()}` cannot be called inside `jax.jit`: the number of members depends on values.")
    size, count = jax.tree.leaves(found.record.weights)[0].shape[1], to_host(found.count)
    if not count.any():
        raise ValueError(f"`{caller()}`: no member has reached its first snapshot, after step `start` (or `every`).")
    pairs = [(i, n % size) for i, most in enumerate(count.tolist()) for n in range(max(0, most - size), most)]
    return state, found, np.array(pairs, np.int32)
