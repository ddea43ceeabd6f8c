"""Trains, saves, prints a digest of the run; run by `test_resume` in a process of its own: `resuming.py [FILE]`."""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import eqx_ensemble as ee
from eqx_ensemble.train._program import digest_of


def loss(model, batch, key):
    x, y = batch
    keep = jax.random.bernoulli(key, 0.8, x.shape)
    return jnp.mean((jax.vmap(model)(jnp.where(keep, x, 0.0))[:, 0] - y) ** 2)


def trainer():
    """A function of the other options of `fit`, whose calls share their compiled programs."""
    key = jax.random.key(0)
    x = jax.random.normal(key, (203, 3))
    data = x, jnp.sin(x[:, 0])
    ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 16, 2, key=key), 5, key=key)
    optimiser = optax.adam(optax.cosine_decay_schedule(1e-2, 1100))
    return lambda **options: ee.fit(ensemble, loss, optimiser, data, validation=data, patience=150, key=key, **options)


def digest(run):
    """A digest of everything that a run ends with: weights, optimiser state, best weights, history."""
    history = run.history.loss, run.history.validation
    return digest_of((run.ensemble.stacked, run.train_state, history))


if __name__ == "__main__":
    saving = {"checkpoint": ee.train.Checkpoint(sys.argv[1], every=20)} if len(sys.argv) > 1 else {}
    print(digest(trainer()(epochs=150, **saving)))
