"""Data frames of pandas and polars, and tensors of torch, are taken wherever arrays are, or refused in one sentence."""

import importlib
import itertools
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble._foreign import from_foreign

from .array_calls import NAMES, arguments_of, call
from .factories import assert_same

pytestmark = pytest.mark.usefixtures("unhooked")

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
Y = np.sin(X[:, 0])
LIBRARIES = ("pandas", "polars", "torch")
INSTALLED = [name for name in LIBRARIES if importlib.util.find_spec(name)] or LIBRARIES


def library(name):
    return pytest.importorskip(name, reason=f"needs {name}")


def frame(name, array, columns="abc"):
    """A table of a library's own with these numbers; a tensor of torch."""
    module = library(name)
    if name == "torch":
        return module.tensor(array)
    return module.DataFrame(dict(zip(columns, np.asarray(array).T, strict=True)))


def column(name, array):
    """A column of a library's own; a tensor of torch that requires a gradient where it can."""
    module = library(name)
    if name == "torch":
        tensor = module.tensor(np.asarray(array))
        return tensor.requires_grad_() if tensor.dtype.is_floating_point else tensor
    return module.Series(np.asarray(array))


def loss(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 4, key=KEY)


@pytest.mark.parametrize("name", LIBRARIES)
def test_numbers_stay_the_same(name):
    for dtype in (np.float32, np.float64, np.int32, np.int64, np.uint8, bool):
        array = (np.arange(12).reshape(4, 3) % 5).astype(dtype)
        for value, expected in ((frame(name, array), array), (column(name, array[:, 0]), array[:, 0])):
            got = from_foreign(value)
            assert type(got) is np.ndarray
            assert got.dtype == dtype
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", ["pandas", "polars"])
def test_columns_of_several_dtypes_are_promoted_as_numpy_does(name):
    module = library(name)
    table = module.DataFrame({"a": [1, 2], "b": [0.5, 1.0], "c": [True, False]})
    got = from_foreign(table)
    assert got.dtype == np.float64
    np.testing.assert_array_equal(got, [[1, 0.5, 1], [2, 1, 0]])


def test_no_copy_where_that_is_possible():
    torch, pandas = library("torch"), library("pandas")
    tensor, series = torch.arange(4.0), pandas.Series(np.arange(4.0))
    assert np.shares_memory(from_foreign(tensor), tensor.numpy())
    assert np.shares_memory(from_foreign(series), series.to_numpy())


def test_nullable_and_sparse_columns_of_pandas():
    pandas = library("pandas")
    table = pandas.DataFrame({"a": pandas.array([1, 2], dtype="Int64"), "b": pandas.array([0.5, 1], dtype="Float32")})
    np.testing.assert_array_equal(from_foreign(table), [[1, 0.5], [2, 1]])
    np.testing.assert_array_equal(from_foreign(pandas.Series([True, False], dtype="boolean")), [True, False])
    np.testing.assert_array_equal(from_foreign(pandas.Series([0.0, 1.0], dtype="Sparse[float]")), [0, 1])
    np.testing.assert_array_equal(from_foreign(pandas.Index([3, 4])), [3, 4])
    assert np.isnan(from_foreign(pandas.Series([0.0, np.nan]))[1])  # a number to NumPy


@pytest.mark.parametrize("name", ["pandas", "polars"])
@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (["x", "y"], TypeError, r"`fit` needs columns of numbers; column 'city' of `data\[0\]` has dtype"),
        ([1, None], ValueError, r"column 'city' of `data\[0\]` has 1 of them"),
        ([[1], [2]], TypeError, "column 'city'"),
    ],
)
def test_columns_are_refused_by_name(ensemble, name, values, error, message):
    module = library(name)
    series = module.Series(values, dtype="Int64") if name == "pandas" and error is ValueError else values
    table = module.DataFrame({"a": [1.0, 2.0], "city": series, "b": [1.0, 2.0]})
    with pytest.raises(error, match=message):
        ee.fit(ensemble, loss, optax.sgd(0.1), (table, np.ones(2)), steps=1, key=KEY)


def test_categories_and_times_are_refused():
    pandas = library("pandas")
    for values in (pandas.Categorical([1, 2]), pandas.to_datetime(["2020", "2021"]), pandas.to_timedelta([1, 2])):
        with pytest.raises(TypeError, match="column 't' of `values` has dtype"):
            from_foreign(pandas.DataFrame({"t": values}))


def test_lazy_frames_and_odd_tensors_are_refused(ensemble):
    torch = library("torch")
    bad = {"meta": torch.zeros(2, device="meta"), "sparse": torch.eye(2).to_sparse()}
    bad |= {"float8": torch.zeros(2).to(torch.float8_e4m3fn)}
    for word, tensor in bad.items():
        with pytest.raises(TypeError, match=f"`predict`.*`x`.*{word}"):
            ee.predict(ensemble, tensor)
    polars = library("polars")
    with pytest.raises(TypeError, match=r"Pass `x.collect\(\)`"):
        ee.predict(ensemble, polars.DataFrame({"a": [1]}).lazy())


