"""Members that meet in every step: particles that are pushed away from each other."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _members import row_losses

import eqx_ensemble as ee

from ._task import ADAM, Fitted, Task, members, penalised

particles = ee.methods.particles


def svgd(task: Task) -> Fitted:
    """Stein variational gradient descent of all weights."""
    return _train(task, _weight_step(task.setting.decay, task.setting.num_rows))


def function_space(task: Task) -> Fitted:
    """Members repelled by what they predict for the batch, and for as many rows of noise."""
    shape = (task.batch_size, task.setting.sizes[0])
    noise = np.random.default_rng(task.fold).normal(size=shape).astype(np.float32)
    return _train(task, _function_step(task.setting.num_rows), noise)


def _train(task: Task, step: Any, *extra: np.ndarray) -> Fitted:
    """The rows of every epoch in a random order; what does not fill a batch waits for the next epoch."""
    rng = np.random.default_rng(task.fold)
    x, y = task.split.train
    steps = min(task.amount.steps, len(x) // task.batch_size)
    state = ee.train.init(task.build(), ADAM, key=task.key)
    every_step = [np.broadcast_to(part, (steps, *part.shape)) for part in extra]
    for _ in range(task.amount.steps // steps):
        rows = rng.permutation(len(x))[: steps * task.batch_size].reshape(steps, -1)
        state, _ = ee.train.scan_steps(step, state, (x[rows], y[rows], *every_step))
    return members(task, state.ensemble)


@ft.cache
def _weight_step(decay: float, num_rows: int) -> Any:
    return particles.make_step(penalised(decay), ADAM, num_rows=num_rows)


@ft.cache
def _function_step(num_rows: int) -> Any:
    def outputs(model: Any, batch: Any, key: Any) -> jax.Array:
        x, _, noise = batch
        return jax.vmap(model)(jnp.concatenate([x, noise]))

    def loss(outputs: jax.Array, batch: Any, key: Any) -> jax.Array:
        """With a prior of outputs of the order 1, of which every row has its share."""
        y = batch[1]
        likelihood = jnp.mean(jax.vmap(row_losses)(outputs[: len(y)], y))
        return likelihood + jnp.sum(outputs**2) / (2 * num_rows)

    return particles.make_function_space_step(outputs, loss, ADAM, num_rows=num_rows)
