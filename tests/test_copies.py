"""What can be copied and pickled is equal afterwards, and independent; functions of JAX in it stay themselves."""

import concurrent.futures
import copy
import dataclasses
import multiprocessing
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

KEY = jax.random.key(0)
X = jnp.linspace(-1.0, 1.0, 24).reshape(8, 3)
Y = X[:, 0]
ADAM = optax.adam(1e-2)
IDS = [3, 9, 4]


class Net(eqx.Module):
    weight: jax.Array
    activation: object

    def __init__(self, key, activation=jax.nn.relu):
        self.weight = jax.random.normal(key, (3,))
        self.activation = activation

    def __call__(self, x):
        return self.activation(self.weight @ x)


def loss(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def callback(progress):
    return None


class Forecaster(eqx.Module):
    ensemble: ee.Stacked[ee.Ensemble[Net], "members"]  # noqa: F821
    weights: jax.Array


@pytest.fixture(scope="module")
def objects():
    ensemble = ee.build(Net, ids=IDS, key=KEY)
    run = ee.fit(ensemble, loss, ADAM, (X, Y), epochs=1, validation=(X, 2 * Y), callbacks=[callback], key=KEY)
    state, metrics = ee.train.make_step(loss, ADAM)(run.train_state, (X, Y))
    logits = jnp.stack([-Y, Y], axis=-1)[None] * jnp.arange(1.0, 4.0)[:, None, None]
    labels = (Y > 0).astype(int).at[3].set(1)
    return {
        "Ensemble": ensemble,
        "an ensemble of ensembles": ee.build(lambda key: ee.build(Net, 2, key=key), 3, key=KEY),
        "an ensemble as a field": Forecaster(ensemble, jnp.ones(3)),
        "Each": ee.Each(X),
        "Each of keys": ensemble.keys(KEY),
        "Batch": ee.Batch(X),
        "Run": run,
        "Run of some members": run[:2],
        "TrainState": state,
        "Metrics": metrics,
        "History": run.history,
        "Validation": ee.train.Validation((X, Y), score=loss, mode="min"),
        "Stopping": ee.train.Stopping(steps=[3, 8, 5]),
        "Revive": ee.train.Revive(Net, most=2),
        "Checkpoint": ee.train.Checkpoint("run.eqx", every=5),
        "Vmap": ee.plan.Vmap(),
        "Chunked": ee.plan.Chunked(2),
        "Sequential": ee.plan.Sequential(),
        "Unrolled": ee.plan.Unrolled(),
        "temperature": ee.calibrate.temperature(logits, labels, pool="members"),
        "isotonic": ee.calibrate.isotonic(logits, labels, pool="members"),
        "split": ee.conformal.split(Y**2, Y, level=0.5),
        "lac": ee.conformal.lac(logits[0], labels, level=0.5),
    }  # fmt: skip


WAYS = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "replace": lambda x: x._replace() if isinstance(x, tuple) else dataclasses.replace(x),
}
NAMES = (
    "Ensemble,an ensemble of ensembles,an ensemble as a field,Each,Each of keys,Batch,Run,Run of some members,"
    "TrainState,Metrics,History,Validation,Stopping,Revive,Checkpoint,Vmap,Chunked,Sequential,Unrolled,"
    "temperature,isotonic,split,lac"
).split(",")


def plain(leaf):
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf


def assert_equal(got, expected):
    assert type(got) is type(expected)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert type(x) is type(y)
        if isinstance(x, jax.Array | np.ndarray):
            np.testing.assert_array_equal(plain(x), plain(y))
        else:
            assert plain(x) == plain(y)


def test_all_are_tried(objects):
    assert list(objects) == NAMES


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_a_copy_is_equal(objects, name, way):
    assert_equal(WAYS[way](objects[name]), objects[name])


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_is_independent_and_goes_on(objects, way):
    run, options = objects["Run"], {"epochs": 1, "validation": (X, 2 * Y), "key": KEY}
    other = WAYS[way](run)
    assert other.ensemble.ids.tolist() == IDS
    other.status[:] = 1
    assert run.status.tolist() == [0, 0, 0]
    assert_equal(WAYS[way](run)[:1], run[:1])
    step = ee.train.make_step(loss, ADAM)
    state = WAYS[way](objects["TrainState"])
    assert_equal(step(state, (X, Y))[0], step(objects["TrainState"], (X, Y))[0])
    other = ee.fit(WAYS[way](run), loss, ADAM, (X, Y), **options)
    np.testing.assert_array_equal(other.history.loss, ee.fit(run, loss, ADAM, (X, Y), **options).history.loss)