def test_tensors():
    torch = library("torch")
    half = from_foreign(torch.arange(3, dtype=torch.bfloat16))
    assert half.dtype == jnp.bfloat16
    np.testing.assert_array_equal(half.astype(np.float32), [0, 1, 2])
    np.testing.assert_array_equal(from_foreign(torch.nn.Parameter(torch.ones(2)) * 2), [2, 2])
    np.testing.assert_array_equal(from_foreign(torch.tensor([1 + 2j]).conj()), [1 - 2j])
    assert from_foreign(torch.tensor(2.0)).shape == ()


@pytest.mark.parametrize("name", LIBRARIES)
def test_training_and_prediction(ensemble, name):
    options = {"steps": 3, "progress": False, "key": KEY}
    expected = ee.fit(ensemble, loss, optax.sgd(0.1), (X, Y), validation=(X, Y), **options)
    own = frame(name, X), column(name, Y)
    run = ee.fit(ensemble, loss, optax.sgd(0.1), own, validation=own, **options)
    assert_same(run.ensemble, expected.ensemble)
    assert_same(run.best_score, expected.best_score)
    batched = ee.fit(ensemble, loss, optax.sgd(0.1), [own] * 3, **options)
    assert_same(batched.ensemble, ee.fit(ensemble, loss, optax.sgd(0.1), [(X, Y)] * 3, **options).ensemble)
    assert_same(ee.predict(ensemble, own[0]), ee.predict(ensemble, X))
    state = ee.train.init(ensemble, optax.sgd(0.1), key=KEY)
    step = ee.train.make_step(loss, optax.sgd(0.1))
    assert_same(step(state, own)[0].ensemble, step(state, (X, Y))[0].ensemble)
    assert_same(ensemble(ee.Batch(own[0])), ensemble(ee.Batch(X)))
    assert_same(ensemble(ee.Each(frame(name, X[:4]))), ensemble(ee.Each(X[:4])))
    assert_same(ensemble(column(name, X[0])), ensemble(X[0]))
    assert_same(ensemble[column(name, np.array([True, False, True, False]))], ensemble[[0, 2]])


@pytest.mark.slow
def test_one_frame_is_data_and_not_an_iterable_of_batches(ensemble):
    squared = lambda model, batch, key: jnp.mean(jax.vmap(model)(batch) ** 2)
    options = {"steps": 3, "progress": False, "key": KEY}
    for name in LIBRARIES:
        if importlib.util.find_spec(name) is not None:
            run = ee.fit(ensemble, squared, optax.sgd(0.1), frame(name, X), **options)
            assert_same(run.ensemble, ee.fit(ensemble, squared, optax.sgd(0.1), X, **options).ensemble)


@pytest.mark.slow
def test_options_of_members(ensemble):
    rates = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    fit = lambda **options: ee.fit(
        ensemble, loss, lambda hyper: optax.sgd(hyper["lr"]), (X, Y), steps=3, progress=False, key=KEY, **options
    )
    expected = fit(hyper={"lr": rates}, stop=ee.train.Stopping(steps=np.array([1, 2, 3, 4])))
    for name in LIBRARIES:
        if importlib.util.find_spec(name) is not None:
            run = fit(
                hyper={"lr": column(name, rates)}, stop=ee.train.Stopping(steps=column(name, np.array([1, 2, 3, 4])))
            )
            assert_same(run.ensemble, expected.ensemble)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*no minimum was reached")
@pytest.mark.parametrize(("name", "library_name"), zip(NAMES, itertools.cycle(INSTALLED)))
def test_every_function_of_arrays(name, library_name):
    """Each argument that is an array gives the same as a tensor, a table or a column."""
    library(library_name)
    arrays = {key: value for key, value in arguments_of(name).items() if isinstance(value, np.ndarray)}
    arrays = {key: x for key, x in arrays.items() if library_name == "torch" or 0 < x.ndim < 3}
    if not arrays:
        pytest.skip("no such argument")
    expected = call(name)
    make = lambda x: column(library_name, x) if x.ndim != 2 else frame(library_name, x, map(str, range(x.shape[1])))
    for key, x in arrays.items():
        assert_same(call(name, **{key: make(x)}), expected)


@pytest.mark.slow
def test_nothing_is_imported():
    code = "import eqx_ensemble as ee, numpy as np, sys; ee.scores.rmse(np.ones((2, 3)), np.ones(3));"
    code += "print([name for name in ('pandas', 'polars', 'torch') if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_an_argument_of_a_call_is_named(ensemble):
    text = frame("pandas", np.array([["a"] * 3] * 2))
    with pytest.raises(TypeError, match=r"`Ensemble` .*column 'a' of `args\[0\]` has dtype"):
        ensemble(text)
    with pytest.raises(TypeError, match=r"column 'a' of `kwargs\['x'\]` has dtype"):
        ensemble(x=text)
