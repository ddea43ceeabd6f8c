"""What one or two processes on four devices compute; run by `test_processes`.

`processes.py MODE FOLDER` leaves its results in `FOLDER/results.npz`. The environment has the number of the process.
"""

import os
import pathlib
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqx_ensemble as ee

KEY = jax.random.key
X = np.random.default_rng(0).normal(size=(36, 3)).astype(np.float32)
Y = np.sin(X[:, :1])


def make(key):
    return eqx.nn.MLP(3, 1, 8, 1, key=key)


def loss(model, batch, key):
    x, y = batch
    x = jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0)
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def fitted(mesh, num_members, **options):
    options = {"epochs": 4, "batch_size": 8, "validation": (X[:8], Y[:8]), "progress": False} | options
    ensemble = ee.build(make, num_members, mesh=mesh, key=KEY(0))
    return ee.fit(ensemble, loss, optax.sgd(0.1), (X, Y), mesh=mesh, key=KEY(1), **options)


def numbers(run, mesh):
    """All that a run is, on every process."""
    prediction = ee.predict(run.ensemble, X, mesh=mesh, batch_size=16)
    tree = eqx.filter((run.ensemble, run.train_state, prediction), eqx.is_inexact_array)
    leaves = jax.tree_util.tree_leaves_with_path(ee.distributed.to_host(tree))
    named = {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}
    return named | {"history": run.history.loss, "stopped": run.stopped_at, "status": run.status}


def everything(folder):
    """Members spread, rows split, an uneven number, some that stop."""
    found = {}
    for shape in ({"members": 4}, {"members": 2, "data": 2}):
        mesh = ee.make_mesh(**shape)
        run = fitted(mesh, 5, patience=2, stop=ee.train.Stopping(steps=[5, 99, 10, 99, 5]))
        found |= {f"{shape} {name}": x for name, x in numbers(run, mesh).items()}
    return found


def resumed(folder):
    """A run in two calls, by its checkpoint; the first may have been made by other processes."""
    mesh = ee.make_mesh()
    if not (folder / "run.eqx").exists():
        fitted(mesh, 5, epochs=2, checkpoint=folder / "run.eqx")
    return numbers(fitted(mesh, 5, checkpoint=folder / "run.eqx"), mesh)


def whole(folder):
    mesh = ee.make_mesh()
    return numbers(fitted(mesh, 5), mesh)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", int(os.environ["DEVICES"]))
    if (count := int(os.environ["COUNT"])) > 1:
        jax.distributed.initialize(
            num_processes=count, process_id=int(os.environ["RANK"]), cluster_detection_method="deactivate"
        )
    folder = pathlib.Path(sys.argv[2])
    found = {"everything": everything, "resumed": resumed, "whole": whole}[sys.argv[1]](folder)
    if ee.distributed.is_first():
        np.savez(folder / "results.npz", **found)
    print("done")
