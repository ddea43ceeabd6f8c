# What people type at a prompt: functions without a file, a run that is saved, the call again, and another one.

import os
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import eqx_ensemble as ee

key = jax.random.key(0)
x = jax.random.normal(key, (40, 3))
y = jnp.sin(x[:, 0])
ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 4, 1, key=key), 3, key=key)


def loss(model, batch, key):
    return jnp.mean((jax.vmap(model)(batch[0])[:, 0] - batch[1]) ** 2)


def doubled(model, batch, key):
    return 2 * loss(model, batch, key)


def mistaken(model, batch, key):
    return jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2)


saved = {
    "epochs": 3,
    "batch_size": 8,
    "checkpoint": ee.train.Checkpoint(os.environ["FOLDER"] + "/run.eqx", every=5),
    "key": key,
}
first = ee.fit(ensemble, loss, optax.adam(1e-2), (x, y), **saved)
again = ee.fit(ensemble, loss, optax.adam(1e-2), (x, y), **saved)
print(
    "resumed:", bool((first.history.loss == again.history.loss).all()), again.train_state.step == first.train_state.step
)
try:
    ee.fit(ensemble, doubled, optax.adam(1e-2), (x, y), **saved)
except ValueError as error:
    print("refused:", str(error).replace(os.environ["FOLDER"], "FOLDER").partition("\n")[0])

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    outcome = ee.fit(ensemble, mistaken, optax.adam(1e-2), (x, y), epochs=1, batch_size=8, key=key)

print("warned:", *[str(warning.message).partition(":")[0] for warning in caught])
print("run:", str(outcome).partition("\n")[0].partition(" in ")[0])
print("loss:", float(first.history.loss[:, -1].mean()))
