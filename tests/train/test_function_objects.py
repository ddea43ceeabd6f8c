"""Losses, scores and optimisers that are objects: Modules with arrays, their methods, partials, dataclasses."""

import dataclasses
import functools as ft

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
    options = {"steps": 2, "batch_size": 16, "validation": DATA, "mode": "min", "key": KEY, "progress": False}
    for w in (1.0, 3.0):  # another object is another function
        plain, own = (lambda model, batch, key, w=w: weighted(w, model, batch, key)), OBJECTS[kind](w)
        want, got = (ee.fit(ensemble, loss, sgd, DATA, score=loss, **options) for loss in (plain, own))
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
