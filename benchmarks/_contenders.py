"""Methods that `quality.py` compares: each is a function of a task, and gives how it predicts."""

import functools as ft
from collections.abc import Callable
from typing import Any

import _posteriors as post
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _task import Fitted, Net, Task, as_gaussian, nll, num_weights, of_members, squared_norm, with_prior

import eqx_ensemble as ee

m = ee.methods
OWN = ("batch_ensemble", "tabm", "packed_ensemble")
"""Conversions whose sub-members have weights of their own along a leading axis."""
Method = Callable[[Task], Fitted | None]


def seeds(task: Task, count: int) -> Fitted:
    return of_members(task, task.seeds, min(count, task.amount.most))


def bootstraps(task: Task) -> Fitted:
    rows = ee.resample.bootstrap(task.num_rows, task.amount.members, key=task.key)
    return of_members(task, task.fit(task.build(), rows=rows).ensemble)


def mean_of_weights(task: Task) -> Fitted:
    return of_members(task, ee.stack([ee.average_parameters(task.stopped)]))


def calibrated(task: Task, method: str) -> Fitted | None:
    """Overfitted members, whose mixture the validation rows calibrate; for classes, if any mistake is left."""
    x, y = task.split.validation
    logits = ee.predict(task.overfitted, x)
    if not task.data.num_classes or ee.scores.accuracy(logits, y) == 1:
        return None
    calibrate = getattr(ee.calibrate, method)(logits, y, pool="mixture")

    def predict(x: np.ndarray) -> np.ndarray:
        logits = np.asarray(calibrate(ee.predict(task.overfitted, x)))
        return logits if logits.ndim == 3 else logits[None]

    return Fitted(predict, num_weights(task.overfitted.stacked))


def anchors(task: Task) -> Fitted:
    """Members that are pulled towards draws from a prior in proportion to a layer's inputs, instead of zero."""
    ensemble = task.build()
    drawn = m.priors.draw_anchors(ensemble, lambda leaf: leaf.shape[-1] ** -0.5, key=task.key)
    penalty = lambda model, hyper: hyper["anchor"].penalty(model, num_rows=task.num_rows)
    anchored = lambda model, batch, key, hyper: nll(model, batch, key) + penalty(model, hyper)
    return of_members(task, task.fit(ensemble, loss=anchored, hyper={"anchor": drawn}).ensemble)


def prior_functions(task: Task) -> Fitted:
    """Members to which a random network is added that is never trained."""

    def make(key: Any) -> Any:
        own, prior = jax.random.split(key)
        return m.priors.RandomisedPrior(Net(task.sizes, key=own), Net(task.sizes, key=prior), scale=1.0)

    return of_members(task, task.fit(task.build(make=make)).ensemble)


class Heads(eqx.Module):
    """One hidden layer that all heads share; each is a hidden layer and an output layer."""

    trunk: eqx.nn.Linear
    heads: Net

    def __init__(self, sizes: tuple[int, ...], num_heads: int, *, key: Any):
        trunk_key, key = jax.random.split(key)
        self.trunk = eqx.nn.Linear(*sizes[:2], key=trunk_key)
        self.heads = eqx.filter_vmap(lambda key: Net(sizes[1:], key=key))(jax.random.split(key, num_heads))

    def __call__(self, x: Any, key: Any = None) -> Any:
        x = jax.nn.relu(self.trunk(x))
        return eqx.filter_vmap(lambda head: head(x))(self.heads)


def heads_on_a_trunk(task: Task) -> Fitted:
    count = task.amount.members
    norm = lambda model: squared_norm(model.trunk) + squared_norm(model.heads, count, lambda leaf: True)
    ensemble = task.build(1, lambda key: Heads(task.sizes, count, key=key))
    ensemble = task.fit(ensemble, loss=with_prior(nll, norm)).ensemble
    predict = lambda x: task.mixture(np.moveaxis(np.asarray(ee.predict(ensemble, x))[0], 1, 0))
    return Fitted(predict, num_weights(ensemble.stacked))


