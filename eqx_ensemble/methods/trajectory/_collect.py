from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from ... import _keys
from ..._caller import caller
from ..._check import check_positive_int
from ..._ensemble import Ensemble
from ..._leaves import is_traced
from ..._pytree import PyTree
from ..._warnings import warn
from ...distributed import to_host
from ...train import TrainState
from ...train._run import Run
from ...train._state import with_weights
from ._record import Copies, Mean, Moments, RecordState


def average(run: Any) -> Ensemble[Any]:
    """Returns the ensemble of the members' averaged weights.

    A member without a snapshot keeps its weights, with a warning. BatchNorm needs
    [`eqx_ensemble.methods.trajectory.update_batch_norm`][] afterwards.

    **Arguments:**

    - `run`: the run or training state of training with `ema`, `swa` or `swag`. The
        best weights of a run are not used.

    **Returns:** the ensemble.

    **Raises:** `ValueError` unless the optimiser state has exactly one average.

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
    state, found = _find_record(run, (Mean, Moments), "`ema`, `swa` or `swag`")
    _warn_of_few(found.count, 1, "no snapshot", "Their current weights are returned.")
    return _as_ensemble(state, _or_current(found.record.mean, state.params, found.count))


def sample(run: Any, num_samples: int, *, scale: float | None = None, key: Any) -> Ensemble[Any]:
    r"""Draws an ensemble from the Gaussians recorded by [`eqx_ensemble.methods.trajectory.swag`][].

    A draw of a member with $K$ deviations is, with standard normal $z_1$ and $z_2$,

    $$w = \bar w + \sqrt{s}\,\Big(\sigma \odot z_1 + \frac{1}{\sqrt{K-1}} \sum_{i=1}^K d_i z_{2,i}\Big)$$

    BatchNorm needs [`eqx_ensemble.methods.trajectory.update_batch_norm`][] afterwards.

    **Arguments:**

    - `run`: the run or training state.
    - `num_samples`: the number of draws from each member; the authors use 30.
    - `scale`: $s$; by default the authors' 1/2, or 1 for the diagonal only (`rank=0`).
    - `key`: one key, or one per member: [`eqx_ensemble.member_keys`][]`(key, members, purpose="swag")`.

    **Returns:** the ensemble of all draws, those of one member adjacent.

    **Raises:** `ValueError` if the optimiser state holds no record of `swag`.

    ```python
    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 4, key=key)
    data = jax.random.normal(key, (100, 3)), jnp.zeros((100, 1))
    optimiser = ee.methods.trajectory.swag(optax.sgd(0.05), rank=5, start=10, every=5)
    run = ee.fit(ensemble, loss, optimiser, data, steps=40, key=key)
    draws = ee.methods.trajectory.sample(run, 8, key=key)  # 32 members
    ```

    ??? cite
        [Maddox et al. 2019](https://arxiv.org/abs/1902.02476)
    """
    num_samples = check_positive_int(num_samples, "num_samples")
    state, found = _find_record(run, (Moments,), "`swag`")
    keys = _keys.member_keys(key, state.num_members, purpose="swag")
    _warn_of_few(found.count, 2, "fewer than 2 snapshots", "Their draws are all equal.")
    if scale is None:
        scale = 1.0 if found.record.columns is None else 0.5
    drawn = _draw(found.record, found.count, keys, num_samples, jnp.sqrt(jnp.asarray(scale, jnp.result_type(float))))
    params = _or_current(drawn, state.params, found.count, num_samples)
    return _as_ensemble(state[np.repeat(np.arange(state.num_members), num_samples)], params)


@eqx.filter_jit
def _draw(
    record: Moments, count: Int[Array, " members"], keys: Key[Array, " members"], num_samples: int, root: Array
) -> PyTree:
    """Draws of all members, each array `(members * num_samples, ...)`."""
    numbers = jnp.arange(num_samples)
    one = lambda record, count, key: jax.vmap(lambda i: _draw_one(record, count, key, i, root))(numbers)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.vmap(one)(record, count, keys))


def _draw_one(
    record: Moments, count: Int[Array, ""], key: Key[Array, ""], number: Int[Array, ""], root: Array
) -> PyTree:
    means, treedef = jax.tree.flatten(record.mean)
    squares, columns = jax.tree.leaves(record.squares), jax.tree.leaves(record.columns)
    own, shared = jax.random.split(jax.random.fold_in(key, number))
    drawn = []
    for i, (mean, square) in enumerate(zip(means, squares, strict=True)):
        variance = square / jnp.maximum(count, 1).astype(mean.dtype)
        away = jnp.sqrt(variance) * jax.random.normal(jax.random.fold_in(own, i), mean.shape, mean.dtype)
        if columns:
            rank = columns[i].shape[0]
            kept = jnp.maximum(jnp.minimum(count, rank), 2).astype(mean.dtype)  # the column of one snapshot is zero
            # Drawn once in float32, so that all weights share the same numbers, whatever their dtypes.
            common = jax.random.normal(shared, (rank,), jnp.float32).astype(mean.dtype)
            away += jnp.tensordot(common / jnp.sqrt(kept - 1), columns[i], axes=1)
        drawn.append(mean + root.astype(mean.dtype) * away)
    return jax.tree.unflatten(treedef, drawn)


def snapshot_ensemble(run: Any) -> Ensemble[Any]:
    """Returns an ensemble of the snapshots recorded by [`eqx_ensemble.methods.trajectory.snapshots`][].

    Snapshots of one member are adjacent, the oldest first. Members without any are left out, with a warning. BatchNorm
    needs [`eqx_ensemble.methods.trajectory.update_batch_norm`][] afterwards.

    **Arguments:**

    - `run`: the run or training state.

    **Returns:** the ensemble; [`eqx_ensemble.methods.trajectory.snapshot_owners`][] tells whose snapshots they are.

    **Raises:** `ValueError` if no member has a snapshot.

    ```python
    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 2, key=key)
    data = jnp.ones((100, 3)), jnp.zeros((100, 1))
    cycle = optax.cosine_decay_schedule(0.1, 20)
    sgd = optax.sgd(lambda step: cycle(step % 20))
    optimiser = ee.methods.trajectory.snapshots(sgd, 5, every=20)
    run = ee.fit(ensemble, loss, optimiser, data, steps=100, key=key)
    members = ee.methods.trajectory.snapshot_ensemble(run)  # 10 members
    ee.methods.trajectory.snapshot_owners(run)  # [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]
    ```
    """
    state, found, pairs = _kept_weights(run)
    _warn_of_few(found.count, 1, "no snapshot", "They are left out.")
    members, slots = pairs.T
    return _as_ensemble(state[members], jax.tree.map(lambda x: x[members, slots], found.record.weights))


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


def _kept_weights(run: Any) -> tuple[TrainState, RecordState, np.ndarray]:
    """The state, the record, and the member and the slot of each snapshot, the oldest first."""
    state, found = _find_record(run, (Copies,), "`snapshots`")
    size, count = jax.tree.leaves(found.record.weights)[0].shape[1], to_host(found.count)
    if not count.any():
        raise ValueError(f"`{caller()}`: no member has reached its first snapshot, after step `start` (or `every`).")
    pairs = [(i, n % size) for i, most in enumerate(count.tolist()) for n in range(max(0, most - size), most)]
    return state, found, np.array(pairs, np.int32)


def _find_record(run: Any, kinds: tuple[type, ...], wrappers: str) -> tuple[TrainState, RecordState]:
    """The training state of a run, and the record of its optimiser by one of these wrappers."""
    if not isinstance(run, Run | TrainState):
        said = f"`{caller()}` needs a run or a training state, with the optimiser's record; got `{type(run).__name__}`."
        raise TypeError(f"{said}\nPass what `fit` returned: `run`, not `run.ensemble`.")
    state = run if isinstance(run, TrainState) else run.train_state
    found = [x for x in _records(state.opt_state) if isinstance(x.record, kinds)]
    if len(found) != 1:
        raise ValueError(
            f"`{caller()}` needs one record in the optimiser state, found {len(found)}: train with the whole optimiser "
            f"in one wrapper, {wrappers} of `methods.trajectory`."
        )
    return state, found[0]


def _records(node: PyTree) -> Iterator[RecordState]:
    """All records of an optimiser state, those inside of others included."""
    for x in jax.tree.leaves(node, is_leaf=lambda x: isinstance(x, RecordState)):
        if isinstance(x, RecordState):
            yield x
            yield from _records(x.inner_state)


@eqx.filter_jit
def _or_current(found: PyTree, params: PyTree, count: Int[Array, " members"], repeats: int = 1) -> PyTree:
    """The recorded weights in the dtypes of the current ones, which replace them for members without a snapshot."""

    def choose(x: Array, current: Array) -> Array:
        current = jnp.repeat(current, repeats, axis=0)
        has_any = jnp.repeat(count > 0, repeats).reshape(-1, *[1] * (current.ndim - 1))
        return jnp.where(has_any, x.astype(current.dtype), current)

    return jax.tree.map(choose, found, params)


def _as_ensemble(state: TrainState, params: PyTree) -> Ensemble[Any]:
    """The ensemble of `state`, with other trained arrays."""
    return with_weights(state, params, jax.tree.map(lambda _: None, params)).ensemble


def _warn_of_few(count: Any, least: int, what: str, effect: str) -> None:
    """Warns of members with fewer than `least` snapshots, unless they are traced or elsewhere."""
    if is_traced(count) or not getattr(count, "is_fully_addressable", True):
        return
    if (few := np.asarray(count) < least).any():
        warn(f"`{caller()}`: members with {what}: {', '.join(map(str, np.flatnonzero(few)))}. {effect}")
