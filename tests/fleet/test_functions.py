"""Methods of Modules, partials and transformed functions are functions, though they are PyTrees with arrays."""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble.fleet._divide import check_ids_of_function
from eqx_ensemble.fleet._folder import call_identity
from eqx_ensemble.train.data._source import is_data_function

from .executors import Here
from .test_fit import ENSEMBLE, KEY, OPTIMISER, SEQUENTIAL, X, Y, assert_equal, mse

pytest.importorskip("cloudpickle", reason="needs the extra `fleet`")


class Table(eqx.Module):
    x: jax.Array
    y: jax.Array

    def __call__(self, ids):
        return self.x, self.y

    def rows(self, ids):
        return self.x, self.y


class Maker(eqx.Module):
    key: jax.Array

    def __call__(self, ids):
        return ee.build(lambda key: eqx.nn.MLP(3, 1, 4, 1, key=key), ids=ids, key=self.key)

    def build(self, ids):
        return self(ids)


TABLE = Table(jnp.asarray(X), jnp.asarray(Y))
DATA = {
    "a method": TABLE.rows,
    "call": TABLE.__call__,
    "jit": eqx.filter_jit(TABLE.rows),
    "jax": jax.tree_util.Partial(lambda x, y, ids: (x, y), X, Y),
    "equinox": eqx.Partial(lambda x, y, ids: (x, y), X, Y),
    "functools": ft.partial(lambda x, y, ids: (x, y), X, Y),
}
MAKERS = {
    "a module": Maker(KEY),
    "a method": Maker(KEY).build,
    "a partial": jax.tree_util.Partial(lambda key, ids: Maker(key)(ids), KEY),
}


@pytest.mark.parametrize("name", DATA)
def test_functions_of_data(name):
    assert is_data_function(DATA[name])
    assert np.shape(DATA[name](np.arange(2))[0]) == X.shape


def test_modules_with_arrays_are_data():
    assert not is_data_function(TABLE)
    assert not is_data_function((X, Y))


@pytest.mark.parametrize("name", MAKERS)
def test_functions_that_make_members(name):
    assert check_ids_of_function(MAKERS[name], range(3)).tolist() == [0, 1, 2]


def test_what_makes_no_members(unhooked):
    model = eqx.nn.Linear(3, 1, key=KEY)
    for start in (ENSEMBLE, model):
        assert check_ids_of_function(start, None) is None
    with pytest.raises(TypeError, match="an Ensemble has its own"):
        check_ids_of_function(ENSEMBLE, range(3))
    with pytest.raises(TypeError, match="needs an `Ensemble`, a training state or a run, got"):
        ee.fleet.fit(Here(), model, mse, OPTIMISER, (X, Y), steps=1, key=KEY)
    with pytest.raises(TypeError, match="needs an `Ensemble`, a training state or a run, got an int"):
        ee.fleet.fit(Here(), 3, mse, OPTIMISER, (X, Y), steps=1, key=KEY, ids=range(3))


def test_arrays_of_a_function_identify_a_saved_call():
    of = lambda start: call_identity(start, np.arange(3), {"loss": mse}, {}, key=KEY)
    for make in (Maker, lambda key: Maker(key).build):
        assert of(make(KEY)).digest == of(make(KEY)).digest
        assert of(make(KEY)).texts["ensemble"] != of(make(jax.random.key(1))).texts["ensemble"]


@pytest.mark.slow
def test_they_are_called_on_workers():
    options = {"steps": 2, "plan": SEQUENTIAL, "key": KEY, "validation": (X, Y)}
    ids = range(4)
    expected = ee.fit(MAKERS["a module"](np.arange(4)), mse, OPTIMISER, (X, Y), **options)
    for make in MAKERS.values():
        found = ee.fleet.fit(Here(), make, mse, OPTIMISER, (X, Y), shard=2, ids=ids, **options)
        assert_equal(found, expected)
    for data in DATA.values():
        options["validation"] = data
        found = ee.fleet.fit(Here(), MAKERS["a method"], mse, OPTIMISER, data, shard=2, ids=ids, **options)
        assert_equal(found, expected)
