from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Int, Key

from ... import _keys
from ..._check import check_positive_int
from ..._ensemble import Ensemble
from ..._pytree import PyTree
from ._average import (
    Moments,
    as_ensemble,
    find_record,
    move_mean,
    reciprocal,
    record_path,
    weights_or_current,
    zeros_like,
)
from ._check import (
    check_inner_optimiser,
    check_rank,
    check_real,
    check_scale,
    check_steps,
    warn_of_few,
)


def swag(
    optimiser: optax.GradientTransformation, *, rank: int = 20, start: Any = 0, every: Any = 1
) -> optax.GradientTransformationExtraArgs:
    """SWAG: keeps a Gaussian approximation of each member's weights along its trajectory.

    The mean and variance of all snapshots (`ddof=0`), and the deviations of the last `rank` from the mean, for
    [`eqx_ensemble.methods.trajectory.sample`][] and [`eqx_ensemble.methods.trajectory.average`][]. Several members are
    MultiSWAG.

    **Arguments:**

    - `optimiser`, `start`, `every`: as for [`eqx_ensemble.methods.trajectory.ema`][], in steps.
    - `rank`: the number of deviations, 0 (diagonal only) or at least 2, each of the memory of the weights.

    **Returns:** an optax optimiser.

    **Raises:** `TypeError` for complex weights, when initialised.

    ```python
    optimiser = ee.methods.trajectory.swag(optax.sgd(0.05), rank=10, start=750, every=10)
    ```

    ??? cite
        [Maddox et al. 2019](https://arxiv.org/abs/1902.02476); MultiSWAG: [Wilson and Izmailov
        2020](https://arxiv.org/abs/2002.08791)
    """
    check_inner_optimiser(optimiser)
    check_steps(start, every)
    rank = check_rank(rank)

    def init(params: PyTree) -> Moments:
        check_real(params)
        return Moments(zeros_like(params), zeros_like(params), zeros_like(params, rank) if rank else None)

    def update(record: Moments, weights: PyTree, count: Int[Array, ""], due: Bool[Array, ""]) -> Moments:
        mean = move_mean(record.mean, weights, reciprocal(count), due)
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

    return record_path(optimiser, start=start, every=every, name="methods.trajectory.swag", init=init, update=update)


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
    check_scale(scale)
    state, found = find_record(run, (Moments,), "`swag`", "swag(optax.sgd(0.05))")
    keys = _keys.member_keys(key, state.num_members, purpose="swag")
    warn_of_few(found.count, least=2, effect="Their draws are all equal.")
    if scale is None:
        scale = 1.0 if found.record.columns is None else 0.5
    drawn = _draw(found.record, found.count, keys, num_samples, jnp.sqrt(jnp.asarray(scale, jnp.result_type(float))))
    params = weights_or_current(drawn, state.params, found.count, num_samples)
    return as_ensemble(state[np.repeat(np.arange(state.num_members), num_samples)], params)


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
            kept = jnp.clip(count, 2, rank).astype(mean.dtype)  # the only column after one snapshot is zero
            # Drawn once in float32, so that all weights share the same numbers, whatever their dtypes.
            common = jax.random.normal(shared, (rank,), jnp.float32).astype(mean.dtype)
            away += jnp.tensordot(common / jnp.sqrt(kept - 1), columns[i], axes=1)
        drawn.append(mean + root.astype(mean.dtype) * away)
    return jax.tree.unflatten(treedef, drawn)
