"""Cross-fitting and sweeps over workers are those of one process."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqx_ensemble as ee

from .executors import Here

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (22, 3))
DATA = X, jnp.sin(X[:, 0])
SEQUENTIAL = ee.plan.Sequential()


def mse(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)


def make(key):
    return eqx.nn.MLP(3, 1, 4, 1, key=key)


def test_cross_fitting():
    folds = ee.resample.folds(len(X), 4, key=KEY)  # of 5 and 6 rows
    ensemble, optimiser = ee.build(make, 4, key=KEY), optax.adam(1e-2)
    options = {"epochs": 2, "batch_size": 8, "plan": SEQUENTIAL, "key": KEY}
    expected = ee.methods.cross_fit(ensemble, mse, optimiser, DATA, folds, x=X, **options)
    run = ee.fleet.fit(Here(), ensemble, mse, optimiser, DATA, rows=folds.train, shard=2, **options)
    held_out = run.out_of_fold(X, folds)
    np.testing.assert_array_equal(held_out.mean, expected.held_out.mean)
    np.testing.assert_array_equal(held_out.num_members, expected.held_out.num_members)


def test_a_sweep():
    hyper = ee.sweep.grid({"lr": jnp.array([1e-3, 1e-2, 1e-1]), "decay": jnp.array([0.0, 0.1])})
    optimiser = lambda hyper: optax.adamw(hyper["lr"], weight_decay=hyper["decay"])
    options = {"hyper": hyper, "epochs": 2, "validation": DATA, "plan": SEQUENTIAL, "key": KEY}
    ensemble = ee.build(make, 6, key=KEY)
    expected = ee.fit(ensemble, mse, optimiser, DATA, **options)
    run = ee.fleet.fit(Here(), ensemble, mse, optimiser, DATA, shard=2, **options)
    assert run.best(3).ids.tolist() == expected.best(3).ids.tolist()
    np.testing.assert_array_equal(run.best_score, expected.best_score)
