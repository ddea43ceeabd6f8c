"""Warm starts, copies, members of one's own, scikit-learn's tools, and messages."""

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
    more = model.set_params(num_members=3, warm_start=True).fit(x, labels)
    assert more.ensemble_.num_members == 3
    stopped = EnsembleClassifier(make_stateful, **small | {"early_stopping": True}).fit(x, labels)
    assert stopped.validation_loss_curve_.shape == (3,)


def test_a_pickle_of_another_version_is_told(x, y, small, monkeypatch):
    model = EnsembleRegressor(**small).fit(x, y)
    text = pickle.dumps(model)
    monkeypatch.setattr("eqx_ensemble.sklearn._base.__version__", "99.0")
    with pytest.warns(UserWarning, match="was pickled with eqx_ensemble .* and this is 99.0"):
        pickle.loads(text)


def test_parameters_changed_after_fit_do_not_change_the_pickle(x, y, small):
    model = EnsembleRegressor(**small).fit(x, y).set_params(hidden_layer_sizes=(7, 7), head="point")
    other = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(other.predict(x, return_std=True), model.predict(x, return_std=True))


@pytest.mark.parametrize("bootstrap", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_warm_start_with_more_members_leaves_the_others_as_they_are(x, y, small, bootstrap):
    options = small | {"warm_start": True, "bootstrap": bootstrap}
    grown = EnsembleRegressor(**options).fit(x, y)
    before = grown.ensemble_
    grown.set_params(num_members=4).fit(x, y)
    at_once = EnsembleRegressor(**options | {"num_members": 4}).fit(x, y)
    for one, other in zip(jax.tree.leaves(grown.ensemble_[:2]), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(grown.predict(x), at_once.predict(x), rtol=1e-6)
    if bootstrap:
        np.testing.assert_array_equal(grown.rows_, at_once.rows_)
        assert grown.oob_score_ == pytest.approx(at_once.oob_score_, abs=1e-5)
        with pytest.raises(ValueError, match="the same training rows: there were 24, now there are 20"):
            grown.set_params(num_members=5).fit(x[:20], y[:20])
    with pytest.raises(ValueError, match="`num_members` of at least 4"):
        grown.set_params(num_members=3).fit(x, y)


def test_a_warm_start_trains_on(x, y, small):
    model = EnsembleRegressor(**small, warm_start=True).fit(x, y)
    first = model.loss_curve_
    model.fit(x, y)
    assert model.n_iter_ == 6
    np.testing.assert_array_equal(model.loss_curve_[:3], first)
    assert model.loss_curve_[-1] < first[-1]
    with pytest.raises(ValueError, match="targets and `head` as in the previous fit"):
        model.set_params(head="point").fit(x, y)
    cold = model.set_params(head="gaussian", warm_start=False).fit(x, y)
    np.testing.assert_array_equal(cold.loss_curve_, first)


def test_a_warm_start_has_the_bootstrap_samples_of_the_first(x, y, small):
    model = EnsembleRegressor(**small, warm_start=True).fit(x, y)
    with pytest.raises(ValueError, match="needs their earlier bootstrap samples: the previous fit had none"):
        model.set_params(bootstrap=True).fit(x, y)
    model = EnsembleRegressor(**small, warm_start=True, bootstrap=True).fit(x, y)
    rows = model.rows_
    np.testing.assert_array_equal(model.fit(x, y).rows_, rows)
    some = np.arange(len(x)) > 2
    with pytest.raises(ValueError, match="the previous fit drew other rows"):
        model.fit(x, y, sample_weight=some.astype(float))


def test_a_warm_start_has_the_classes_of_the_first(x, labels, small):
    model = EnsembleClassifier(**small, warm_start=True).fit(x, labels)
    with pytest.raises(ValueError, match="needs the classes of the previous fit"):
        model.fit(x, np.where(labels == "low", "middle", labels))


def test_equal_fits_compile_once(x, y, small, compiled):
    """Other hyper-parameters, clones and copies of an optimiser are the same program."""
    options = small | {"optimiser": functools.partial(optax.adamw, b1=0.8), "make": MLP}
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
        ({"num_members": 0}, ValueError, "`sklearn.EnsembleRegressor.fit` needs `num_members` of at least 1, got 0"),
        ({"head": "normal"}, ValueError, "needs `head` to be one of 'gaussian', 'point', got 'normal'"),
        ({"activation": "swish"}, ValueError, "needs `activation` to be one of 'relu'"),
        ({"hidden_layer_sizes": 5}, TypeError, "needs `hidden_layer_sizes` to be a list of integers"),
        ({"hidden_layer_sizes": (5, 0)}, ValueError, "needs `hidden_layer_sizes` of at least 1"),
        ({"make": 3}, TypeError, "needs `make` to be a function"),
        ({"make": lambda key: None}, TypeError, r"calls `make\(in_size, out_size, key=key\)`"),
        ({"make": lambda i, o, key: eqx.nn.Linear(i, 5, key=key)}, ValueError, r"shape \(2,\): a mean .* got \(5,\)"),
        ({"optimiser": "adam"}, TypeError, "needs `optimiser` to be a function"),
        ({"learning_rate": -1.0}, ValueError, "`learning_rate`"),
        ({"early_stopping": "auto"}, TypeError, "needs `early_stopping` to be `True` or `False`"),
        ({"early_stopping": True, "validation_fraction": 1.0}, ValueError, "rows to train on and rows to validate on"),
        ({"max_iter": 2.5}, TypeError, "`max_iter`"),
    ],
)
def test_messages(x, y, small, unhooked, parameters, error, message):
    with pytest.raises(error, match=message):
        EnsembleRegressor(**small | parameters).fit(x, y)


@pytest.mark.parametrize(
    ("weights", "message"),
    [(-1.0, "`sample_weight` that is not negative, got -1"), (0.0, "non-?zero"), (1e300, "`sample_weight` of at most")],
)
def test_messages_of_weights(x, y, small, weights, message):
    with pytest.raises(ValueError, match=message):
        EnsembleRegressor(**small).fit(x, y, sample_weight=np.full(len(x), weights))


def test_the_extra_is_named(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda package: None)
        with pytest.raises(ImportError, match=r"`sklearn` needs scikit-learn.\nInstall it: `pip install 'eqx_ensemble"):
            importlib.reload(_available)
    importlib.reload(_available)
