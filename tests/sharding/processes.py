"""What one or two processes on four devices compute; run by `test_processes`.

`processes.py MODE FOLDER` leaves its results in `FOLDER/results.npz`. The environment has the number of the process.
"""

import itertools
import os
import pathlib
import signal
import sys
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import eqx_ensemble as ee
from eqx_ensemble.train.host._saver import Saver

KEY = jax.random.key
MESHES = {"4x1": {"members": 4}, "2x2": {"members": 2, "data": 2}, "1x4": {"members": 1, "data": 4}}
X = np.random.default_rng(0).normal(size=(36, 3)).astype(np.float32)
Y = np.sin(X[:, :1])


def make(key):
    return eqx.nn.MLP(3, 1, 8, 1, key=key)


def loss(model, batch, key):
    x, y = batch
    x = jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0)
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


ADAM = optax.adam(1e-2)


def fitted(mesh, num_members=8, data=(X, Y), optimiser=ADAM, **options):
    options = {"epochs": 3, "batch_size": 8, "validation": (X[:8], Y[:8]), "patience": 2, "progress": False} | options
    options = {name: value for name, value in options.items() if value is not None}
    ensemble = ee.build(make, num_members, mesh=mesh, key=KEY(0))
    return ee.fit(ensemble, loss, optimiser, data, mesh=mesh, key=KEY(1), **options)


def numbers(run):
    """All that a run is, on every process."""
    tree = eqx.filter((run.ensemble, run.train_state, run.selection), eqx.is_array)
    leaves = jax.tree_util.tree_leaves_with_path(ee.distributed.to_host(tree))
    named = {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}
    return named | {"loss": run.history.loss, "stopped_at": run.stopped_at, "status": run.status}


def everything(folder):
    found = {}
    for name, shape in MESHES.items():
        mesh = ee.make_mesh(**shape)
        for num_members in (5, 8):
            run = fitted(mesh, num_members)
            found |= {f"{name} {num_members} {key}": value for key, value in numbers(run).items()}
            prediction = ee.predict(run.ensemble, X, mesh=mesh, batch_size=16)
            found[f"{name} {num_members} prediction"] = ee.distributed.to_host(prediction)
    found |= streamed()
    for name, part in {
        "spoilt": spoilt,
        "population": population,
        "other": other_data,
        "files": lambda: files(folder),
    }.items():
        found |= {f"{name} {key}": value for key, value in part().items()}
    saved(folder, found)


def eight(folder):
    """On eight devices as on one: SGD, because Adam hides wrong gradients."""
    assert jax.device_count() == 8
    found, sgd = {}, optax.sgd(0.1)
    for num_members in (3, 5, 8):
        one = numbers(fitted(None, num_members, optimiser=sgd))
        for shape in ({}, {"members": 4, "data": 2}):
            got = numbers(fitted(ee.make_mesh(**shape), num_members, optimiser=sgd))
            found |= {f"{shape} {num_members} {name}": x for name, x in got.items()}
            for name, x in got.items():
                if x.dtype.kind == "f":
                    np.testing.assert_allclose(x, one[name], rtol=1e-4, atol=1e-6, err_msg=name)
                else:
                    np.testing.assert_array_equal(x, one[name], err_msg=name)
    saved(folder, found)


def streamed():
    """Each process provides the rows that its devices need."""
    mesh = ee.make_mesh(data=2)
    assert len({device.process_index for device in mesh.devices[0]}) == 1, "rows are shared inside a process"
    across = jax.sharding.Mesh(mesh.devices.T, mesh.axis_names, axis_types=mesh.axis_types)
    size, split = 12 // jax.process_count(), NamedSharding(across, PartitionSpec("data"))
    own = lambda x, i: x[i : i + 12][jax.process_index() * size :][:size]
    rows = lambda x, i: jax.make_array_from_process_local_data(split, own(x, i), (12, *x.shape[1:]))
    batches = [(rows(X, i), rows(Y, i)) for i in range(0, 36, 12)]
    run = fitted(across, 4, batches, batch_size=None, validation=None, patience=None)
    return {f"streamed {key}": value for key, value in numbers(run).items()}