@pytest.mark.parametrize("way", ["copy", "deepcopy", "pickle"])
def test_copies_join_the_originals(objects, way):
    """JAX's own copy of `jax.nn.relu` is another function."""
    ensemble, run = objects["Ensemble"], objects["Run"]
    assert_equal(ee.concatenate([ensemble[:1], WAYS[way](ensemble)[1:]]), ensemble)
    joined = ee.concatenate([run[:1], WAYS[way](run)[1:]])
    assert_equal(joined.ensemble, run.ensemble)
    assert_equal(ee.tree.polyak(ensemble, WAYS[way](ensemble), 0.0), ensemble)


@pytest.mark.parametrize("activation", [jnp.tanh, jax.nn.silu, jax.nn.relu, jnp.arctan, jax.jit(lambda x: 2 * x)])
def test_copies_of_models_join(activation):
    models = [Net(key, activation) for key in jax.random.split(KEY, 2)]
    ensemble = ee.stack([models[0], copy.deepcopy(models[1])])
    np.testing.assert_array_equal(ensemble.stacked.weight, ee.stack(models).stacked.weight)
    with pytest.raises(ee.MemberMismatchError, match="activation"):
        ee.stack([models[0], copy.deepcopy(Net(KEY, jax.jit(jnp.cos)))])


def test_tree_at_replaces_a_field(objects):
    ensemble, run, state = objects["Ensemble"], objects["Run"], objects["TrainState"]
    zero = eqx.tree_at(lambda tree: tree.stacked.weight, ensemble, jnp.zeros((3, 3)))
    assert zero.ids.tolist() == IDS
    assert eqx.tree_at(lambda run: run.ensemble.stacked.weight, run, jnp.zeros((3, 3))).predict(X).sum() == 0
    params = eqx.tree_at(lambda tree: tree.weight, state.params, jnp.zeros((3, 3)))
    assert_equal(eqx.tree_at(lambda state: state.params, state, params).ensemble, zero)
    fitted = eqx.tree_at(lambda fitted: fitted.temperature, objects["temperature"], jnp.ones(3))
    assert fitted.temperature.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("name", "changed", "text"),
    [
        ("Stopping", {"steps": [0]}, "needs `steps`"),
        ("Chunked", {"size": 0}, "needs `size`"),
        ("Validation", {"data": None}, "needs data"),
    ],
)
def test_what_is_replaced_is_checked(objects, name, changed, text):
    with pytest.raises((ValueError, TypeError), match=text):
        dataclasses.replace(objects[name], **changed)


def test_a_lambda_is_named():
    with pytest.raises((pickle.PicklingError, AttributeError), match="<lambda>"):
        pickle.dumps(ee.build(lambda key: Net(key, lambda x: x), 2, key=KEY))


class TestByValue:
    """cloudpickle, and therefore joblib, sends functions of a script by value."""

    @pytest.fixture
    def send(self):
        cloudpickle = pytest.importorskip("cloudpickle")
        return lambda x: pickle.loads(cloudpickle.dumps(x))

    @pytest.mark.parametrize("plan", [None, ee.plan.Chunked(2)])
    def test_a_mapped_function(self, objects, send, plan):
        mapped = ee.map_members(lambda model, x: model(x), plan=plan)
        expected = mapped(objects["Ensemble"], X[0])
        np.testing.assert_array_equal(send(mapped)(objects["Ensemble"], X[0]), expected)
        np.testing.assert_array_equal(send(eqx.filter_jit(mapped))(objects["Ensemble"], X[0]), expected)

    def test_a_step_and_what_it_trains(self, objects, send):
        step = ee.train.make_step(loss, ADAM)
        got = send(step)(send(objects["TrainState"]), (X, Y))[0]
        assert_equal(got.params, step(objects["TrainState"], (X, Y))[0].params)

    def test_an_ensemble_joins_its_original(self, objects, send):
        ensemble = objects["Ensemble"]
        assert_equal(ee.concatenate([ensemble[:1], send(ensemble)[1:]]), ensemble)


def predict(ensemble, x):
    return np.asarray(ee.predict(ensemble, x))


@pytest.mark.slow
def test_spawned_processes_get_an_ensemble(objects):
    ensemble = objects["Ensemble"]
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        got = pool.submit(predict, ensemble, np.asarray(X)).result()
        same = pool.submit(copy.copy, ensemble).result()
    np.testing.assert_allclose(got, predict(ensemble, X), rtol=1e-6)
    assert_equal(same, ensemble)
