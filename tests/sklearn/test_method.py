"""Estimators with `method=`: they give what the method gives by hand, and work with scikit-learn's tools."""

import copy
import functools
import pickle

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.preprocessing import StandardScaler

import eqx_ensemble as ee
from eqx_ensemble.sklearn import EnsembleClassifier, EnsembleRegressor

MLP = functools.partial(eqx.nn.MLP, width_size=4, depth=1)
SEEDS = ee.methods.Seeds(2)


@pytest.fixture
def options(small):
    return {name: value for name, value in small.items() if name != "num_members"} | {"method": SEEDS}


def last_layer(model):
    return model.layers[-1]


@functools.cache
def by_hand(method, labels, features):
    """The posterior of standardised rows; features and labels as bytes."""
    x = np.frombuffer(features, np.float64).reshape(-1, 3)
    seed = np.random.RandomState(0).randint(np.iinfo(np.int32).max)
    data = StandardScaler().fit_transform(x).astype(np.float32), np.frombuffer(labels, np.int32)
    make = lambda key: eqx.nn.MLP(3, 3, 4, 1, key=key)
    optimiser = optax.adamw(0.05, weight_decay=1e-4)
    key = jax.random.key(int(seed))
    posterior = method.fit(make, "classification", optimiser, data, epochs=3, batch_size=24, key=key)
    return posterior.predict(data[0], key=key)


@pytest.mark.parametrize("method", [SEEDS, ee.methods.TabM(2), ee.methods.Laplace(2, where=last_layer)], ids=repr)
def test_a_classifier_predicts_what_its_method_predicts(x, labels, options, method):
    classes, indices = np.unique(labels, return_inverse=True)
    model = EnsembleClassifier(MLP, **options | {"method": method}).fit(x, labels)
    logits = by_hand(method, indices.astype(np.int32).tobytes(), x.tobytes())
    np.testing.assert_array_equal(model.predict_log_proba(x), ee.combine.mixture(logits))
    np.testing.assert_array_equal(model.predict(x), classes[np.argmax(ee.combine.mixture(logits), axis=1)])
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        np.testing.assert_array_equal(other.predict_proba(x), model.predict_proba(x))


def test_seeds_are_the_members_of_an_estimator_without_method(x, y, options, small):
    """The same networks, loss and rows; the order of rows too, as the key is the same."""
    with_method = EnsembleRegressor(MLP, **options).fit(x, y)
    without = EnsembleRegressor(MLP, **small).fit(x, y)
    for own, other in zip(with_method.predict(x, return_std=True), without.predict(x, return_std=True), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4)
    for own, other in zip(with_method.predict_interval(x), without.predict_interval(x), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4)


def test_a_method_may_predict_gaussians_from_points(x, y, options):
    method = ee.methods.Laplace(2, where=last_layer)
    model = EnsembleRegressor(MLP, head="point", **options | {"method": method}).fit(x, y)
    mean, std = model.predict(x, return_std=True)
    scaled = model.input_scaler_.transform(x).astype(np.float32)
    found = ee.combine.gaussian(*model.posterior_.predict(scaled))
    scale, offset = model.target_scaler_.scale_, model.target_scaler_.mean_
    np.testing.assert_allclose(mean, found.mean[:, 0] * scale + offset, rtol=1e-5)
    np.testing.assert_allclose(std, np.sqrt(found.variance[:, 0]) * scale, rtol=1e-5)
    lower, upper = model.predict_interval(x)
    assert (lower < mean).all()
    assert (mean < upper).all()


def test_a_search_over_methods(x, labels, options):
    search = GridSearchCV(EnsembleClassifier(MLP, **options), {"method": [SEEDS, ee.methods.TabM(2)]}, cv=2)
    search.fit(x, labels)
    assert search.cv_results_["params"][1]["method"] == ee.methods.TabM(2)
    alone = clone(search.estimator).set_params(method=search.best_params_["method"]).fit(x, labels)
    np.testing.assert_array_equal(search.predict_proba(x), alone.predict_proba(x))
    assert clone(alone).method == alone.method
    assert not hasattr(clone(alone), "posterior_")


def test_another_fit_without_the_method(x, y, options, small):
    model = EnsembleRegressor(MLP, **options).fit(x, y)
    again = model.set_params(method=None, num_members=2).fit(x, y)
    np.testing.assert_array_equal(again.predict(x), EnsembleRegressor(MLP, **small).fit(x, y).predict(x))
    assert not hasattr(again, "posterior_")


@pytest.mark.parametrize("early", [True, False])
def test_early_stopping(x, y, options, early):
    model = EnsembleRegressor(MLP, **options | {"early_stopping": early}).fit(x, y)
    assert (model.posterior_.run.history.validation is not None) == early


@pytest.mark.parametrize(
    ("word", "value"), [("num_members", 3), ("bootstrap", True), ("warm_start", True), ("class_weight", "balanced")]
)
def test_what_the_method_decides(x, labels, options, word, value):
    with pytest.raises(TypeError, match=f"does not take `{word}` with `method`"):
        EnsembleClassifier(MLP, **options | {word: value}).fit(x, labels)


def test_messages(x, y, options):
    with pytest.raises(TypeError, match="does not take `sample_weight` with `method`"):
        EnsembleRegressor(MLP, **options).fit(x, y, sample_weight=np.ones(len(x)))
    with pytest.raises(TypeError, match="`sklearn.EnsembleRegressor.fit` needs `method` to be `None` or one such as"):
        EnsembleRegressor(MLP, **options | {"method": "swag"}).fit(x, y)
    with pytest.raises(TypeError, match="does not take `methods.Distilled`: its students are classifiers"):
        EnsembleRegressor(MLP, **options | {"method": ee.methods.Distilled(SEEDS)}).fit(x, y)
