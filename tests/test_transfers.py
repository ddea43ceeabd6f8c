"""Calls run under `jax.transfer_guard`: what they transfer is explicit, except for the batches of a step."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

KEY = jax.random.key(0)
SGD = optax.sgd(0.1)
X, Y = np.ones((8, 2), np.float32), np.zeros((8, 1), np.float32)


def make(key):
    return eqx.nn.Linear(2, 1, key=key)


def mse(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def test_calls_transfer_explicitly():
    data, rows, step = jax.device_put((X, Y)), np.zeros((3, 8), np.int32), ee.train.make_step(mse, SGD)
    with jax.transfer_guard("disallow"):
        ensemble = ee.build(make, 3, key=KEY)
        ensemble(ee.Batch(data[0]))
        run = ee.fit(ensemble, mse, SGD, (X, Y), steps=3, batch_size=4, rows=rows, key=KEY)
        for x, y in (data, (X, Y)):
            prediction = run.predict(x, batch_size=3)
            ee.scores.rmse(prediction, y)
        state, _ = step(ee.train.init(ensemble, SGD, key=KEY), data)
        assert state[:2].num_members == len(list(ensemble)) - 1
        with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
            step(state, (X, Y))
    with jax.transfer_guard("disallow_explicit"), pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        ee.predict(ensemble, X, batch_size=3)


def test_the_guard_is_back_after_a_call_and_its_error():
    with jax.transfer_guard("disallow"):
        with pytest.raises(ValueError, match="num_members"):
            ee.build(make, 0, key=KEY)
        ee.build(make, 3, key=KEY)
        with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
            jnp.asarray(X)
