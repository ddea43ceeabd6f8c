"""Threads that train, predict and call compiled functions at the same time, and each alone: equal bit for bit."""

import concurrent.futures
import threading
import warnings

import equinox as eqx
import forecasts
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqx_ensemble as ee

THREADS = 4
STEP = ee.train.make_step(forecasts.loss, optax.adam(1e-2))  # of all threads


def power_sum(power):
    return lambda model: jnp.sum(model.head.weight**power)


def work(seed):
    """Everything that keeps compiled programs, each with functions of this thread."""
    series = jnp.asarray(forecasts.make_series(40 + 10 * (seed % 2), seed=seed))
    forecaster, run = forecasts.train(series, key=jax.random.key(seed), epochs=2)
    windows, targets = forecasts.make_windows(series, forecaster.num_steps)
    outcomes = [run.ensemble, run.history, run.status, forecasts.fine_tune(forecaster, series)]
    for count in (1, 3, 7, len(windows)):
        outcomes.append(ee.predict(run.ensemble, windows[:count]))
    outcomes.append(ee.predict(run.ensemble, windows, combine=ee.combine.mean, batch_size=16))
    for power in range(12):  # a function of its own each time: more than are kept
        outcomes.append(ee.map_members(power_sum(power))(run.ensemble))
    state = ee.train.init(run.ensemble, optax.adam(1e-2), key=jax.random.key(seed))
    for _ in range(5):
        state, metrics = STEP(state, (windows, targets))
    outcomes += [state.ensemble, metrics.loss]
    return [np.asarray(x) for x in jax.tree.leaves(eqx.filter(outcomes, eqx.is_inexact_array))]


def together(barrier, seed):
    barrier.wait()
    return work(seed)


def main():
    before = list(warnings.filters)
    work(0)
    assert list(warnings.filters) == before
    barrier = threading.Barrier(THREADS)
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        found = [future.result() for future in [pool.submit(together, barrier, seed) for seed in range(THREADS)]]
    for seed in range(THREADS):
        alone = work(seed)
        assert len(alone) == len(found[seed])
        for first, second in zip(found[seed], alone, strict=True):
            np.testing.assert_array_equal(first, second)
    print("threads: equal")


if __name__ == "__main__":
    main()
