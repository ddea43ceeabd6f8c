"""Spawned workers train, and send back what they trained; the parent trains the same."""

import concurrent.futures
import multiprocessing

import forecasts
import jax
import jax.numpy as jnp
import numpy as np

import eqx_ensemble as ee


def work(seed):
    series = jnp.asarray(forecasts.make_series(60, seed=seed))
    return forecasts.train(series, key=jax.random.key(seed))


def predict(forecaster, series):
    windows, _ = forecasts.make_windows(series, forecaster.num_steps)
    return np.asarray(forecaster(windows).mean), np.asarray(ee.predict(forecaster.ensemble, windows))


def go_on(run, series):
    windows, targets = forecasts.make_windows(series, 6)
    data = {"epochs": 1, "validation": (windows[:8], targets[:8]), "key": jax.random.key(5)}
    return ee.fit(run, forecasts.loss, forecasts.make_optimiser, (windows, targets), **data)


def as_bits(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def assert_same(first, second):
    ours, theirs = ([x for x in jax.tree.leaves(tree) if hasattr(x, "dtype")] for tree in (first, second))
    assert len(ours) > 10
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(as_bits(x), as_bits(y))


def main():
    series = jnp.asarray(forecasts.make_series(60))
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        trained = list(pool.map(work, [0, 1]))
        predicted = pool.submit(predict, trained[0][0], series)
        continued = pool.submit(go_on, trained[0][1], series)
        alone = [work(0), work(1)]
        assert_same(trained, alone)
        for first, second in zip(predicted.result(), predict(alone[0][0], series), strict=True):
            np.testing.assert_array_equal(first, second)
        assert_same(continued.result(), go_on(alone[0][1], series))
    print("workers: equal")


if __name__ == "__main__":
    main()
