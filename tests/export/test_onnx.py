"""ONNX Runtime gives what `predict` and `combine` give. Needs the extra `onnx`, which is not among the tests' own."""

import importlib.metadata
import importlib.util
import json
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee

from ..factories import CASES, data


@pytest.fixture(scope="module")
def converter():
    """Skips where nothing can be converted."""
    for name in ("jax2onnx", "onnxruntime"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"the extra `onnx` is not installed: no {name}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import jax2onnx

        try:
            jax2onnx.to_onnx(jax.jit(lambda x: x + 1), [(2,)])
        except AttributeError as error:  # it uses names of jax's own, which move
            pytest.skip(f"jax2onnx {importlib.metadata.version('jax2onnx')} fails with jax {jax.__version__}: {error}")


needs_onnx = pytest.mark.usefixtures("converter")
# What jax2onnx and all that it imports warn of.
pytestmark = pytest.mark.filterwarnings("ignore")

KEY = jax.random.key(3)


def session(model):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # it warns of constants that are not used
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def assert_near(got, wanted):
    """Within rounding: another compiler, whose sums are in another order."""
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def ensemble():
    return ee.build(lambda key: eqx.nn.MLP(3, 4, 8, 1, key=key), ids=[4, 0, 9], key=KEY)


def rows(count=6):
    return jax.random.normal(jax.random.key(1), (count, 3))


@needs_onnx
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("integers and keys", "bfloat16")])
def test_is_what_predict_gives(name):
    made = ee.build(CASES[name].make, 3, key=KEY)
    ensemble, state = made if CASES[name].stateful else (made, None)
    options = {"state": state}
    if name == "attention and dropout":  # a key that inference does not use
        options["fn"] = lambda model, x: model(x, key=KEY)
    run = session(ee.export_onnx(ensemble, shapes=(25,), combine=ee.combine.mean, **options))
    for count in (1, 7, 64):
        x = data(count)[0]
        (got,) = run.run(None, {"x": np.asarray(x)})
        assert_near(got, np.asarray(ee.combine.mean(ee.predict(ensemble, x, **options))))
        assert np.abs(got - np.asarray(ee.predict(ensemble, x, **options))[0]).max() > 0.01


@needs_onnx
@pytest.mark.parametrize("combine", [ee.combine.mixture, ee.combine.vote], ids=lambda combine: combine.__name__)
def test_weights(ensemble, combine):
    weights = [1.0, 0.0, 3.0]
    run = session(ee.export_onnx(ensemble, shapes=(3,), combine=combine, weights=weights))
    (got,) = run.run(None, {"x": np.asarray(rows())})
    assert_near(got, np.asarray(combine(ee.predict(ensemble, rows()), weights=np.array(weights))))


@needs_onnx
def test_names_of_inputs_and_outputs(ensemble):
    def combine(out):
        return {"gaussian": ee.combine.gaussian(out, out**2), "all": [out]}

    shapes = {"a": (3,), "b": (jax.ShapeDtypeStruct((), jnp.int32),)}
    fn = lambda model, x: model(x["a"]) * x["b"][0].astype(jnp.float32)
    model = ee.export_onnx(ensemble, shapes=shapes, fn=fn, combine=combine)
    run = session(model)
    assert {(entry.name, entry.type) for entry in run.get_inputs()} == {
        ("x.a", "tensor(float)"),
        ("x.b.0", "tensor(int32)"),
    }
    x = {"a": rows(), "b": (jnp.arange(6, dtype=jnp.int32),)}
    names = ["out.all.0", "out.gaussian.mean", "out.gaussian.variance"]
    assert [entry.name for entry in run.get_outputs()] == names
    got = run.run(names, {"x.a": np.asarray(x["a"]), "x.b.0": np.asarray(x["b"][0])})
    wanted = combine(ee.predict(ensemble, x, fn=fn))
    for value, other in zip(got, [wanted["all"][0], *wanted["gaussian"]], strict=True):
        assert_near(value, np.asarray(other))
    (properties,) = model.metadata_props
    assert properties.key == "eqx_ensemble"
    assert json.loads(properties.value)["ids"] == [4, 0, 9]


@needs_onnx
def test_a_fixed_number_of_rows(ensemble):
    run = session(ee.export_onnx(ensemble, shapes=(3,), batch_size=6))
    assert run.get_inputs()[0].shape == [6, 3]
    (got,) = run.run(None, {"x": np.asarray(rows())})
    assert_near(got, np.asarray(ee.predict(ensemble, rows())))


@needs_onnx
def test_equinox_and_jax_stay_as_they_were(ensemble):
    """jax2onnx replaces parts of both while it converts."""
    before = eqx.nn.Linear.__call__, jax.nn.relu, jax.config.jax_enable_x64, np.asarray(ee.predict(ensemble, rows()))
    ee.export_onnx(ensemble, shapes=(3,))
    after = eqx.nn.Linear.__call__, jax.nn.relu, jax.config.jax_enable_x64, np.asarray(ee.predict(ensemble, rows()))
    assert before[:3] == after[:3]
    np.testing.assert_array_equal(before[3], after[3])


@needs_onnx
def test_random_numbers_have_no_onnx():
    ensemble = ee.build(CASES["integers and keys"].make, 2, key=KEY)
    with pytest.raises(NotImplementedError) as caught:
        ee.export_onnx(ensemble, shapes=(25,))
    assert str(caught.value) == (
        "`export_onnx` cannot convert random numbers: found `random_wrap`. ONNX would draw different numbers.\n"
        "Draw them before, and pass them as an input; or use `export`."
    )


@needs_onnx
def test_what_the_converter_does_not_support_is_explained(ensemble, monkeypatch):
    def fails(*args, **kwargs):
        raise NotImplementedError("No plugins registered")

    monkeypatch.setattr("jax2onnx.to_onnx", fails)
    with pytest.raises(NotImplementedError) as caught:
        ee.export_onnx(ensemble, shapes=(3,))
    assert any("`export` has no such limit" in note for note in caught.value.__notes__)


@needs_onnx
def test_callbacks_have_no_onnx(ensemble):
    with pytest.raises(TypeError, match="`export_onnx` cannot export a program that calls Python"):
        ee.export_onnx(ensemble, shapes=(3,), combine=lambda out: eqx.error_if(out, jnp.isnan(out).any(), "NaN"))


def test_without_the_extra(ensemble, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "jax2onnx" else found(name))
    with pytest.raises(ImportError, match=r"needs jax2onnx\.\nInstall it: `pip install 'eqx_ensemble\[onnx\]'`"):
        ee.export_onnx(ensemble, shapes=(3,))
