# What people type at a prompt: functions without a file, a run that is saved, the call again, and another one.

import os

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


saved = {
    "epochs": 3,
    "batch_size": 8,
    "checkpoint": ee.train.Checkpoint(os.environ["FOLDER"] + "/run.eqx", every=1),
    "key": key,
}
first = ee.fit(ensemble, loss, optax.adam(1e-2), (x, y), **saved)
again = ee.fit(ensemble, loss, optax.adam(1e-2), (x, y), **saved)
print(
    "resumed:",
    bool((first.history.loss == again.history.loss).all()),
    bool((again.train_state.step == first.train_state.step).all()),
)
try:
    ee.fit(ensemble, doubled, optax.adam(1e-2), (x, y), **saved)
except ValueError as error:
    print("refused:", str(error).replace(os.environ["FOLDER"], "FOLDER").partition("\n")[0])

print("run:", str(first).partition("\n")[0])
print("loss:", float(first.history.loss[:, -1].mean()))
