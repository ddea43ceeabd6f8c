"""Copies, members of one's own, scikit-learn's tools, and messages."""

import copy
import functools
import importlib
import pickle
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import eqx_ensemble as ee
from eqx_ensemble.sklearn import EnsembleClassifier, EnsembleRegressor

MLP = functools.partial(eqx.nn.MLP, width_size=4, depth=1)


class Noisy(eqx.Module):
    """A network with dropout."""

    dropout: eqx.nn.Dropout
    linear: eqx.nn.Linear

    def __init__(self, in_size, out_size, *, key):
        self.dropout, self.linear = eqx.nn.Dropout(0.5), eqx.nn.Linear(in_size, out_size, key=key)

    def __call__(self, x, *, key=None):
        return self.linear(self.dropout(x, key=key, inference=key is None))


@pytest.mark.slow
def test_a_pickle_predicts_the_same(x, y, small):
    """Also if parameters are changed after `fit`."""
    model = EnsembleRegressor(**small).fit(x, y).set_params(hidden_layer_sizes=(7, 7), head="point")
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        np.testing.assert_array_equal(other.predict(x, return_std=True), model.predict(x, return_std=True))
        assert jax.tree.structure(other.ensemble_) == jax.tree.structure(model.ensemble_)
        assert other.get_params() == model.get_params()


@pytest.mark.slow
def test_dropout_acts_in_training_alone(x, labels, small):
    model = EnsembleClassifier(Noisy, **small | {"max_iter": 30, "hidden_layer_sizes": None}).fit(x, labels)
    assert model.score(x, labels) > 0.5
    np.testing.assert_array_equal(model.predict_proba(x), model.predict_proba(x))
    row = jnp.asarray(x[0], jnp.float32)
    assert not np.array_equal(model.ensemble_[0](row, key=jax.random.key(0)), model.ensemble_[0](row))


@pytest.mark.slow
def test_equal_fits_compile_once(x, y, small, compiled):
    """Other hyper-parameters and clones are the same program."""
    options = small | {"optimiser": optax.adam, "make": MLP, "hidden_layer_sizes": None}
    rows = np.arange(20)
    EnsembleRegressor(**options).fit(x[rows], y[rows]).predict(x)
    with compiled() as names:
        for seed in range(2):
            model = clone(EnsembleRegressor(**options | {"learning_rate": 0.01 * (seed + 1), "random_state": seed}))
            model.fit(x[rows + seed], y[rows + seed]).predict(x)
    assert names == []
    with compiled() as names:
        EnsembleRegressor(**options).fit(x[:19], y[:19])
    assert names  # of other shapes


@pytest.mark.slow
def test_random_states(x, y, small):
    fit = lambda state: EnsembleRegressor(**small | {"random_state": state}).fit(x, y).predict(x)
    np.testing.assert_array_equal(fit(0), fit(0))
    np.testing.assert_array_equal(fit(0), fit(np.random.RandomState(0)))
    state = np.random.RandomState(0)
    assert np.abs(fit(state) - fit(state)).max() > 1e-3
    assert np.abs(fit(None) - fit(None)).max() > 1e-3


@pytest.mark.slow
def test_pipelines_grids_and_data_frames(x, y, small):
    frame = pd.DataFrame(x, columns=["a", "b", "c"])
    pipeline = make_pipeline(StandardScaler(), EnsembleRegressor(**small)).set_output(transform="pandas")
    grid = GridSearchCV(pipeline, {"ensembleregressor__learning_rate": [1e-5, 0.1]}, cv=2)
    grid.fit(frame, y)
    assert grid.best_params_ == {"ensembleregressor__learning_rate": 0.1}
    assert grid.best_estimator_[-1].feature_names_in_.tolist() == ["a", "b", "c"]
    assert cross_val_predict(pipeline, frame, y, cv=2).shape == y.shape
    np.testing.assert_array_equal(grid.predict(frame), pickle.loads(pickle.dumps(grid)).predict(frame))
    with pytest.raises(ValueError, match="feature names"):
        grid.best_estimator_[-1].predict(frame.rename(columns={"a": "z"}))


@pytest.mark.slow
def test_an_ensemble_works_with_the_rest_of_the_library(x, y, small, tmp_path):
    model = EnsembleRegressor(**small).fit(x, y)
    ee.save(tmp_path / "saved", model.ensemble_)
    loaded = ee.load(tmp_path / "saved", model.ensemble_)
    moments = ee.predict(loaded, x.astype(np.float32), combine=ee.combine.gaussian)
    mean, std = model.predict(x, return_std=True)
    np.testing.assert_allclose(moments.mean, mean, rtol=1e-5)
    np.testing.assert_allclose(np.sqrt(moments.variance), std, rtol=1e-4)


WEIGHTS = "`sample_weight` that is not negative, and nonzero|non-zero"


FIVE_OUTPUTS = {"make": lambda i, o, key: eqx.nn.Linear(i, 5, key=key), "hidden_layer_sizes": None}


@pytest.mark.filterwarnings("ignore:.*diverged")
@pytest.mark.parametrize(
    ("parameters", "given", "error", "message"),
    [
        ({"num_members": 0}, {}, ValueError, "needs `num_members` of at least 1"),
        ({"head": "normal"}, {}, ValueError, "needs `head` to be one of 'gaussian', 'point'"),
        ({"activation": "swish"}, {}, ValueError, "needs `activation` to be one of 'relu'"),
        (FIVE_OUTPUTS, {}, ValueError, r"here \(2,\); got \(5,\)"),
        ({"early_stopping": True, "validation_fraction": 1.0}, {}, ValueError, "test_size"),
        ({"max_iter": 2.5}, {}, TypeError, "`epochs`"),
        ({}, {"sample_weight": -np.ones(24)}, ValueError, WEIGHTS),
        ({}, {"sample_weight": np.zeros(24)}, ValueError, WEIGHTS),
        ({"learning_rate": 1e30}, {}, ee.train.DivergedError, "all members diverged. Lower `learning_rate`"),
    ],
)
def test_messages(x, y, small, unhooked, parameters, given, error, message):
    with pytest.raises(error, match=message):
        EnsembleRegressor(**small | parameters).fit(x, y, **given)


@pytest.mark.parametrize("factor", [1e300, 1e-16])
def test_only_ratios_of_weights_matter(x, y, small, factor):
    weights, scales = np.random.default_rng(0).uniform(1, 2, len(x)), [1e-3, 1.0, 50.0]
    fit = lambda weights: EnsembleRegressor(**small).fit(x * scales, y, sample_weight=weights)
    one, other = fit(weights), fit(factor * weights)
    np.testing.assert_allclose(one.input_scaler_.scale_, other.input_scaler_.scale_, rtol=1e-12)
    np.testing.assert_allclose(one.predict(x * scales), other.predict(x * scales), rtol=1e-5)


def test_the_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "eqx_ensemble.sklearn._base")
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    with pytest.raises(ImportError, match=r"`sklearn` needs scikit-learn.\nInstall it: `pip install -e '"):
        importlib.import_module("eqx_ensemble.sklearn._base")


def test_another_default_generator(x, y, small):
    """`jax_default_prng_impl="rbg"` is usual on TPUs, and estimators take no key."""
    wanted = EnsembleRegressor(**small).fit(x, y).predict(x)
    with jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(EnsembleRegressor(**small).fit(x, y).predict(x), wanted)
