"""One switch of JAX that people turn on when they look for a fault: the numbers are those without it."""

import contextlib
import json
import sys
import warnings

import equinox as eqx
import forecasts
import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqx_ensemble as ee

SWITCHES = {
    "jax_debug_nans": True,
    "jax_debug_infs": True,
    "jax_disable_jit": True,
    "jax_check_tracer_leaks": True,
    "jax_enable_checks": True,
    "jax_debug_key_reuse": True,
    "jax_numpy_rank_promotion": "raise",
    "jax_explain_cache_misses": True,
    "jax_traceback_filtering": "off",
    "jax_legacy_prng_key": "error",
}


@contextlib.contextmanager
def turned_on(switch):
    before = getattr(jax.config, switch)
    jax.config.update(switch, SWITCHES[switch])
    try:
        yield
    finally:
        jax.config.update(switch, before)


def diverging(model, batch, key):
    windows, targets = batch
    value = forecasts.loss(model, (windows, targets), key)
    return jnp.where(model.start[0] == 1.0, jnp.nan, value)


def numbers():
    series = jnp.asarray(forecasts.make_series(40))
    windows, targets = forecasts.make_windows((series - 20) / 3, 6)
    ensemble = ee.build(lambda key: forecasts.Cell(4, key=key), 3, key=jax.random.key(0))
    ensemble = eqx.tree_at(lambda tree: tree.stacked.start, ensemble, ensemble.stacked.start.at[1].set(1.0))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*diverged")
        run = ee.fit(
            ensemble, diverging, optax.adam(1e-2), (windows, targets), epochs=2, batch_size=16,
            validation=(windows[:16], targets[:16]), key=jax.random.key(1),
        )  # fmt: skip
        prediction = run.predict(windows, combine=ee.combine.moments)
    step = ee.train.make_step(forecasts.loss, optax.adam(1e-2))
    state = ee.train.init(ensemble, optax.adam(1e-2), key=jax.random.key(2))
    for _ in range(2):
        state, metrics = step(state, (windows, targets))
    out = {
        "status": run.status,
        "weights": run.ensemble.stacked.head.weight,
        "prediction": prediction,
        "called": run.ensemble(windows[0]),
        "mapped": ee.map_members(lambda model: jnp.sum(model.gru.weight_hh))(ensemble),
        "score": ee.scores.crps(ee.predict(ensemble, windows)[..., 0], targets),
        "losses": metrics.loss,
    }
    return jax.tree.map(np.asarray, out)


plain, differences = numbers(), {}
for switch in sys.argv[1:]:
    jax.clear_caches()
    with turned_on(switch):
        leaves = zip(jax.tree.leaves(plain), jax.tree.leaves(numbers()), strict=True)
    differences[switch] = max(float(np.max(np.abs(x - y), initial=0)) for x, y in leaves)
print(json.dumps(differences))
