"""Members that meet in every step: particles that are pushed away from each other."""

import functools as ft
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _members import row_losses

import eqx_ensemble as ee

from ._task import ADAM, Fitted, Task, members, penalised

particles = ee.methods.particles


def svgd(task: Task) -> Fitted:
    """Stein variational gradient descent of all weights."""
    step = _weight_step(task.setting.decay, task.setting.num_rows)
    state = ee.train.init(task.build(), ADAM, key=task.key)
    for batches in _epochs(task):
        state, _ = ee.train.scan_steps(step, state, batches)
    return members(task, state.ensemble)


def function_space(task: Task) -> Fitted:
    """Members repelled by what they predict for the batch, and for as many rows of noise."""
    shape = (task.batch_size, task.setting.sizes[0])
    noise = np.random.default_rng(task.fold).normal(size=shape).astype(np.float32)
    ensemble = task.build()
    params, fixed = eqx.partition(ensemble.stacked, eqx.is_inexact_array)
    state = params, ADAM.init(params)
    for batches in _epochs(task):
        state = _function_steps(task.setting.num_rows, fixed, noise, state, batches)
    return members(task, ee.from_stacked(eqx.combine(state[0], fixed)))


def _epochs(task: Task) -> Iterator[Any]:
    """The batches of every epoch in a random order; what does not fill a batch waits for the next epoch."""
    rng = np.random.default_rng(task.fold)
    x, y = task.split.train
    steps = min(task.amount.steps, len(x) // task.batch_size)
    for _ in range(task.amount.steps // steps):
        rows = rng.permutation(len(x))[: steps * task.batch_size].reshape(steps, -1)
        yield x[rows], y[rows]


@ft.cache
def _weight_step(decay: float, num_rows: int) -> Any:
    return particles.make_step(penalised(decay), ADAM, num_rows=num_rows)


def _loss_of_outputs(outputs: jax.Array, y: Any, num_rows: int) -> jax.Array:
    """With a prior of outputs of the order 1, of which every row has its share."""
    likelihood = jnp.mean(jax.vmap(row_losses)(outputs[: len(y)], y))
    return likelihood + jnp.sum(outputs**2) / (2 * num_rows)


@eqx.filter_jit
def _function_steps(num_rows: int, fixed: Any, noise: jax.Array, state: Any, batches: Any) -> Any:
    """Steps along the directions of all members' outputs, pulled back to their weights."""

    def step(state: Any, batch: Any) -> tuple[Any, None]:
        (params, opt_state), (x, y) = state, batch
        x = jnp.concatenate([x, noise])
        outputs, pull_back = jax.vjp(jax.vmap(lambda params: jax.vmap(eqx.combine(params, fixed))(x)), params)
        gradients = jax.vmap(jax.grad(lambda outputs: _loss_of_outputs(outputs, y, num_rows)))(outputs)
        flat = lambda x: x.reshape(len(x), -1)
        directions = particles.wgd(flat(outputs), -num_rows * flat(gradients)).reshape(outputs.shape)
        updates, opt_state = ADAM.update(pull_back(-directions / num_rows)[0], opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    return jax.lax.scan(step, state, batches)[0]