def spoilt():
    """A member diverges, others stop, and the arrays get smaller: all processes do the same."""
    hyper = {"spoil": np.array([0, 0, np.nan, 0, 0, 0, 0, 0], np.float32)}
    mesh = ee.make_mesh()
    fails = lambda model, batch, key, hyper: loss(model, batch, key) + hyper["spoil"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = ee.fit(
            ee.build(make, 8, mesh=mesh, key=KEY(0)),
            fails,
            optax.adam(1e-2),
            (X, Y),
            hyper=hyper,
            epochs=8,
            stop=ee.train.Stopping(steps=[2, 2, 9, 2, 99, 99, 2, 99], seconds=1e3),
            batch_size=6,
            mesh=mesh,
            key=KEY(1),
            progress=False,
        )
    return numbers(run)


def other_data():
    """If processes read different files, all of them raise an error."""
    if jax.process_count() > 1:
        with pytest.raises(ValueError, match="Processes passed different numbers"):
            fitted(ee.make_mesh(), 4, (X + jax.process_index(), Y))
    return {}


def population():
    """The worst become copies of the best, wherever these are."""
    mesh = ee.make_mesh()
    found = ee.methods.population_based_training(
        ee.build(make, 8, mesh=mesh, key=KEY(0)), loss, lambda h: optax.sgd(h["rate"]), (X, Y), mesh=mesh, rounds=3,
        hyper={"rate": np.geomspace(1e-3, 0.3, 8, dtype=np.float32)}, validation=(X, Y), epochs=1, key=KEY(1),
        progress=False,
    )  # fmt: skip
    return numbers(found.run) | {"lineage": found.lineage, "rates": found.hyper["rate"]}


def files(folder):
    """An ensemble is saved by all processes, and loaded onto another mesh."""
    ensemble = ee.build(make, 8, mesh=ee.make_mesh(), key=KEY(0))
    ee.save(folder / "ensemble.eqx", ensemble)
    loaded = ee.load(folder / "ensemble.eqx", ee.build(make, 8, mesh=ee.make_mesh(data=2), key=KEY(1)))
    arrays = ee.distributed.to_host(eqx.filter(loaded, eqx.is_array))
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(arrays)}


def training(folder, *, dies=False, epochs=6):
    """A run with checkpoints; process 1 is killed within it on request."""
    if dies:
        save, saves = Saver.save, itertools.count()

        def save_or_die(self, *args, **options):
            if next(saves) == 2 and jax.process_index() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            save(self, *args, **options)

        Saver.save = save_or_die
    shape = {"members": 2, "data": 2} if jax.device_count() == 4 else {}
    mesh = ee.make_mesh(**shape)
    run = fitted(mesh, 4, epochs=epochs, checkpoint=ee.train.Checkpoint(folder / "run.eqx", every=4), patience=None)
    saved(folder, numbers(run))


def called(folder):
    """The first process's callbacks decide for all, also when those of another one raise an error."""
    rank, mesh, seen = jax.process_index(), ee.make_mesh(), []

    def answer(progress):
        seen.append(numbers_of(progress))
        if progress.step < 6:
            return np.arange(8) == (progress.step if rank == 0 else 7)  # members 2 and 4
        return rank == 0

    run = fitted(mesh, callbacks=ee.train.every(2, answer))
    assert run.interrupted
    assert int(run.train_state.step) == 6
    found = {f"{i} {name}": x for i, part in enumerate(seen) for name, x in part.items()} | numbers(run)
    if jax.process_count() > 1:

        def fails(progress):
            if rank == 1 and progress.step >= 5:
                raise KeyError("only here")

        options = {"checkpoint": folder / "run.eqx", "patience": None}
        error, message = (KeyError, "only here") if rank == 1 else (RuntimeError, "on process 1, which shows it")
        with pytest.raises(error, match=message):
            fitted(mesh, **options, callbacks=ee.train.every(5, fails))
        assert ee.contents(folder / "run.eqx").meta["fit"]["step"] == 5
        again, whole = numbers(fitted(mesh, **options)), numbers(fitted(mesh, patience=None))
        for name, x in again.items():
            np.testing.assert_array_equal(x, whole[name], err_msg=name)
    saved(folder, found)


def numbers_of(progress):
    """All that a callback sees, but for the time."""
    arrays = {name: getattr(progress, name) for name in ("ids", "status", "loss", "score")}
    state = jax.tree_util.tree_leaves_with_path(eqx.filter(progress.train_state, eqx.is_array))
    weights = {jax.tree_util.keystr(path): ee.distributed.to_host(x) for path, x in state}
    return {name: x for name, x in arrays.items() if x is not None} | {"new": progress.history.loss} | weights


def saved(folder, found):
    if ee.distributed.is_first():
        np.savez(folder / "results.npz", **found)


if __name__ == "__main__":
    # Bits are compared between one process and two, which are compiled in the same way.
    jax.config.update("jax_num_cpu_devices", int(os.environ["DEVICES"]))
    if (count := int(os.environ["COUNT"])) > 1:
        jax.distributed.initialize(
            num_processes=count,
            process_id=int(os.environ["RANK"]),
            cluster_detection_method="deactivate",
            heartbeat_timeout_seconds=10,
        )
    modes = {
        "everything": everything,
        "eight": eight,
        "called": called,
        "training": training,
        "dying": lambda folder: training(folder, dies=True),
    }
    modes[sys.argv[1]](pathlib.Path(sys.argv[2]))
    print("done")
