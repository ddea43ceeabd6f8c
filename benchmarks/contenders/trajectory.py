"""Members out of the path of one run, and averages of weights."""

import functools as ft
from typing import Any

import equinox as eqx
import optax

import eqx_ensemble as ee

from ._task import ADAM, LEARNING_RATE, Fitted, Setting, Task, members, penalised

trajectory = ee.methods.trajectory


def exponential_average(task: Task) -> Fitted:
    """One member for the steps of all; the exponential average of its weights predicts."""
    task = task.in_one_run
    run = task.fit(task.build(1), _ema(), steps=task.setting.all_steps)
    return members(task, trajectory.average(run))


def stochastic_weight_average(task: Task) -> Fitted:
    """One member for the steps of all; the mean of the weights of the last quarter predicts."""
    task = task.in_one_run
    run = task.fit(task.build(1), _swa(task.setting.all_steps), steps=task.setting.all_steps)
    return members(task, trajectory.average(run))


def swag(task: Task) -> Fitted:
    """Draws from the Gaussian of the weights in the last quarter of one long run."""
    task = task.in_one_run
    run = task.fit(task.build(1), _swag(task.setting.all_steps), steps=task.setting.all_steps)
    return members(task, trajectory.sample(run, task.amount.draws, key=task.key))


def multi_swag(task: Task) -> Fitted:
    """As many draws in all, of each of the seeds, from the last quarter of their paths."""
    run = task.fit(task.build(), _swag(task.amount.steps))
    return members(task, trajectory.sample(run, task.amount.draws // task.amount.members, key=task.key))


def snapshots(task: Task) -> Fitted:
    """One member in cycles of the learning rate, each as long as a member is trained."""
    task = task.in_one_run
    run = task.fit(task.build(1), _snapshots(task.setting), steps=task.setting.all_steps)
    return members(task, trajectory.snapshot_ensemble(run))


def greedy_soup(task: Task) -> Fitted:
    """The average of members that share half a member's training; validation rows choose them."""
    shared = task.amount.steps // 2
    start = task.fit(task.build(1), steps=shared).ensemble[0]
    rest = (task.setting.all_steps - shared) // task.amount.members
    tuned = task.fit(ee.stack([start] * task.amount.members), steps=rest).ensemble
    loss, rows = _jitted(task.setting.decay), task.split.validation
    soup = ee.methods.soups.greedy(tuned, lambda model: loss(model, rows, task.key), mode="min")
    return members(task, ee.stack([soup.model]))


@ft.cache
def _ema() -> Any:
    return trajectory.ema(ADAM, 0.999)


@ft.cache
def _swa(steps: int) -> Any:
    return trajectory.swa(ADAM, start=3 * steps // 4, every=10)


@ft.cache
def _swag(steps: int) -> Any:
    return trajectory.swag(ADAM, rank=20, start=3 * steps // 4, every=max(1, steps // 160))


@ft.cache
def _snapshots(setting: Setting) -> Any:
    period = setting.amount.steps
    cycle = optax.cosine_decay_schedule(2 * LEARNING_RATE, period)
    adam = optax.adam(lambda step: cycle(step % period))
    return trajectory.snapshots(adam, setting.amount.members, every=period)


@ft.cache
def _jitted(decay: float) -> Any:
    return eqx.filter_jit(penalised(decay))
