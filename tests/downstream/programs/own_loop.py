"""A loop, a callback and copies of `forecasts`, which has a hook; the arguments are packages hooked before."""

import contextlib
import copy
import json
import pickle
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax

with jaxtyping.install_import_hook(sys.argv[1:], "beartype.beartype") if sys.argv[1:] else contextlib.nullcontext():
    import eqx_ensemble as ee

    used = ee.build, ee.fit, ee.map_members, ee.predict  # whose modules are imported here
    import forecasts

KEY = jax.random.key(0)
windows, targets = forecasts.make_windows((jnp.asarray(forecasts.make_series(30)) - 20) / 3, 6)
ensemble = ee.build(lambda key: forecasts.Cell(2, key=key), 3, key=KEY)

# Functions of one model or of an ensemble, and a loop, compared with a loop over members.
trained, values = forecasts.train_members(ensemble, optax.adam(1e-2), (windows, targets), steps=3)
optimiser = optax.adam(1e-2)


@eqx.filter_jit
def step(model, state):
    value, gradient = eqx.filter_value_and_grad(forecasts.loss)(model, (windows, targets), None)
    updates, state = optimiser.update(gradient, state)
    return eqx.apply_updates(model, updates), state, value


for member, model, value in zip(trained, ensemble, values, strict=True):
    state = optimiser.init(eqx.filter(model, eqx.is_inexact_array))
    for _ in range(3):
        model, state, last = step(model, state)
    np.testing.assert_allclose(value, last, rtol=1e-5)
    for x, y in zip(jax.tree.leaves(member), jax.tree.leaves(model), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)
alone = [eqx.filter_jit(forecasts.outputs)(model, windows) for model in trained]
np.testing.assert_allclose(forecasts.outputs(trained, windows), alone, rtol=1e-5, atol=1e-6)

# A callback of a class, in a plain `fit`.
callback = forecasts.StopBelow(1e6)
run = ee.fit(ensemble, forecasts.loss, optax.adam(1e-2), (windows, targets), epochs=9, callbacks=callback, key=KEY)

# The ensemble is a field of a Module.
forecaster = forecasts.Forecaster(run.ensemble, jnp.zeros(3), jnp.zeros(()), jnp.ones(()), 6)
for same in (copy.copy(forecaster), copy.deepcopy(forecaster), pickle.loads(pickle.dumps(forecaster))):
    assert isinstance(same.ensemble, ee.Ensemble)
    np.testing.assert_array_equal(same(windows).mean, forecaster(windows).mean)
ee.concatenate([run[:1], pickle.loads(pickle.dumps(run))[1:]])

try:
    forecasts.Forecaster(run.ensemble, jnp.zeros(2), jnp.zeros(()), jnp.ones(()), 6)
    is_checked = False
except jaxtyping.TypeCheckError:
    is_checked = True
print(json.dumps({"checked": is_checked, "stopped": run.status.all().item() and callback.seen[-1] < 1e6}))
