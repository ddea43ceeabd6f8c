"""What the first call of `fit` traces and compiles."""

import os
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

KEY = jax.random.key(0)
ENSEMBLE = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 2, key=KEY)
# Once for a warning, and once for each shape of a batch and of the validation.
CASES = {"even": (24, False, 2), "smaller last batch": (27, False, 3), "validation": (24, True, 3)}


@pytest.mark.parametrize("case", CASES)
def test_how_often_a_step_is_traced(case):
    num_rows, validates, expected = CASES[case]
    traced = []

    def loss(model, batch, key):
        traced.append(batch[0].shape)
        return jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2)

    rows = np.random.default_rng(0).normal(size=(num_rows, 4)).astype(np.float32)
    data = rows[:, :3], rows[:, 3:]
    validation = {"validation": (rows[:7, :3], rows[:7, 3:])} if validates else {}
    ee.fit(ENSEMBLE, loss, optax.adam(1e-2), data, epochs=3, batch_size=6, key=KEY, **validation)
    assert len(traced) == expected


def test_the_first_state_compiles_the_optimiser_only(compiled):
    class Two(eqx.Module):
        weight: jax.Array
        count: jax.Array

    make = lambda key: Two(jax.random.normal(key, (17, 19)), jnp.arange(23))
    ensemble = ee.build(make, 2, key=KEY)
    ee.train.init(ENSEMBLE, optax.sgd(0.1), key=KEY)
    with compiled() as names:
        state = ee.train.init(ensemble, optax.sgd(0.1, momentum=0.5), key=KEY)
    assert names == ["init_all"]
    own, copied = ensemble.stacked.weight, state.params.weight
    assert own.unsafe_buffer_pointer() != copied.unsafe_buffer_pointer()
    assert (copied.dtype, copied.weak_type, copied.sharding) == (own.dtype, False, own.sharding)
    np.testing.assert_array_equal(own, copied)


def test_copies_stay_on_their_devices():
    mesh = ee.make_mesh(members=2)
    ensemble = ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 2, mesh=mesh, key=KEY)
    state = ee.train.init(ensemble, optax.sgd(0.1), mesh=mesh, key=KEY)
    assert state.params.weight.sharding == ensemble.stacked.weight.sharding


PROCESS = """
import logging, sys
import equinox as eqx, jax, jax.numpy as jnp, numpy as np, optax
import eqx_ensemble as ee

class Count(logging.Handler):
    def emit(self, record):
        message = record.getMessage()
        if message.startswith("PERSISTENT COMPILATION CACHE MISS"):
            print("MISS", message)
        if message.startswith("Persistent compilation cache hit"):
            print("HIT", message)

logger = logging.getLogger("jax._src.compiler")
logger.setLevel(logging.DEBUG)
logger.addHandler(Count())
logger.propagate = False

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
ensemble = ee.build(lambda key: eqx.nn.MLP(3, 1, 8, 1, key=key), 2, key=jax.random.key(0))
x = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)

def loss(model, batch, key):
    return jnp.mean((jax.vmap(model)(batch[:, :3]) - batch[:, 3:]) ** 2)

run = ee.fit(ensemble, loss, optax.adam(1e-2), x, validation=x, epochs=2, batch_size=4, key=jax.random.key(1))
out = ee.predict(run.ensemble, x[:, :3], batch_size=4, combine=ee.combine.mean)
print("SUM", np.asarray(out, np.float64).sum().hex())
"""


def test_a_second_process_compiles_nothing(tmp_path):
    """With JAX's persistent cache, as the documentation switches it on."""
    unset = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    command = [sys.executable, "-c", PROCESS, str(tmp_path)]
    first, second = (
        subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout.splitlines()
        for _ in range(2)
    )
    misses = lambda lines: [line for line in lines if line.startswith("MISS")]
    assert len(misses(first)) > 3
    assert not misses(second)
    assert sum(line.startswith("HIT") for line in second) >= len(misses(first))
    assert first[-1] == second[-1]
