"""One member that predicts its own uncertainty: evidence, and mixtures of Gaussians."""

import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

import eqx_ensemble as ee

from ._task import Fitted, Task, constant_adam, num_bytes, plain, squared_norm

heads = ee.methods.heads


def evidential(task: Task) -> Fitted:
    """One member for the steps of all: a Dirichlet distribution for classes, a Student t for real targets."""
    task = task.in_one_run
    return _dirichlet(task) if task.setting.num_classes else _fit(task, 4, _evidential_loss, _student_t)


def mixture_density(task: Task) -> Fitted | None:
    """One member for the steps of all, which predicts three Gaussians; for real targets."""
    task = task.in_one_run
    return None if task.setting.num_classes else _fit(task, 9, _mixture_loss, _components)


def _dirichlet(task: Task) -> Fitted:
    """The weight of the penalty rises over the first tenth of the steps, as ten pieces of one run."""
    steps = task.setting.all_steps
    piece = max(1, steps // 100)
    hyper = {"annealing": jnp.zeros(1)}
    state = ee.train.init(_build(task, task.setting.num_classes), constant_adam, hyper=hyper, key=task.key)
    for i, length in enumerate([piece] * 10 + [steps - 10 * piece]):
        state = eqx.tree_at(lambda state: state.hyper["annealing"], state, jnp.full(1, min(i / 10, 1)))
        run = task.fit(state, constant_adam, loss=_dirichlet_loss(task.setting.decay), steps=length)
        state = run.train_state
    return _fitted(run.ensemble, lambda raw: np.log(heads.dirichlet(raw)))


def _fit(task: Task, num_outputs: int, head_loss: Any, predictive: Any) -> Fitted:
    loss = _real_loss(head_loss, task.setting.decay)
    run = task.fit(_build(task, num_outputs), loss=loss, steps=task.setting.all_steps)
    return _fitted(run.ensemble, predictive)


def _build(task: Task, num_outputs: int) -> ee.Ensemble:
    return ee.build(plain((*task.setting.sizes[:-1], num_outputs)), 1, key=task.key)


def _fitted(ensemble: ee.Ensemble, predictive: Any) -> Fitted:
    return Fitted(lambda x: predictive(np.asarray(ee.predict(ensemble, x))), num_bytes(ensemble.stacked))


@ft.cache
def _dirichlet_loss(decay: float) -> Any:
    def loss(model: Any, batch: Any, key: Any, hyper: Any) -> jax.Array:
        x, y = batch
        concentration = heads.dirichlet(jax.vmap(model)(x))
        penalty = 0.5 * decay * squared_norm(model)
        return heads.dirichlet_loss(concentration, y, kl_weight=hyper["annealing"]) + penalty

    return loss


@ft.cache
def _real_loss(head_loss: Any, decay: float) -> Any:
    def loss(model: Any, batch: Any, key: Any) -> jax.Array:
        x, y = batch
        return head_loss(jax.vmap(model)(x), y) + 0.5 * decay * squared_norm(model)

    return loss


def _evidential_loss(raw: jax.Array, y: jax.Array) -> jax.Array:
    return heads.evidential_loss(*heads.normal_inverse_gamma(raw, floor=1e-3), y)


def _mixture_loss(raw: jax.Array, y: jax.Array) -> jax.Array:
    return heads.mixture_density_loss(*heads.mixture_density(raw, floor=1e-3), y)


def _student_t(raw: np.ndarray, num_components: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """As a mixture of Gaussians: at equally likely quantiles of their variance."""
    mean, nu, alpha, beta = (np.asarray(part, float)[0] for part in heads.normal_inverse_gamma(raw, floor=1e-3))
    levels = (np.arange(num_components) + 0.5) / num_components
    variance = scipy.stats.invgamma.ppf(levels[:, None], alpha, scale=beta * (1 + 1 / nu))
    return np.broadcast_to(mean, variance.shape).astype(np.float32), variance.astype(np.float32)


def _components(raw: np.ndarray, num_components: int = 100) -> tuple[np.ndarray, np.ndarray]:
    """As a mixture of equally likely Gaussians: each component as often as its weight says, to the nearest."""
    mean, variance, weights = map(np.asarray, heads.mixture_components(*heads.mixture_density(raw, floor=1e-3)))
    ends = np.cumsum(weights, axis=0) / weights.sum(axis=0)
    levels = (np.arange(num_components) + 0.5) / num_components
    index = (levels[:, None, None] > ends[None, :-1]).sum(axis=1)
    return np.take_along_axis(mean, index, axis=0), np.take_along_axis(variance, index, axis=0)
