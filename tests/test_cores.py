import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble._cores import thread_pool


def test_threads_compute_as_the_calling_thread_does():
    work = lambda size: jnp.ones(size).dtype
    assert [*thread_pool(2).map(work, range(1, 5))] == ["float32"] * 4
    with jax.enable_x64(True):
        assert [*thread_pool(2).map(work, range(1, 5))] == ["float64"] * 4


def test_predictions_of_double_precision():
    with jax.enable_x64(True):
        make = lambda key: eqx.nn.Linear(2, 1, dtype=jnp.float64, key=key)
        ensemble = ee.build(make, 3, key=jax.random.key(0))
        x = np.random.default_rng(0).normal(size=(100, 2))
        whole = jax.vmap(lambda x: ensemble(x), out_axes=1)(x)
        np.testing.assert_allclose(ee.predict(ensemble, x, batch_size=10), whole, rtol=1e-14)


def test_an_error_of_a_thread_is_raised():
    with pytest.raises(ZeroDivisionError):
        [*thread_pool(2).map(lambda x: 1 / x, range(4))]
