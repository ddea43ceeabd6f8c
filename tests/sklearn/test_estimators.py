"""Copies, members of one's own, scikit-learn's tools, and messages."""

import copy
import functools
import importlib
import pickle

import equinox as eqx
import jax
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
from eqx_ensemble.sklearn import _base as _available

MLP = functools.partial(eqx.nn.MLP, width_size=4, depth=1)


class Stateful(eqx.Module):
    """A network with batch normalisation and dropout."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    last: eqx.nn.Linear

    def __init__(self, in_size, out_size, *, key):
        first, last = jax.random.split(key)
        self.first = eqx.nn.Linear(in_size, 4, key=first)
        self.norm = eqx.nn.BatchNorm(4, axis_name="batch", mode="batch")
        self.dropout = eqx.nn.Dropout(0.5)
        self.last = eqx.nn.Linear(4, out_size, key=last)

    def __call__(self, x, state, *, key=None):
        x, state = self.norm(self.first(x), state)
        return self.last(self.dropout(jax.nn.relu(x), key=key)), state


def make_stateful(in_size, out_size, *, key):
    return eqx.nn.make_with_state(Stateful)(in_size, out_size, key=key)


def test_a_pickle_predicts_the_same(x, y, small):
    model = EnsembleRegressor(MLP, **small).fit(x, y)
    with pytest.raises(Exception, match="pickle"):
        pickle.dumps(model.ensemble_[0].network.activation)  # why weights are pickled, and not Modules
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        np.testing.assert_array_equal(other.predict(x), model.predict(x))
        assert jax.tree.structure(other.ensemble_) == jax.tree.structure(model.ensemble_)
        assert other.get_params() | {"make": None} == model.get_params() | {"make": None}


@pytest.fixture
def standard_promotion():
    """Equinox's batch normalisation promotes integers."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_members_with_a_state(x, labels, small):
    model = EnsembleClassifier(make_stateful, **small | {"max_iter": 30}).fit(x, labels)
    assert model.score(x, labels) > 0.5
    np.testing.assert_array_equal(model.predict_proba(x), model.predict_proba(x))  # no dropout
    other = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(other.predict_proba(x), model.predict_proba(x))
    alone = ee.predict(model.ensemble_, x.astype(np.float32), state=model.state_, combine=ee.combine.mixture)
    np.testing.assert_allclose(np.exp(alone), model.predict_proba(x), rtol=1e-4)
    stopped = EnsembleClassifier(make_stateful, **small | {"early_stopping": True}).fit(x, labels)
    assert stopped.validation_loss_curve_.shape == (3,)


def test_parameters_changed_after_fit_do_not_change_the_pickle(x, y, small):
    model = EnsembleRegressor(**small).fit(x, y).set_params(hidden_layer_sizes=(7, 7), head="point")
    other = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(other.predict(x, return_std=True), model.predict(x, return_std=True))


def test_equal_fits_compile_once(x, y, small, compiled):
    """Other hyper-parameters and clones are the same program."""
    options = small | {"optimiser": optax.adam, "make": MLP}
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
def test_one_class_and_booleans(x, small):
    with pytest.raises(ValueError, match="two or more classes, got one class"):
        EnsembleClassifier(**small).fit(x, np.ones(len(x), int))
    assert EnsembleClassifier(**small).fit(x, x[:, 0] > 3).predict(x).dtype == bool


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*diverged")
def test_divergence(x, y, small):
    with pytest.raises(ee.train.DivergedError, match="all members diverged. Lower `learning_rate`"):
        EnsembleRegressor(**small | {"learning_rate": 1e30}).fit(x, y)


@pytest.mark.slow
def test_an_ensemble_works_with_the_rest_of_the_library(x, y, small, tmp_path):
    model = EnsembleRegressor(**small).fit(x, y)
    ee.save(tmp_path / "saved", model.ensemble_)
    loaded = ee.load(tmp_path / "saved", model.ensemble_)
    moments = ee.predict(loaded, x.astype(np.float32), combine=ee.combine.gaussian)
    mean, std = model.predict(x, return_std=True)
    np.testing.assert_allclose(moments.mean, mean, rtol=1e-5)
    np.testing.assert_allclose(np.sqrt(moments.variance), std, rtol=1e-4)


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"num_members": 0}, ValueError, "needs `num_members` of at least 1, got 0"),
        ({"head": "normal"}, ValueError, "needs `head` to be one of 'gaussian', 'point', got 'normal'"),
        ({"activation": "swish"}, ValueError, "needs `activation` to be one of 'relu'"),
        ({"make": lambda i, o, key: eqx.nn.Linear(i, 5, key=key)}, ValueError, r"here \(2,\); got \(5,\)"),
        ({"early_stopping": True, "validation_fraction": 1.0}, ValueError, "test_size"),
        ({"max_iter": 2.5}, TypeError, "`epochs`"),
    ],
)
def test_messages(x, y, small, unhooked, parameters, error, message):
    with pytest.raises(error, match=message):
        EnsembleRegressor(**small | parameters).fit(x, y)


@pytest.mark.parametrize("weight", [-1.0, 0.0])
def test_messages_of_weights(x, y, small, weight):
    with pytest.raises(ValueError, match=r"(`sample_weight` that is not negative, and non|non-)zero"):
        EnsembleRegressor(**small).fit(x, y, sample_weight=np.full(len(x), weight))


def test_only_ratios_of_weights_matter(x, y, small):
    weights = np.random.default_rng(0).uniform(1, 2, len(x))
    fit = lambda weights: EnsembleRegressor(**small).fit(x, y, sample_weight=weights).predict(x)
    np.testing.assert_allclose(fit(1e300 * weights), fit(weights), rtol=1e-5)


def test_the_extra_is_named(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda package: None)
        with pytest.raises(ImportError, match=r"`sklearn` needs scikit-learn.\nInstall it: `pip install 'eqx_ensemble"):
            importlib.reload(_available)
    importlib.reload(_available)
