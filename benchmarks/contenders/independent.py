"""Members that never meet: seeds, bootstraps, anchors, prior functions; and what one member does alone."""

import functools as ft
from typing import Any

import jax
import numpy as np
from _members import Heads, Net, as_gaussian, loss

import eqx_ensemble as ee

from ._task import Fitted, Task, constant_adam, members, num_bytes, plain, squared_norm, validation_loss


def one_member(task: Task) -> Fitted:
    """One member, for the steps of one member."""
    return members(task, task.fit(task.build(1)).ensemble)


def each_seed(task: Task) -> Fitted:
    """The members of `seeds`, each by itself: what one member has on average."""
    found = seeds(task)
    return Fitted(found.predict, found.num_bytes // task.amount.members, separate=True)


def one_member_for_longer(task: Task) -> Fitted:
    """One member, for the steps of all."""
    task = task.in_one_run
    return members(task, task.fit(task.build(1), steps=task.setting.all_steps).ensemble)


def seeds(task: Task) -> Fitted:
    """Members with random weights and row orders of their own."""
    return members(task, task.fit(task.build()).ensemble)


def bootstraps(task: Task) -> Fitted:
    """Members with rows drawn with replacement."""
    rows = ee.resample.bootstrap(task.setting.num_rows, task.amount.members, key=task.key)
    return members(task, task.fit(task.build(), rows=rows).ensemble)


def anchors(task: Task) -> Fitted:
    """Members that are pulled towards draws from a prior in proportion to a layer's inputs, instead of zero."""
    ensemble = task.build()
    drawn = ee.methods.priors.draw_anchors(ensemble, lambda leaf: leaf.shape[-1] ** -0.5, key=task.key)
    run = task.fit(ensemble, constant_adam, loss=_anchored(task.setting.num_rows), hyper={"anchor": drawn})
    return members(task, run.ensemble)


@ft.cache
def _anchored(num_rows: int) -> Any:
    def anchored(model: Any, batch: Any, key: Any, hyper: Any) -> jax.Array:
        return loss(model, batch, key) + hyper["anchor"].penalty(model, num_rows=num_rows)

    return anchored


def prior_functions(task: Task) -> Fitted:
    """Members to which a random network is added that is never trained."""
    ensemble = ee.build(_with_prior(task.setting.sizes), task.amount.members, key=task.key)
    return members(task, task.fit(ensemble).ensemble)


@ft.cache
def _with_prior(sizes: tuple[int, ...]) -> Any:
    def make(key: Any) -> Any:
        own, prior = jax.random.split(key)
        return ee.methods.priors.RandomisedPrior(plain(sizes)(own), plain(sizes)(prior), scale=1.0)

    return make


def heads_on_a_trunk(task: Task) -> Fitted:
    """One hidden layer that all share, and a hidden layer and an output layer for each."""
    make = _with_heads(task.setting.sizes, task.amount.members)
    loss = _loss_of_heads(task.setting.decay, task.amount.members)
    ensemble = task.fit(ee.build(make, 1, key=task.key), loss=loss).ensemble
    predict = lambda x: task.mixture(np.moveaxis(np.asarray(ee.predict(ensemble, x))[0], 1, 0))
    return Fitted(predict, num_bytes(ensemble.stacked))


@ft.cache
def _with_heads(sizes: tuple[int, ...], num_heads: int) -> Any:
    return lambda key: Heads(sizes, num_heads, key=key)


@ft.cache
def _loss_of_heads(decay: float, num_heads: int) -> Any:
    def of_heads(model: Any, batch: Any, key: Any) -> jax.Array:
        norm = squared_norm(model.trunk) + squared_norm(model.heads, num_heads, lambda leaf: True)
        return loss(model, batch, key) + 0.5 * decay * norm

    return of_heads


def mc_dropout(task: Task, rates: tuple[float, ...] = (0.05, 0.1, 0.2, 0.5)) -> Fitted:
    """One member with dropout, in as many passes as there are draws; its rate is chosen by validation rows."""
    steps = task.setting.all_steps // len(rates)
    build = lambda rate: ee.build(_with_dropout(task.setting.sizes, rate), 1, key=task.key)
    alone = [task.fit(build(rate), steps=steps).ensemble for rate in rates]
    best = min(alone, key=lambda one: validation_loss(task, lambda x: task.mixture(_passes(task, one, x))))
    return Fitted(lambda x: task.mixture(_passes(task, best, x)), num_bytes(best.stacked))


@ft.cache
def _with_dropout(sizes: tuple[int, ...], rate: float) -> Any:
    return lambda key: Net(sizes, rate, key=key)


def _passes(task: Task, one: ee.Ensemble, x: np.ndarray) -> np.ndarray:
    """The outputs `(passes, rows, outputs)` of one member with dropout switched on."""
    keys = jax.random.split(task.key, task.amount.draws)
    return np.concatenate([np.asarray(ee.predict(one, x, inference=False, key=key)) for key in keys])


def distilled(task: Task) -> Fitted:
    """Seeds for half of the steps; one student of their mixture, for as many steps as all of them."""
    half = task.setting.all_steps // 2
    teachers = task.fit(task.build(), steps=half // task.amount.members).ensemble
    x = task.split.train[0]
    data = x, ee.methods.distillation.targets(teachers, x)
    student = ee.build(plain(task.setting.sizes), 1, key=jax.random.fold_in(task.key, 1))
    loss = _student_loss(task.setting.num_classes, task.setting.decay)
    return members(task, task.fit(student, loss=loss, data=data, steps=half).ensemble)


@ft.cache
def _student_loss(num_classes: int, decay: float) -> Any:
    def loss(model: Any, batch: Any, key: Any) -> jax.Array:
        x, teacher = batch
        own, penalty = jax.vmap(model)(x), 0.5 * decay * squared_norm(model)
        if num_classes:
            return ee.methods.distillation.mixture_loss(own, teacher) + penalty
        return ee.methods.distillation.gaussian_loss(*as_gaussian(own), *as_gaussian(teacher)) + penalty

    return loss
