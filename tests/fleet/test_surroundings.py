"""What surrounds a call travels with it: settings of JAX, warnings, errors, and classes that cannot be imported."""

import multiprocessing
import warnings
from concurrent.futures import ProcessPoolExecutor

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from .executors import Here

KEY = jax.random.key(0)
X = jnp.ones((20, 3))
DATA = X, jnp.zeros(20)


def mse(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)


def linear(key):
    return eqx.nn.Linear(3, 1, key=key)


def fit(**options):
    options = {"data": DATA, "loss": mse, "epochs": 1, "shard": 2, "executor": Here(), "key": KEY} | options
    executor, loss, data = (options.pop(word) for word in ("executor", "loss", "data"))
    return ee.fleet.fit(executor, ee.build(linear, 4, key=KEY), loss, optax.sgd(0.1), data, **options)


@pytest.mark.slow
def test_classes_and_settings_reach_spawned_workers():
    """A class of this function, with methods and fields of a base of it."""

    class Base(eqx.Module):
        weight: jax.Array

    class Model(Base):
        power: int = eqx.field(static=True)

        def __init__(self, key):
            self.weight, self.power = jax.random.normal(key, (3,)), 2

        def size(self):
            return jnp.sum(jnp.abs(self.weight) ** self.power) + (0 if isinstance(self, Model) else jnp.nan)

    spawn = lambda: ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    with jax.enable_x64(True):
        ensemble = ee.build(Model, 4, key=KEY)
        expected = ee.map_members(lambda model: model.size())(ensemble)
        found = ee.fleet.map_members(spawn, lambda model: model.size(), shard=2)(ensemble)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=1e-15)  # a vectorised and a shorter program


def test_warnings_are_told_once():
    def data(ids):
        warnings.warn("of the data", stacklevel=1)
        return DATA

    with pytest.warns(UserWarning, match="of the data") as caught:
        fit(data=data)
    assert len(caught) == 1


def test_an_error_has_the_trace_of_the_worker():
    def data(ids):
        return {}["nokey"]

    with pytest.raises(KeyError, match="nokey") as caught:
        fit(data=data)
    assert 'return {}["nokey"]' in "\n".join(caught.value.__notes__)


def test_a_program_that_ends_itself():
    def data(ids):
        raise SystemExit(3)

    with pytest.raises(RuntimeError, match=r"SystemExit\(3\)"):
        fit(data=data)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": np.zeros((6, 8), int)},
        {"stop": ee.train.Stopping(steps=np.arange(6) + 1)},
        {"data": (ee.Each(np.ones((6, 20, 3))), DATA[1])},
        {"checkpoint": ""},
    ],
)
def test_values_of_other_members_are_refused(unhooked, wrong):
    executor = Here()
    with pytest.raises((ValueError, TypeError)):
        fit(executor=executor, **wrong)
    assert executor.calls == []


def test_arrays_that_bytes_do_not_describe():
    ensemble = ee.build(linear, 4, key=KEY)
    total = ee.fleet.map_members(Here(), lambda model, x: jnp.asarray(x.astype("=i4")).sum(), shard=2)
    assert total(ensemble, np.ones(100_000, ">i4")).tolist() == [100_000] * 4


def test_workers_that_never_start():
    made = []

    def make():
        made.append(Here(kills=[0]))
        return made[-1]

    from concurrent.futures import BrokenExecutor

    with pytest.raises(BrokenExecutor) as caught:
        fit(executor=make, shard=2, retries=1)
    assert "or did not start." in "\n".join(caught.value.__notes__)
    assert len(made) < 8
