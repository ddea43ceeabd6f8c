"""Losses, scores and optimisers that are objects: Modules with arrays, their methods, partials, dataclasses."""

import dataclasses
import functools as ft
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
DATA = X, np.sin(X[:, :1])


def weighted(w, model, batch, key):
    return jnp.mean(w * (jax.vmap(model)(batch[0]) - batch[1]) ** 2)


class Module(eqx.Module):
    w: jax.Array

    def __call__(self, model, batch, key):
        return weighted(self.w, model, batch, key)

    def method(self, model, batch, key):
        return weighted(self.w, model, batch, key)


@dataclasses.dataclass
class Data:
    w: float

    def __call__(self, model, batch, key):
        return weighted(self.w, model, batch, key)


OBJECTS = {
    "Module": lambda w: Module(jnp.float32(w)),
    "method": lambda w: Module(jnp.float32(w)).method,
    "dataclass": Data,
    "equinox.Partial": lambda w: eqx.Partial(weighted, jnp.float32(w)),
    "functools.partial": lambda w: ft.partial(weighted, jnp.float32(w)),
    "filter_jit": lambda w: eqx.filter_jit(Module(jnp.float32(w))),
}


@pytest.mark.parametrize("kind", [*OBJECTS])
def test_train_and_score_like_a_function(kind):
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 2, key=KEY)
    sgd = optax.sgd(0.1)
    options = {"steps": 2, "batch_size": 16, "key": KEY, "progress": False}
    for w in (1.0, 3.0):  # another object is another function
        plain, own = (lambda model, batch, key, w=w: weighted(w, model, batch, key)), OBJECTS[kind](w)
        scored = lambda loss: {"validation": ee.train.Validation(DATA, score=loss, mode="min")}
        want, got = (ee.fit(ensemble, loss, sgd, DATA, **options, **scored(loss)) for loss in (plain, own))
        np.testing.assert_allclose(got.history.loss, want.history.loss, rtol=1e-6)
        np.testing.assert_allclose(got.best_score, want.best_score, rtol=1e-6)
        _, metrics = ee.train.make_step(own, sgd)(ee.train.init(ensemble, sgd, key=KEY), DATA)
        np.testing.assert_allclose(metrics.loss, want.history.loss[:, 0], rtol=1e-6)


def test_an_optimiser_function_with_arrays():
    class Scaled(eqx.Module):
        scale: jax.Array

        def __call__(self, hyper):
            return optax.sgd(hyper["lr"] * self.scale)

    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 2, key=KEY)
    run = ft.partial(ee.fit, steps=2, hyper={"lr": np.float32([0.1, 0.2])}, key=KEY, progress=False)
    for scale in (1.0, 0.5):
        want = run(ensemble, Data(1.0), lambda h, scale=scale: optax.sgd(h["lr"] * scale), DATA)
        got = run(ensemble, Data(1.0), Scaled(jnp.float32(scale)), DATA)
        np.testing.assert_allclose(got.history.loss, want.history.loss, rtol=1e-6)


class Caller(eqx.Module):
    """A function with an array."""

    fn: Callable = eqx.field(static=True)
    array: jax.Array = dataclasses.field(default_factory=lambda: jnp.ones(2))

    def __call__(self, *args, **options):
        return self.fn(*args, **options)


@dataclasses.dataclass
class DataCaller:
    fn: Callable

    def __call__(self, *args, **options):
        return self.fn(*args, **options)


ENSEMBLE = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 2, key=KEY)
SGD, HYPER = optax.sgd(0.1), {"lr": np.float32([0.1, 0.2])}
mse = lambda model, x, y: jnp.mean((jax.vmap(model)(x) - y) ** 2)
loss = lambda model, batch, key: mse(model, *batch)
rate = lambda hyper: optax.sgd(hyper["lr"])
state = lambda optimiser=SGD, **options: ee.train.init(ENSEMBLE, optimiser, key=KEY, **options)
particles = ft.partial(ee.methods.particles.make_step, num_rows=16)

PLACES = {
    "build": (lambda key: eqx.nn.Linear(3, 1, key=key), lambda fn: ee.build(fn, 2, key=KEY).stacked.weight),
    "trainable": (
        lambda leaf: eqx.is_inexact_array(leaf) and leaf.ndim == 2,
        lambda fn: ee.train.init(ENSEMBLE, SGD, trainable=fn, key=KEY).params,
    ),
    "init": (rate, lambda fn: state(fn, hyper=HYPER).opt_state),
    "particles": (loss, lambda fn: particles(fn, SGD)(state(), DATA)[1].loss),
    "particles' optimiser": (rate, lambda fn: particles(loss, fn)(state(fn, hyper=HYPER), DATA)[1].loss),
    "kernel": (
        lambda x, y: jnp.exp(-jnp.sum((x - y) ** 2)),
        lambda fn: particles(loss, SGD, kernel=fn)(state(), DATA)[0].params.weight,
    ),
    "svgd": (
        lambda x, y: jnp.exp(-jnp.sum((x - y) ** 2)),
        lambda fn: ee.methods.particles.svgd(jnp.eye(2, 3), jnp.ones((2, 3)), kernel=fn),
    ),
    "scan_steps": (lambda x, y: (x + y, x), lambda fn: ee.train.scan_steps(fn, jnp.zeros(()), jnp.arange(3.0))),
    "map_members": (mse, lambda fn: ee.map_members(fn, plan=ee.plan.Sequential())(ENSEMBLE, *DATA)),
    "predict": (lambda model, x: 2 * model(x), lambda fn: ee.predict(ENSEMBLE, X, fn=fn, batch_size=8)),
    "combine": (lambda values: values[0], lambda fn: ee.predict(ENSEMBLE, X, combine=fn)),
}


@pytest.mark.parametrize("place", [*PLACES])
def test_stand_wherever_a_function_does(place):
    fn, call = PLACES[place]
    want = jax.tree.leaves(call(fn))
    for kind in (Caller, DataCaller):
        for x, y in zip(jax.tree.leaves(call(kind(fn))), want, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6)


def test_a_model_is_no_maker():
    for model in (eqx.nn.Linear(3, 1, key=KEY), eqx.nn.LayerNorm(2)):
        with pytest.raises(TypeError, match="from a key, got a model"):
            ee.build(model, 2, key=KEY)
