from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Int

from ..._check import check_positive_int
from ..._ensemble import Ensemble
from ..._pytree import PyTree
from ...distributed import to_host
from ._check import (
    check_concrete,
    check_factor_ids,
    check_inner_optimiser,
    check_period,
    check_some_snapshots,
    check_steps,
    warn_of_few,
)
from ._record import Weights, as_ensemble, find_record, record_path


def snapshots(
    optimiser: optax.GradientTransformation, size: int, *, every: Any, start: Any = 0, period: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Keeps the last `size` snapshots of each member's weights.

    With [`eqx_ensemble.methods.path.snapshot_schedule`][] and `every` equal to its period, it records a snapshot
    ensemble; with [`eqx_ensemble.methods.path.fast_geometric_schedule`][], a fast geometric ensemble; with a constant
    learning rate, the trajectory of the run. With the samplers of `methods.sampling`, snapshots are samples: `start` is
    the end of the burn-in, and `every` thins the chain. Snapshots are part of each member's optimiser state, with which
    they are saved and resumed. The updates of the optimiser do not change.

    **Arguments:**

    - `optimiser`: as for [`eqx_ensemble.methods.path.ema`][].
    - `size`: the number of snapshots to keep. Each takes the memory of one copy of the weights.
    - `every`: the number of steps between snapshots.
    - `start`: the step of the first snapshot; by default `every`.
    - `period`: the number of steps per cycle, after which `start` and `every` count from zero again; by default no
        cycles.

    **Returns:** an optax optimiser; [`eqx_ensemble.methods.path.snapshot_ensemble`][] makes an ensemble of its state.

    **Raises:** `TypeError` or `ValueError` for invalid arguments.

    ```python
    schedule = ee.methods.path.snapshot_schedule(0.1, period=200)
    optimiser = ee.methods.path.snapshots(optax.sgd(schedule), 5, every=200)
    ```

    ??? cite

        Huang, Li, Pleiss, Liu, Hopcroft and Weinberger, "Snapshot Ensembles: Train 1, Get M for Free" (ICLR 2017).
    """
    name = "methods.path.snapshots"
    check_inner_optimiser(optimiser, name=name)
    size = check_positive_int(size, "size", name=name)
    check_steps(start, every, name=name)
    check_period(period, start, every, name=name)

    def init(params: PyTree) -> Weights:
        return Weights(jax.tree.map(lambda x: jnp.zeros((size, *jnp.shape(x)), jnp.asarray(x).dtype), params))

    def update(record: Weights, weights: PyTree, count: Int[Array, ""], due: Bool[Array, ""]) -> Weights:
        index = jnp.where(due, (count - 1) % size, size)  # an index beyond the end is dropped
        put = lambda kept, w: kept.at[index].set(w, mode="drop")
        return Weights(jax.tree.map(put, record.weights, weights))

    return record_path(optimiser, start=start, every=every, period=period, init=init, update=update, name=name)


def snapshot_ensemble(run: Any) -> Ensemble[Any]:
    """Returns an ensemble of the snapshots recorded by [`eqx_ensemble.methods.path.snapshots`][].

    Each snapshot becomes a member; those of one member are adjacent, the oldest first. A member that stopped or
    diverged may have fewer. Snapshots do not include BatchNorm statistics: use
    [`eqx_ensemble.methods.path.update_batch_norm`][].

    **Arguments:**

    - `run`: the run, the training state or the [`eqx_ensemble.train.Progress`][] of training with
        [`eqx_ensemble.methods.path.snapshots`][].

    **Returns:** the ensemble. Snapshot `n` (from 0) of a member has the id `id * size + n % size`. Members without a
    snapshot are excluded, with a warning.

    **Raises:** `TypeError` inside `jax.jit`, because members may have different numbers of snapshots; `ValueError` if
    no member has a snapshot, or the optimiser state holds no record of `snapshots`.

    ```python
    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 2, key=key)
    data = jnp.ones((100, 3)), jnp.zeros((100, 1))
    schedule = ee.methods.path.snapshot_schedule(0.1, period=20)
    optimiser = ee.methods.path.snapshots(optax.sgd(schedule), 5, every=20)
    run = ee.fit(ensemble, loss, optimiser, data, steps=100, key=key)
    members = ee.methods.path.snapshot_ensemble(run)  # 10 members
    members.ids // 5  # whose snapshot each is
    ```
    """
    name = "methods.path.snapshot_ensemble"
    state, found = find_record(run, (Weights,), name=name)
    check_concrete(found.count, name=name)
    weights = found.record.weights
    size = jax.tree.leaves(weights)[0].shape[1]
    check_factor_ids(state.ids, size, name=name)
    count, ids = to_host(found.count), to_host(state.ids)
    check_some_snapshots(count, name=name)
    warn_of_few(count, ids, least=1, effect="They are left out.", name=name)
    pairs = [(i, n % size) for i, most in enumerate(count.tolist()) for n in range(max(0, most - size), most)]
    members, slots = np.array(pairs, np.int32).T
    params = jax.tree.map(lambda x: x[members, slots], weights)
    frozen = jax.tree.map(lambda x: x[members] if eqx.is_array(x) else x, state.fixed.frozen)
    return as_ensemble(state, params, frozen, jnp.asarray(ids[members] * size + slots, jnp.int32))
