"""Methods with a posterior: chains, Laplace, SNGP, particles, and heads that predict their own uncertainty."""

import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.stats
from _task import Fitted, Net, Task, make_net, nll, num_weights, of_members, squared_norm, with_prior

import eqx_ensemble as ee

m = ee.methods


def chains(task: Task, sampler: Callable[[Task, Any], Any]) -> Fitted:
    """Seeds for half of the steps, then chains with the step size whose mixture has the best validation rows."""
    steps = task.amount.steps // 2
    trained, found = task.fit(task.build(), steps=steps).ensemble, []
    for rate in (1e-5, 1e-4, 1e-3):
        hyper = {"rate": np.full(len(trained), rate, np.float32)}
        run = task.fit(trained, lambda hyper: sampler(task, hyper["rate"]), steps=steps, hyper=hyper)
        found.append(of_members(task, m.trajectory.snapshot_ensemble(run)))
    return min(found, key=lambda fitted: task.validation_loss(fitted.predict))


def sghmc(task: Task, rate: Any) -> Any:
    """Sampled in the second half of the chain."""
    size, steps = max(1, task.amount.draws // task.amount.members), task.amount.steps // 2
    every = max(1, steps // 2 // size)
    sampler = m.sampling.sghmc(rate, num_rows=task.num_rows, friction=0.1, key=jax.random.key(0))
    return m.trajectory.snapshots(sampler, size, start=steps - (size - 1) * every, every=every)


def cyclical_sgld(task: Task, rate: Any) -> Any:
    """Four cycles of the learning rate, each sampled at its end."""
    period = task.amount.steps // 8
    temperature = lambda step: jnp.where(step % period < 0.9 * period, 0.0, 1.0)
    cycle = optax.cosine_decay_schedule(1.0, period)
    rates, key = lambda step: rate * cycle(step % period), jax.random.key(0)
    return m.trajectory.snapshots(
        m.sampling.sgld(rates, num_rows=task.num_rows, temperature=temperature, key=key), 4, every=period
    )


def laplace(task: Task, num_members: int = 1) -> Fitted:
    """The posterior of the last layer, whose prior precision the validation rows choose.

    For real targets members predict the mean alone; the noise is that of the largest marginal likelihood.
    """
    (x, y), classes, noise = task.split.train, task.data.num_classes, task.noise
    sizes = task.sizes if classes else (*task.sizes[:-1], 1)
    squares = lambda model, batch, key: jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2) / (2 * noise**2)
    loss, data = (with_prior(nll), (x, y)) if classes else (with_prior(squares), (x, y[:, None]))
    run = task.fit(task.build(num_members, make_net(sizes)), loss=loss, data=data, long=num_members == 1)
    options = {"likelihood": "classification"} if classes else {"likelihood": "regression", "noise": noise}
    posterior = m.laplace.fit(run, data, where=lambda model: model.layers[-1], **options)
    choices = [posterior.optimise_prior(fit_noise=not classes)]
    choices += [m.laplace.with_prior(choices[0], prior_precision=p) for p in (0.1, 1.0, 10.0, 100.0, 1000.0)]

    def predict(choice: Any, x: np.ndarray) -> Any:
        found = choice.predict(x)
        return np.asarray(found) if classes else tuple(np.asarray(part)[..., 0] for part in found)

    best = min(choices, key=lambda choice: task.validation_loss(ft.partial(predict, choice)))
    return Fitted(ft.partial(predict, best), num_weights(best.members.stacked))


def spectral_gaussian_process(task: Task) -> Fitted | None:
    """One member with bounded weights and a Gaussian process as its last layer; for classes."""
    if not task.data.num_classes:
        return None

    def make(key: Any) -> Any:
        own, head = jax.random.split(key)
        hidden = eqx.nn.Sequential([Net(task.sizes[:-1], key=own), eqx.nn.Lambda(jax.nn.relu)])
        return m.sngp.SNGP(hidden, task.sizes[-2], task.sizes[-1], num_features=256, length_scale=2.0, key=head)

    def loss(model: Any, batch: Any, key: Any, hyper: Any) -> Any:
        x, y = batch
        own = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x).mean, y))
        prior = model.ridge / (2 * task.num_rows) * jnp.sum(model.weight**2)
        return own + 0.5 * hyper["decay"] * squared_norm(model.network) + prior

    bounded = m.sngp.bound_spectral_norm(task.amount.adam, 2.0, where=lambda model: model.network)
    run = task.fit(task.build(1, make), bounded, loss=loss, long=True)
    ensemble = m.sngp.update_covariance(run.ensemble, task.split.train[0])

    def predict(x: np.ndarray) -> np.ndarray:
        found = ee.predict(ensemble, x)
        return np.asarray(m.sngp.mean_field(found.mean, found.variance))

    return Fitted(predict, num_weights(ensemble.stacked))


def svgd(task: Task) -> Fitted:
    """Stein variational gradient descent of all weights."""
    optimiser = m.particles.Interacting(task.amount.adam, num_rows=task.num_rows)
    return of_members(task, task.fit(task.build(), optimiser).ensemble)


def evidential(task: Task) -> Fitted:
    """A Dirichlet distribution for classes, a Student t for real targets."""
    if not task.data.num_classes:
        head = lambda raw: m.heads.normal_inverse_gamma(raw, floor=1e-3)
        loss = lambda model, batch, key: m.heads.evidential_loss(*head(jax.vmap(model)(batch[0])), batch[1])
        ensemble = task.build(1, make_net((*task.sizes[:-1], 4)))
        ensemble = task.fit(ensemble, loss=with_prior(loss), long=True).ensemble
        predict = lambda x: _student_t(*head(np.asarray(ee.predict(ensemble, x))))
        return Fitted(predict, num_weights(ensemble.stacked))

    def loss_of_classes(model: Any, batch: Any, key: Any, hyper: Any) -> Any:
        concentration = m.heads.dirichlet(jax.vmap(model)(batch[0]))
        own = m.heads.dirichlet_loss(concentration, batch[1], kl_weight=hyper["annealing"])
        return own + 0.5 * hyper["decay"] * squared_norm(model)

    # The weight of the penalty rises over the first tenth of the steps, in pieces of one run.
    steps, hyper = task.amount.all_steps, {"annealing": jnp.zeros(1), "decay": jnp.full(1, task.long_decay)}
    state = ee.train.init(task.build(1), task.amount.adam, hyper=hyper, key=task.key)
    for i, length in enumerate([max(1, steps // 100)] * 10 + [steps - 10 * max(1, steps // 100)]):
        state = eqx.tree_at(lambda state: state.hyper["annealing"], state, jnp.full(1, min(i / 10, 1)))
        state = task.fit(state, loss=loss_of_classes, steps=length).train_state
    predict = lambda x: np.log(m.heads.dirichlet(np.asarray(ee.predict(state.ensemble, x))))
    return Fitted(predict, num_weights(state.ensemble.stacked))


def _student_t(*parts: Any, num_components: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """As a mixture of Gaussians: at equally likely quantiles of their variance."""
    mean, nu, alpha, beta = (np.asarray(part, float)[0] for part in parts)
    levels = (np.arange(num_components) + 0.5) / num_components
    variance = scipy.stats.invgamma.ppf(levels[:, None], alpha, scale=beta * (1 + 1 / nu))
    return np.broadcast_to(mean, variance.shape).astype(np.float32), variance.astype(np.float32)
