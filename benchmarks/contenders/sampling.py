"""Members as chains of stochastic-gradient MCMC, which begin at trained members."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqx_ensemble as ee

from ._task import Fitted, Setting, Task, members, validation_loss

RATES = (1e-5, 1e-4, 1e-3)
trajectory, sampling = ee.methods.trajectory, ee.methods.sampling


def sghmc(task: Task) -> Fitted:
    """Seeds for half of the steps, then chains, sampled in their second half."""
    return _sample(task, _sghmc)


def cyclical_sgld(task: Task) -> Fitted:
    """Seeds for half of the steps, then four cycles of the learning rate, each sampled at its end."""
    return _sample(task, _cyclical_sgld)


def _sample(task: Task, sampler: Any) -> Fitted:
    """Chains with the step size whose mixture has the best validation rows."""
    begun = task.amount.steps // 2
    trained = task.fit(task.build(), steps=begun).ensemble
    found = []
    for rate in RATES:
        hyper = {"rate": np.full(len(trained), rate, np.float32)}
        run = task.fit(trained, sampler(task.setting), steps=task.amount.steps - begun, hyper=hyper)
        found.append(members(task, trajectory.snapshot_ensemble(run)))
    return min(found, key=lambda fitted: validation_loss(task, fitted.predict))


@ft.cache
def _sghmc(setting: Setting) -> Any:
    size, steps = max(1, setting.amount.draws // setting.amount.members), setting.amount.steps // 2
    every = max(1, steps // 2 // size)

    def optimiser(hyper: Any) -> Any:
        sampler = sampling.sghmc(hyper["rate"], num_rows=setting.num_rows, friction=0.1, key=jax.random.key(0))
        return trajectory.snapshots(sampler, size, start=steps - (size - 1) * every, every=every)

    return optimiser


@ft.cache
def _cyclical_sgld(setting: Setting) -> Any:
    period = setting.amount.steps // 8
    temperature = lambda step: jnp.where(step % period < 0.9 * period, 0.0, 1.0)

    def optimiser(hyper: Any) -> Any:
        cycle = optax.cosine_decay_schedule(1.0, period)
        rate = lambda step: hyper["rate"] * cycle(step % period)
        sampler = sampling.sgld(rate, num_rows=setting.num_rows, temperature=temperature, key=jax.random.key(0))
        return trajectory.snapshots(sampler, 4, every=period)

    return optimiser
