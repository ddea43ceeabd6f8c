from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from ... import _keys
from ..._data import take_data
from ..._ensemble import Ensemble, check_ensemble, check_model_state
from ..._map import over_members
from ..._marks import Each
from ..._pytree import PyTree

Layer = Any
"""An `equinox.nn.BatchNorm`; only the state indices of its mode are set."""

Statistics = list[tuple[Array, Array]]
"""The mean and the variance of each layer."""


def update_batch_norm(
    ensemble: Ensemble[Any],
    state: eqx.nn.State,
    fn: Callable[..., Any],
    data: PyTree,
    *,
    batch_size: int | None = None,
    key: Any,
) -> eqx.nn.State:
    """Re-estimates the statistics of BatchNorm layers, for weights that were averaged, drawn or recorded.

    Each member makes one pass over the data in training mode. The statistics of its batches, with equal weight per row,
    replace the running averages.

    **Arguments:**

    - `ensemble`: the members, such as those of [`eqx_ensemble.methods.trajectory.average`][].
    - `state`: their stacked `equinox.nn.State`; for draws that of the original members, `ee.tree.take(run.state,
        owners)` with `owners = np.repeat(np.arange(num_members), num_samples)`.
    - `fn`: `fn(model, state, batch, key) -> (value, state)`, such as the loss. Only the state is used.
    - `data`: arrays `(rows, ...)`, or `(members, rows, ...)` in parts marked [`eqx_ensemble.Each`][].
    - `batch_size`: 32 by default; use that of training, because earlier layers normalise by the batch.
    - `key`: the root key, for the row order and the keys passed to `fn`.

    **Returns:** the stacked state with the new statistics. Layers in inference mode keep theirs.

    ```python
    class Model(eqx.Module):
        linear: eqx.nn.Linear
        norm: eqx.nn.BatchNorm

        def __init__(self, key):
            self.linear = eqx.nn.Linear(3, 4, key=key)
            self.norm = eqx.nn.BatchNorm(4, "batch", mode="batch")

        def __call__(self, x, state):
            return self.norm(self.linear(x), state)

    def loss(model, state, batch, key):
        call = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        out, state = call(batch, state)
        return jnp.mean(out**2), state

    ensemble, state = ee.build(eqx.nn.make_with_state(Model), 4, key=key)
    x = jax.random.normal(key, (100, 3))
    optimiser = ee.methods.trajectory.swa(optax.sgd(0.1))
    run = ee.fit(ensemble, loss, optimiser, x, steps=5, state=state, key=key)
    average = ee.methods.trajectory.average(run)
    state = ee.methods.trajectory.update_batch_norm(average, run.state, loss, x, key=key)
    ```

    ??? cite
        [Izmailov et al. 2018](https://arxiv.org/abs/1803.05407)
    """
    check_ensemble(ensemble)
    check_model_state(ensemble, state)
    data, num_rows = take_data(data, ensemble.num_members, argument="data")
    batch_size = min(batch_size or 32, num_rows)
    key = _keys.root(key)
    order = jax.random.permutation(jax.random.fold_in(key, _keys.tag("batch_norm")), num_rows)

    def one(model: Any, state: eqx.nn.State, data: PyTree, order: Array, key: Array) -> eqx.nn.State:
        return _estimate(fn, model, state, data, order, key, batch_size)

    keys = Each(_keys.member_keys(key, ensemble.num_members, purpose="batch_norm"))
    return eqx.filter_jit(over_members(one))(ensemble, state, data, order, keys)


def _estimate(
    fn: Callable[..., Any], model: Any, state: eqx.nn.State, data: PyTree, order: Int[Array, " rows"],
    key: Key[Array, ""], batch_size: int,
) -> eqx.nn.State:  # fmt: skip
    """The state of one member after one pass."""
    layers, num_rows = _layers(model), order.shape[0]

    def batch(carry: tuple, number: Any, size: int) -> tuple:
        state, old, rows_before = carry
        rows = jax.lax.dynamic_slice_in_dim(order, number * batch_size, size)
        state = _reset(layers, state)
        _, state = fn(model, state, jax.tree.map(lambda x: x[rows], data), jax.random.fold_in(key, number))[:2]
        share = size / (rows_before + size)
        new = [_pool(*pair, share) for pair in zip(old, _read(layers, state), strict=True)]
        return state, new, rows_before + size

    carry = batch((state, [(0.0, 0.0)] * len(layers), 0), 0, batch_size)
    state, found, rows = carry
    carry = (state, found, jnp.asarray(rows, jnp.result_type(float)))
    full, rest = divmod(num_rows, batch_size)
    carry, _ = jax.lax.scan(lambda carry, i: (batch(carry, i, batch_size), None), carry, jnp.arange(1, full))
    state, found, _ = batch(carry, full, rest) if rest else carry
    return _write(layers, state, found)


def _layers(model: PyTree) -> list[Layer]:
    """The BatchNorm layers that are in training mode."""
    is_layer = lambda x: isinstance(x, eqx.nn.BatchNorm)
    found = [x for x in jax.tree.leaves(model, is_leaf=is_layer) if is_layer(x)]
    return [x for x in found if x.inference is not True]


def _pool(old: tuple, new: tuple, share: Any) -> tuple[Array, Array]:
    """Pools the means and variances of two sets of rows; `share` is the fraction of rows in the second."""
    (old_mean, old_variance), (mean, variance) = old, new
    share = jnp.asarray(share, mean.dtype)
    away = mean - old_mean
    between = share * (1 - share) * (away * jnp.conj(away)).real
    return old_mean + share * away, old_variance + share * (variance - old_variance) + between


def _reset(layers: list[Layer], state: eqx.nn.State) -> eqx.nn.State:
    """Resets the layers, so that the state after the next batch holds the statistics of that batch only."""
    for layer in layers:
        if layer.mode == "ema":
            state = state.set(layer.ema_first_time_index, jnp.array(True))  # noqa: FBT003
        else:
            zeros = jax.tree.map(jnp.zeros_like, state.get(layer.batch_state_index))
            state = state.set(layer.batch_state_index, zeros)
    return state


def _read(layers: list[Layer], state: eqx.nn.State) -> Statistics:
    """Reads the statistics of one batch."""
    one = lambda layer: (
        state.get(layer.ema_state_index)
        if layer.mode == "ema"
        else jax.tree.map(lambda x: x / (1 - layer.momentum), state.get(layer.batch_state_index))
    )
    return [one(layer) for layer in layers]


def _write(layers: list[Layer], state: eqx.nn.State, found: Statistics) -> eqx.nn.State:
    """Writes statistics to the state, as if they were those of one batch."""
    for layer, statistics in zip(layers, found, strict=True):
        if layer.mode == "ema":
            state = state.set(layer.ema_state_index, statistics)
        else:
            # Prediction divides by `1 - momentum**counter`; multiplying by the same number avoids rounding.
            scaled = jax.tree.map(lambda x, m=layer.momentum: x * (1 - jnp.asarray(m, x.dtype)), statistics)
            state = state.set(layer.batch_counter, jnp.ones_like(state.get(layer.batch_counter)))
            state = state.set(layer.batch_state_index, scaled)
    return state
