"""Posteriors of last layers, fitted after training: Laplace approximations, and the Gaussian process of SNGP."""

import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _members import Net

import eqx_ensemble as ee

from ._task import ADAM, Fitted, Task, num_bytes, penalised, plain, squared_norm, validation_loss

PRECISIONS = (0.1, 1.0, 10.0, 100.0, 1000.0)
sngp = ee.methods.sngp


def laplace(task: Task) -> Fitted:
    """One member for the steps of all, and the posterior of its last layer."""
    task = task.in_one_run
    return _laplace(task, 1, task.setting.all_steps)


def laplace_of_seeds(task: Task) -> Fitted:
    """Seeds, each with the posterior of its last layer."""
    return _laplace(task, task.amount.members, task.amount.steps)


def spectral_gaussian_process(task: Task) -> Fitted | None:
    """One member for the steps of all, with bounded weights and a Gaussian process as its last layer; for classes."""
    task = task.in_one_run
    if not task.setting.num_classes:
        return None
    ensemble = ee.build(_with_process(task.setting.sizes), 1, key=task.key)
    optimiser = _bounded()
    run = task.fit(
        ensemble, optimiser, loss=_process_loss(task.setting.decay, task.setting.num_rows), steps=task.setting.all_steps
    )
    ensemble = sngp.update_covariance(run.ensemble, task.split.train[0])

    def predict(x: np.ndarray) -> np.ndarray:
        found = ee.predict(ensemble, x)
        return np.asarray(sngp.mean_field(found.mean, found.variance))

    return Fitted(predict, num_bytes(ensemble.stacked))


def _laplace(task: Task, num_members: int, steps: int) -> Fitted:
    """For real targets members predict the mean alone; the noise is that of the largest marginal likelihood.

    Validation rows choose the prior precision, among that of the largest marginal likelihood and powers of ten.
    """
    classes = task.setting.num_classes
    sizes = task.setting.sizes if classes else (*task.setting.sizes[:-1], 1)
    x, y = task.split.train
    data = (x, y) if classes else (x, y[:, None])
    loss = penalised(task.setting.decay) if classes else _squared_loss(task.setting.decay, task.setting.noise)
    run = task.fit(ee.build(plain(sizes), num_members, key=task.key), loss=loss, data=data, steps=steps)
    options = {"likelihood": "classification"} if classes else {"likelihood": "regression", "noise": task.setting.noise}
    posterior = ee.methods.laplace.fit(run, data, where=_last_layer, **options)
    choices = [posterior.optimise_prior(fit_noise=not classes)]
    choices += [ee.methods.laplace.with_prior(choices[0], prior_precision=precision) for precision in PRECISIONS]
    best = min(choices, key=lambda choice: validation_loss(task, _gaussians(task, choice)))
    return Fitted(_gaussians(task, best), num_bytes(best.members.stacked))


def _gaussians(task: Task, posterior: Any) -> Any:
    def predict(x: np.ndarray) -> Any:
        found = posterior.predict(x)
        return np.asarray(found) if task.setting.num_classes else tuple(np.asarray(part)[..., 0] for part in found)

    return predict


def _last_layer(model: Net) -> Any:
    return model.layers[-1]


@ft.cache
def _squared_loss(decay: float, noise: float) -> Any:
    """In nats, for the noise that one member has on validation rows."""

    def loss(model: Any, batch: Any, key: Any) -> jax.Array:
        x, y = batch
        return jnp.mean((jax.vmap(model)(x) - y) ** 2) / (2 * noise**2) + 0.5 * decay * squared_norm(model)

    return loss


class Hidden(eqx.Module):
    """A network whose last layer has an activation, too."""

    net: Net

    def __call__(self, x: Any) -> Any:
        return jax.nn.relu(self.net(x))


@ft.cache
def _with_process(sizes: tuple[int, ...]) -> Any:
    def make(key: Any) -> Any:
        own, head = jax.random.split(key)
        hidden = Hidden(plain(sizes[:-1])(own))
        return sngp.SNGP(hidden, sizes[-2], sizes[-1], num_features=256, length_scale=2.0, key=head)

    return make


@ft.cache
def _bounded() -> optax.GradientTransformation:
    return sngp.bound_spectral_norm(ADAM, 2.0, where=lambda model: model.network)


@ft.cache
def _process_loss(decay: float, num_rows: int) -> Any:
    def loss(model: Any, batch: Any, key: Any) -> jax.Array:
        x, y = batch
        logits = jax.vmap(model)(x).mean
        nll = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))
        return nll + 0.5 * decay * squared_norm(model.network) + model.ridge / (2 * num_rows) * jnp.sum(model.weight**2)

    return loss
