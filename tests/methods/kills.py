"""Calls of methods that are saved, to be killed; also a script.

`kills.py METHOD FOLDER` finishes the call of a method, and prints a digest of all that it returns.
"""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqx_ensemble as ee
from eqx_ensemble.train import Checkpoint
from eqx_ensemble.train._texts import digest_of
from eqx_ensemble.train.host._loop import Executor

KEY = jax.random.key(0)
MEMBERS = 6
RANGES = {"lr": ee.sweep.LogUniform(1e-3, 1e-1)}
X = jax.random.normal(KEY, (43, 3))
DATA = X, jnp.sin(X[:, 0])
OPTIONS = {"validation": DATA, "batch_size": 8, "progress": False, "key": KEY}


def make(key):
    return eqx.nn.MLP(3, 1, 8, 1, key=key)


def loss(model, batch, key):
    x, y = batch
    keep = jax.random.bernoulli(key, 0.8, x.shape)  # so that a stream that started again would be seen
    return jnp.mean((jax.vmap(model)(jnp.where(keep, x, 0.0))[:, 0] - y) ** 2)


def doubled(model, batch, key):
    return 2 * loss(model, batch, key)


def optimiser(hyper):
    return optax.adam(hyper["lr"])


EXPLORE = ee.methods.population.perturb_hyper(RANGES)
ENSEMBLE = ee.build(make, MEMBERS, key=KEY)
HYPER = ee.sweep.draw(RANGES, MEMBERS, key=KEY)
FOLDS = ee.resample.folds(len(X), 3, key=KEY)


def pbt(**options):
    own = {"hyper": HYPER, "rounds": 4, "steps": 5, "fraction": 0.34, "explore": EXPLORE} | OPTIONS
    return ee.methods.population_based_training(ENSEMBLE, loss, optimiser, DATA, **(own | options))


def halving(**options):
    own = {"hyper": HYPER, "steps": 5, "factor": 2} | OPTIONS
    return ee.methods.successive_halving(ENSEMBLE, loss, optimiser, DATA, **(own | options))


def hyperband(**options):
    own = {"epochs": 4, "factor": 2} | OPTIONS
    return ee.methods.hyperband(make, RANGES, loss, optimiser, DATA, **(own | options))


def cross_fit(**options):
    own = {"x": X, "steps": 15, "hyper": HYPER} | OPTIONS
    return ee.methods.cross_fit(ENSEMBLE, loss, optimiser, DATA, FOLDS, **(own | options))


METHODS = {"pbt": pbt, "halving": halving, "hyperband": hyperband, "cross_fit": cross_fit}


def parts(result):
    """Everything that must be the same in two results: all but durations."""
    runs = result if isinstance(result, list) else [result if isinstance(result, ee.Run) else result.run]
    found = [
        (run.ensemble.stacked, run.train_state, run.selection, run.history, run.status, run.stopped_at, run.best_step)
        + (run.best_score, run.rows, {name: x for name, x in run.table().items() if np.asarray(x).dtype.kind != "U"})
        for run in runs
    ]
    if isinstance(result, ee.methods.Population):
        return found, result.scores, result.lineage, result.hyper
    return (found, result.held_out) if isinstance(result, ee.methods.CrossFit) else found


def digest(result):
    return digest_of(parts(result))


class Killed(BaseException):
    """Ends a call as SIGKILL does: nothing that handles errors sees it."""


class KilledAtCall:
    """Within `with`: the process ends before a compiled call of `fit`, counted from zero."""

    def __init__(self, stop):
        self.stop = stop

    def __enter__(self):
        self.true, left = Executor.call, [self.stop]

        def call(executor, work):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return self.true(executor, work)

        Executor.call = call

    def __exit__(self, *_):
        Executor.call = self.true


if __name__ == "__main__":
    print(digest(METHODS[sys.argv[1]](checkpoint=Checkpoint(sys.argv[2], every=2))), flush=True)
