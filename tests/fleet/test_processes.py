"""Workers that are processes: of the standard library, and of Dask, also while they are killed."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from .killing import kill_waiting, make_held_loss
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
    """The shard that a death broke goes on from its checkpoint, and the run is that of one process."""
    loss, options = make_held_loss(tmp_path, steps=120), OPTIONS | {"patience": None, "epochs": 60}
    with kill_waiting(tmp_path, times=3) as killed:
        found = ee.fleet.fit(
            spawn(1),
            ENSEMBLE,
            loss,
            OPTIMISER,
            (X, Y),
            shard=4,
            retries=3,
            checkpoint=ee.checkpoint.Checkpoints(tmp_path / "runs", every=25),
            **options,
        )
    assert len(set(killed)) == 3
    assert_equal(found, ee.fit(ENSEMBLE, loss, OPTIMISER, (X, Y), **options))


@pytest.mark.slow
def test_readers_of_files_on_workers_that_are_killed(tmp_path):
    """Each worker opens the files itself, and a shard goes on at its batch."""
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", Y)
    paths = str(tmp_path / "x.npy"), str(tmp_path / "y.npy")
    read = lambda ids: ee.train.RowReader(tuple(np.load(path, mmap_mode="r") for path in paths))
    loss, options = make_held_loss(tmp_path, steps=120), OPTIONS | {"patience": None, "epochs": 30}
    with kill_waiting(tmp_path, times=2) as killed:
        found = ee.fleet.fit(
            spawn(1),
            ENSEMBLE,
            loss,
            OPTIMISER,
            read,
            shard=4,
            retries=3,
            checkpoint=ee.checkpoint.Checkpoints(tmp_path / "runs", every=25),
            **options,
        )
    assert len(set(killed)) == 2
    assert_equal(found, ee.fit(ENSEMBLE, loss, OPTIMISER, ee.train.RowReader((X, Y)), **options))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dask has had no workers for 60 seconds")  # on a busy machine
def test_dask_whose_workers_are_killed_ten_times(tmp_path):
    """Dask repeats a shard three times by itself, and `retries` twice more: no shard can be lost by ten deaths."""
    distributed = pytest.importorskip("distributed", reason="needs the extra `dask`")
    loss, options = make_held_loss(tmp_path, steps=120), OPTIONS | {"patience": None, "epochs": 60}
    # Dask never replaces a worker that dies before its nanny has noted its start.
    ready = lambda: all(nanny.status == distributed.core.Status.running for nanny in cluster.workers.values())
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        distributed.Client(cluster) as client,
        kill_waiting(tmp_path, times=10, ready=ready) as killed,
    ):
        found = ee.fleet.fit(
            client,
            ENSEMBLE,
            loss,
            OPTIMISER,
            (X, Y),
            shard=2,
            checkpoint=ee.checkpoint.Checkpoints(tmp_path / "runs", every=25),
            **options,
        )
    assert len(set(killed)) == 10
    assert_equal(found, ee.fit(ENSEMBLE, loss, OPTIMISER, (X, Y), **options))