def distilled(task: Task) -> Fitted:
    """Seeds for half of the steps; one student of their mixture, for as many steps as all of them."""
    teachers = task.fit(task.build(), steps=task.amount.steps // 2).ensemble
    x = task.split.train[0]

    def of_teachers(model: Any, batch: Any, key: Any) -> Any:
        x, teacher = batch
        own = jax.vmap(model)(x)
        if task.data.num_classes:
            return m.distillation.mixture_loss(own, teacher)
        return m.distillation.gaussian_loss(*as_gaussian(own), *as_gaussian(teacher))

    student = ee.build(lambda key: Net(task.sizes, key=key), 1, key=jax.random.fold_in(task.key, 1))
    data, steps = (x, m.distillation.targets(teachers, x)), task.amount.all_steps // 2
    return of_members(task, task.fit(student, loss=with_prior(of_teachers), data=data, steps=steps).ensemble)


def alone(task: Task, wrap: Callable[[Task, int], Any] = lambda task, steps: task.amount.adam) -> ee.Run:
    """One member for the steps of all, by an optimiser that may record them."""
    return task.fit(task.build(1), wrap(task, task.amount.all_steps), long=True)


def ema(task: Task, steps: int) -> Any:
    return m.trajectory.ema(task.amount.adam, 0.999)


def swa(task: Task, steps: int) -> Any:
    return m.trajectory.swa(task.amount.adam, start=3 * steps // 4, every=10)


def swag(task: Task, steps: int) -> Any:
    return m.trajectory.swag(task.amount.adam, rank=20, start=3 * steps // 4, every=max(1, steps // 160))


def snapshots(task: Task, steps: int) -> Any:
    """Cycles of the learning rate, each as long as a member is trained."""
    period = task.amount.steps
    cycle = optax.cosine_decay_schedule(2 * task.amount.learning_rate, period)
    adam = optax.adam(lambda step: cycle(step % period))
    return m.trajectory.snapshots(adam, task.amount.members, every=period)


def drawn_of_one(task: Task) -> Fitted:
    return of_members(task, m.trajectory.sample(alone(task, swag), task.amount.draws, key=task.key))


def multi_swag(task: Task) -> Fitted:
    """As many draws in all, of each of the seeds."""
    run, each = task.fit(task.build(), swag(task, task.amount.steps)), task.amount.draws // task.amount.members
    return of_members(task, m.trajectory.sample(run, each, key=task.key))


def mc_dropout(task: Task, rates: tuple[float, ...] = (0.05, 0.1, 0.2, 0.5)) -> Fitted:
    """One member with dropout, in as many passes as there are draws; its rate is chosen by validation rows."""
    at = lambda model, rate: eqx.tree_at(lambda net: net.dropout.p, model, rate)
    loss = lambda model, batch, key, hyper: with_prior(nll)(at(model, hyper["rate"]), batch, key, hyper)
    ensemble = ee.stack([task.build(1, lambda key: Net(task.sizes, 0.1, key=key))[0]] * len(rates))
    run = task.fit(ensemble, loss=loss, hyper={"rate": jnp.array(rates)}, steps=task.amount.all_steps // len(rates))
    keys = jax.random.split(task.key, task.amount.draws)

    def passes(one: Any, x: np.ndarray) -> Any:
        return task.mixture(np.concatenate([ee.predict(one, x, inference=False, key=key) for key in keys]))

    alone = [ee.stack([at(run.ensemble[i], rate)]) for i, rate in enumerate(rates)]
    best = min(alone, key=lambda one: task.validation_loss(ft.partial(passes, one)))
    return Fitted(ft.partial(passes, best), num_weights(best.stacked))


def greedy_soup(task: Task) -> Fitted:
    """The average of members that share half a member's training; validation rows choose them."""
    shared = task.amount.steps // 2
    start = task.fit(task.build(1), steps=shared).ensemble[0]
    rest = (task.amount.all_steps - shared) // task.amount.members
    tuned = task.fit(ee.stack([start] * task.amount.members), steps=rest).ensemble
    score = eqx.filter_jit(lambda model: nll(model, task.split.validation, task.key))
    return of_members(task, ee.stack([m.soups.greedy(tuned, score, mode="min").model]))


def joint(task: Task, kind: str, count: int, rows: Any = "same", *, long: bool = True) -> Fitted:
    """The prior is that of the weights, and not of the factors, which are about 1."""
    count, mean_loss = count or task.amount.members, m.efficient.mean_loss(nll, rows=rows)

    def make(key: Any) -> Any:
        own, convert = jax.random.split(key)
        return getattr(m.efficient, kind)(Net(task.sizes, key=own), count, key=convert)

    def norm(model: Any) -> Any:
        weights = eqx.filter(model, eqx.is_inexact_array)
        labels = m.efficient.weight_labels(weights)
        slow = jax.tree.map(lambda w, label: w if label == "slow" else None, weights, labels)
        return squared_norm(slow, count, lambda leaf: kind in OWN and leaf.shape[0] == count)

    ensemble = task.fit(task.build(1, make), loss=with_prior(mean_loss, norm), long=long).ensemble
    predict = lambda x: task.mixture(m.efficient.as_members(np.asarray(ee.predict(ensemble, x))))
    return Fitted(predict, num_weights(ensemble.stacked))


def tuned(task: Task, make: Callable[[Task, int], ee.Ensemble], group: int = 0) -> Fitted:
    rates, count = task.amount.tuning_rates, task.amount.members
    hyper = {"lr": jnp.repeat(jnp.array(rates, jnp.float32), count)}
    options = {"validation": task.split.validation, "patience": task.amount.patience, "epochs": task.epochs}
    adam = lambda hyper: optax.adam(hyper["lr"])
    ensemble = make(task, len(rates) * count)
    ensemble = task.fit(ensemble, adam, hyper=hyper, decay=0.0, steps=None, **options).ensemble
    found = [of_members(task, ensemble[i : i + count], group) for i in range(0, len(ensemble), count)]
    return min(found, key=lambda fitted: task.validation_loss(fitted.predict))


def copies(task: Task, count: int) -> ee.Ensemble:
    return ee.stack([task.base] * count)


def low_rank(task: Task, count: int, rank: int) -> ee.Ensemble:
    return m.adapters.low_rank(task.base, count, rank=rank, key=task.key)


METHODS: dict[str, Method] = {
    "one member": ft.partial(seeds, count=1),
    **{f"{count} members": ft.partial(seeds, count=count) for count in (2, 3, 5, 8, 16, 32)},
    "one member, stopped early": lambda task: of_members(task, task.stopped, 1),
    "8 members, stopped early": lambda task: of_members(task, task.stopped),
    "one member, overfitted": lambda task: of_members(task, task.overfitted, 1),
    "8 members, overfitted": lambda task: of_members(task, task.overfitted),
    "mean of the weights of 8 members": mean_of_weights,
    "overfitted, temperature": ft.partial(calibrated, method="temperature"),
    "overfitted, vector scaling": ft.partial(calibrated, method="vector"),
    "overfitted, isotonic": ft.partial(calibrated, method="isotonic"),
    "bootstraps": bootstraps,
    "anchors": anchors,
    "prior functions": prior_functions,
    "heads on a trunk": heads_on_a_trunk,
    "distilled": distilled,
    "one member for longer": lambda task: of_members(task, alone(task).ensemble),
    "EMA": lambda task: of_members(task, m.trajectory.average(alone(task, ema))),
    "SWA": lambda task: of_members(task, m.trajectory.average(alone(task, swa))),
    "SWAG": drawn_of_one,
    "multi-SWAG": multi_swag,
    "snapshots": lambda task: of_members(task, m.trajectory.snapshot_ensemble(alone(task, snapshots))),
    "MC dropout": mc_dropout,
    "greedy soup": greedy_soup,
    "SGHMC": ft.partial(post.chains, sampler=post.sghmc),
    "cyclical SGLD": ft.partial(post.chains, sampler=post.cyclical_sgld),
    "Laplace": post.laplace,
    "Laplace of seeds": lambda task: post.laplace(task, task.amount.members),
    "SNGP": post.spectral_gaussian_process,
    "SVGD": post.svgd,
    "BatchEnsemble": ft.partial(joint, kind="batch_ensemble", count=0, long=False),
    "TabM": ft.partial(joint, kind="tabm", count=0, long=False),
    "packed": ft.partial(joint, kind="packed_ensemble", count=4),
    "Masksembles": ft.partial(joint, kind="masksembles", count=4, rows="split"),
    "MIMO": ft.partial(joint, kind="mimo", count=3, rows="shuffle"),
    "evidential": post.evidential,
    "the base": lambda task: of_members(task, ee.stack([task.base])),
    "whole copies": ft.partial(tuned, make=copies),
    "one whole copy": ft.partial(tuned, make=copies, group=1),
    **{f"low_rank, rank {r}": ft.partial(tuned, make=ft.partial(low_rank, rank=r)) for r in (1, 4, 16)},
    "scales": ft.partial(tuned, make=lambda task, count: m.adapters.scales(task.base, count)),
    "bias_only": ft.partial(tuned, make=lambda task, count: m.adapters.bias_only(task.base, count)),
    "layers_only, the last": ft.partial(
        tuned, make=lambda task, count: m.adapters.layers_only(task.base, count, where=lambda model: model.layers[-1])
    ),
    "from scratch": ft.partial(tuned, make=lambda task, count: task.build(count)),
}
