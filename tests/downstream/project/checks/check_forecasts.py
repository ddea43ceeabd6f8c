"""The tests of `forecasts`, run as its developers run them: with its own hook, and with that of `eqx_ensemble`."""

import equinox as eqx
import forecasts
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import TypeCheckError

import eqx_ensemble as ee

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def series():
    return jnp.asarray(forecasts.make_series(60))


@pytest.fixture(scope="module")
def trained(series):
    return forecasts.train(series, key=KEY)


@pytest.fixture(scope="module")
def windows(series):
    return forecasts.make_windows(series, 6)[0]


def test_both_hooks_are_on():
    with pytest.raises(TypeCheckError):
        forecasts.Cell("4", key=KEY)
    with pytest.raises(TypeCheckError):
        ee.combine.mean(jnp.zeros((2, 3)), weights="equal")


def test_a_forecast_is_near_the_series(series, trained):
    assert forecasts.judge(trained[0], series)["crps_gaussian"] < float(jnp.std(series))


def test_axes_of_an_ensemble_are_bound_with_those_of_arrays(trained, windows):
    ensemble = trained[0].ensemble
    assert forecasts.disagreement(ensemble, jnp.ones(3) / 3, windows).shape == windows.shape[:1]
    with pytest.raises(TypeCheckError, match="weights"):
        forecasts.disagreement(ensemble, jnp.ones(2) / 2, windows)
    with pytest.raises(TypeCheckError, match="ensemble"):
        forecasts.disagreement(ensemble[0], jnp.ones(3) / 3, windows)


def test_an_ensemble_is_a_checked_field(trained, windows):
    forecaster = trained[0]
    parts = forecaster.offset, forecaster.scale, forecaster.num_steps
    forecasts.Forecaster(forecaster.ensemble, jnp.zeros(3), *parts)
    with pytest.raises(TypeCheckError, match="weights"):
        forecasts.Forecaster(forecaster.ensemble, jnp.zeros(2), *parts)
    with pytest.raises(TypeCheckError, match="ensemble"):
        forecasts.Forecaster(ee.build(lambda key: eqx.nn.Linear(6, 2, key=key), 3, key=KEY), jnp.zeros(3), *parts)
    with pytest.raises(TypeCheckError, match="windows"):
        forecaster(windows[:, :5])


def test_a_run_is_known_by_the_type_of_its_members(trained):
    assert forecasts.late_members(trained[1]).shape == (3,)
    with pytest.raises(TypeCheckError, match="run"):
        forecasts.late_members(trained[0])


def test_weights_of_members_are_trained_and_members_are_not(series, trained):
    tuned = forecasts.fine_tune(trained[0], series)
    assert not np.array_equal(tuned.weights, trained[0].weights)
    assert eqx.tree_equal(tuned.ensemble, trained[0].ensemble)
    scores = [forecasts.judge(model, series)["crps_gaussian"] for model in (trained[0], tuned)]
    assert scores[1] < scores[0]


def test_files(trained, series, windows, tmp_path):
    forecasts.save(tmp_path / "model", trained[0])
    loaded = forecasts.load(tmp_path / "model")
    assert eqx.tree_equal(loaded, trained[0])
    np.testing.assert_array_equal(loaded(windows).mean, trained[0](windows).mean)


def test_members_keep_the_promises():
    data = jnp.ones((8, 6)) * jnp.arange(8.0)[:, None], jnp.arange(8.0)
    make = lambda key: forecasts.Cell(3, key=key)
    ee.testing.check_independent(make, forecasts.loss, optax.adam(1e-2, eps=1e-4), data, steps=3, key=KEY)
