"""Workers that are processes: of the standard library, and of Dask, also while they are killed."""

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from .test_fit import KEY, SEQUENTIAL, X, Y, assert_equal

pytest.importorskip("cloudpickle", reason="needs the extra `fleet`")
ENSEMBLE = ee.build(lambda key: eqx.nn.MLP(3, 1, 4, 1, key=key), 8, key=KEY)
OPTIMISER = optax.adam(1e-2)
OPTIONS = {"batch_size": 8, "validation": (X[:9], Y[:9]), "patience": 9, "plan": SEQUENTIAL, "key": KEY}


def make_loss(scale):
    """A function that is sent to workers by value: they cannot import this file."""

    def loss(model, batch, key):
        x, y = batch
        return scale * jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)

    return loss


LOSS = make_loss(1.0)
spawn = lambda count: lambda: ProcessPoolExecutor(count, multiprocessing.get_context("spawn"))


@pytest.mark.slow
def test_a_pool_of_processes():
    """With functions that no other process can import."""
    loss = make_loss(2.0)
    expected = ee.fit(ENSEMBLE, loss, OPTIMISER, (X, Y), epochs=3, **OPTIONS)
    found = ee.fleet.fit(spawn(2), ENSEMBLE, loss, OPTIMISER, (X, Y), epochs=3, shard=2, **OPTIONS)
    assert_equal(found, expected)
    ee.concatenate([found.ensemble[[0]], ENSEMBLE[[1]]])  # activations are the same objects
    mixture = lambda predict, *args: predict(*args, ENSEMBLE, X, combine=ee.combine.mean)
    np.testing.assert_allclose(mixture(ee.fleet.predict, spawn(1)), mixture(ee.predict), rtol=1e-5)


@pytest.mark.slow
def test_pools_whose_workers_are_killed(tmp_path):
    """Shards go on from their checkpoints, and the run is that of one process."""
    expected = ee.fit(ENSEMBLE, LOSS, OPTIMISER, (X, Y), epochs=300, **OPTIONS | {"patience": None})
    stop, kills = threading.Event(), []

    def kill():
        while not stop.wait(0.2):
            begun = len(list(tmp_path.glob("*/*")))
            children = [child.pid for child in multiprocessing.active_children() if child.pid]
            if begun > len(kills) and len(kills) < 3 and children:
                os.kill(children[-1], signal.SIGKILL)
                kills.append(children[-1])
                time.sleep(3)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        found = ee.fleet.fit(
            spawn(1), ENSEMBLE, LOSS, OPTIMISER, (X, Y), epochs=300, shard=4, retries=5, checkpoint=tmp_path,
            checkpoint_every=50, **OPTIONS | {"patience": None},
        )  # fmt: skip
    finally:
        stop.set()
        thread.join()
    assert kills
    assert_equal(found, expected)


@pytest.mark.slow
def test_dask_whose_workers_are_killed(tmp_path):
    distributed = pytest.importorskip("distributed", reason="needs the extra `dask`")
    options = OPTIONS | {"patience": None, "epochs": 300}
    expected = ee.fit(ENSEMBLE, LOSS, OPTIMISER, (X, Y), **options)
    stop, kills = threading.Event(), []
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        distributed.Client(cluster) as client,
    ):

        def kill():
            while not stop.wait(0.5):
                pids = [worker["pid"] for worker in client.run(lambda: {"pid": os.getpid()}).values()]
                os.kill(pids[len(kills) % len(pids)], signal.SIGKILL)
                kills.append(pids)
                stop.wait(4)
                if len(kills) == 3:
                    return

        thread = threading.Thread(target=kill)
        thread.start()
        try:
            found = ee.fleet.fit(
                client, ENSEMBLE, LOSS, OPTIMISER, (X, Y), shard=2, checkpoint=tmp_path, checkpoint_every=50, **options
            )
        finally:
            stop.set()
            thread.join()
    assert kills
    assert_equal(found, expected)
