"""Training and prediction against NumPy, a loop over members, and scikit-learn's own conventions."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.optimize
import scipy.stats
from sklearn.exceptions import DataConversionWarning
from sklearn.preprocessing import StandardScaler

import eqx_ensemble as ee
from eqx_ensemble.sklearn import EnsembleClassifier, EnsembleRegressor

CLOSE = {"rtol": 2e-5, "atol": 1e-5}


def member_outputs(model, x):
    """What each member gives alone, in the unit of the data."""
    return [jax.vmap(member)(jnp.asarray(x, jnp.float32)) for member in model.ensemble_.unstack()]


def test_rows_of_weight_zero_are_absent(x, y):
    kept, options = np.arange(len(x)) % 4 != 0, {"num_members": 2, "max_iter": 2, "batch_size": 8, "random_state": 0}
    fitted = lambda *data: EnsembleRegressor(eqx.nn.Linear, **options).fit(*data)
    found, expected = fitted(x, np.where(kept, y, 1e6), kept * 1.0), fitted(x[kept], y[kept])
    np.testing.assert_allclose(found.predict(x), expected.predict(x), **CLOSE)


def test_a_target_of_one_column_is_flat_with_a_warning(x, y):
    model = EnsembleRegressor(eqx.nn.Linear, num_members=2, max_iter=1, batch_size=8, random_state=0)
    with pytest.warns(DataConversionWarning, match="column-vector"):
        assert model.fit(x, y[:, None]).predict(x).shape == y.shape


@pytest.mark.slow
def test_members_are_those_of_gradient_descent_in_numpy(x, y):
    weights = np.random.default_rng(2).uniform(0.5, 3, len(x))
    options = {"num_members": 2, "head": "point", "max_iter": 5, "early_stopping": False, "random_state": 0}
    model = EnsembleRegressor(eqx.nn.Linear, optimiser=optax.sgd(0.1), **options).fit(x, y, sample_weight=weights)
    # Linear least squares on standardised data; rows have weights of mean one.
    scaler, target = StandardScaler().fit(x, sample_weight=weights), StandardScaler()
    target.fit(y[:, None], sample_weight=weights)
    z, t, share = scaler.transform(x), target.transform(y[:, None])[:, 0], weights / weights.mean()
    key, wanted = jax.random.key(np.random.RandomState(0).randint(np.iinfo(np.int32).max)), []
    for own in ee.member_keys(key, 2):
        start = eqx.nn.Linear(3, 1, key=own)
        weight, bias = np.asarray(start.weight[0]), np.asarray(start.bias[0])
        for _ in range(5):
            error = share * (z @ weight + bias - t)
            weight, bias = weight - 0.1 * 2 * z.T @ error / len(z), bias - 0.1 * 2 * error.mean()
        wanted.append(target.inverse_transform((z @ weight + bias)[:, None])[:, 0])
    np.testing.assert_allclose(model.predict(x), np.mean(wanted, axis=0), **CLOSE)
    np.testing.assert_allclose(member_outputs(model, x), wanted, **CLOSE)


@pytest.mark.slow
def test_gaussian_heads_predict_the_mixture_of_members(x, y, small):
    model = EnsembleRegressor(**small).fit(x, y)
    means, variances = map(np.asarray, zip(*member_outputs(model, x), strict=True))
    assert means.shape == variances.shape == (2, len(x))
    mean, std = model.predict(x, return_std=True)
    assert mean.dtype == std.dtype == np.float64
    np.testing.assert_allclose(mean, means.mean(axis=0), **CLOSE)
    np.testing.assert_allclose(std**2, variances.mean(axis=0) + means.var(axis=0), rtol=1e-4)
    np.testing.assert_array_equal(model.predict(x), mean)

    lower, upper = model.predict_interval(x, level=0.8)
    for row in (0, 7):
        below = lambda t, row=row: scipy.stats.norm.cdf(t, means[:, row], np.sqrt(variances[:, row])).mean()
        assert below(lower[row]) == pytest.approx(0.1, abs=1e-4)
        assert below(upper[row]) == pytest.approx(0.9, abs=1e-4)


@pytest.mark.slow
def test_point_heads_predict_the_members_mean_and_spread(x, y, small):
    model = EnsembleRegressor(**small | {"num_members": 5}, head="point").fit(x, y)
    members = np.asarray(member_outputs(model, x))
    mean, std = model.predict(x, return_std=True)
    np.testing.assert_allclose(mean, members.mean(axis=0), **CLOSE)
    np.testing.assert_allclose(std, members.std(axis=0), rtol=1e-3, atol=1e-4)
    lower, upper = model.predict_interval(x, level=0.5)
    np.testing.assert_allclose(lower, np.sort(members, axis=0)[1], **CLOSE)
    np.testing.assert_allclose(upper, np.sort(members, axis=0)[3], **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["gaussian", "point"])
def test_many_targets(x, y, small, head):
    targets = np.stack([y, -1000 * y], axis=1)
    model = EnsembleRegressor(**small | {"max_iter": 30}, head=head).fit(x, targets)
    mean, std = model.predict(x, return_std=True)
    lower, upper = model.predict_interval(x)
    assert mean.shape == std.shape == lower.shape == upper.shape == (len(x), 2)
    assert (lower <= upper).all()
    assert model.score(x, targets) > 0.1
    assert 200 < std[:, 1].mean() / std[:, 0].mean() < 5000  # units are those of each target


@pytest.mark.slow
def test_a_large_offset_costs_no_precision(x, y, small):
    model = EnsembleRegressor(**small | {"max_iter": 60}).fit(x + 1e8, y + 1e10)
    plain = EnsembleRegressor(**small | {"max_iter": 60}).fit(x, y)
    np.testing.assert_allclose(model.predict(x + 1e8) - 1e10, plain.predict(x), atol=0.05)
    assert model.score(x + 1e8, y + 1e10) > 0.3


@pytest.mark.slow
def test_probabilities_are_the_mean_of_the_members(x, labels, small):
    model = EnsembleClassifier(**small).fit(x, labels)
    assert model.classes_.tolist() == ["high", "low", "middle"]
    wanted = np.mean([jax.nn.softmax(logits) for logits in member_outputs(model, x)], axis=0)
    np.testing.assert_allclose(model.predict_proba(x), wanted, **CLOSE)
    np.testing.assert_allclose(model.predict_log_proba(x), np.log(wanted), **CLOSE)
    np.testing.assert_array_equal(model.predict(x), model.classes_[wanted.argmax(axis=1)])


@pytest.mark.slow
def test_class_weights_multiply_sample_weights(x, labels, small):
    given = {"low": 3.0, "middle": 1.0, "high": 0.5}
    weights = np.random.default_rng(0).uniform(1, 2, len(x))
    by_class = EnsembleClassifier(**small, class_weight=given).fit(x, labels, sample_weight=weights)
    by_row = EnsembleClassifier(**small).fit(x, labels, sample_weight=weights * [given[label] for label in labels])
    np.testing.assert_allclose(by_class.predict_proba(x), by_row.predict_proba(x), rtol=1e-6)
    balanced = EnsembleClassifier(**small, class_weight="balanced").fit(x, labels)
    assert np.abs(balanced.predict_proba(x) - by_class.predict_proba(x)).max() > 1e-3


@pytest.mark.slow
def test_weights_are_repetitions(x, y, small):
    """In whole batches; the weight zero is an absent row. Batches of 24 rows, and of 36."""
    weights = np.tile([1, 2], len(x) // 2)
    rows = np.repeat(np.arange(len(x)), weights)
    fit = EnsembleRegressor(**small | {"max_iter": 10}, batch_size=64).fit
    weighted = fit(x, y, sample_weight=weights).predict(x)
    np.testing.assert_allclose(weighted, fit(x[rows], y[rows]).predict(x), rtol=1e-4)
    assert np.abs(weighted - fit(x, y).predict(x)).max() > 0.01

    kept = np.arange(len(x)) != 5
    without = fit(x[kept], y[kept]).predict(x)
    np.testing.assert_array_equal(fit(x, y, sample_weight=kept).predict(x), without)


@pytest.mark.slow
def test_out_of_bag_predictions_are_those_of_a_loop(x, y, labels, small):
    options = small | {"num_members": 6, "bootstrap": True}
    model = EnsembleRegressor(**options).fit(x, y)
    assert model.rows_.shape == (6, len(x))
    means = np.asarray([mean for mean, _ in member_outputs(model, x)])
    wanted = np.full(len(x), np.nan)
    for row in range(len(x)):
        unseen = [mean[row] for mean, rows in zip(means, model.rows_, strict=True) if row not in rows]
        wanted[row] = np.mean(unseen) if unseen else np.nan
    np.testing.assert_allclose(model.oob_prediction_, wanted, **CLOSE)
    known = ~np.isnan(wanted)
    residual = ((y - wanted)[known] ** 2).sum() / ((y[known] - y[known].mean()) ** 2).sum()
    assert model.oob_score_ == pytest.approx(1 - residual, abs=1e-4)

    model = EnsembleClassifier(**options).fit(x, labels)
    p = model.oob_decision_function_
    known = ~np.isnan(p).any(axis=1)
    assert model.oob_score_ == (model.classes_[p[known].argmax(axis=1)] == labels[known]).mean()
    np.testing.assert_allclose(p[known].sum(axis=1), 1, rtol=1e-6)


@pytest.mark.slow
def test_classes_are_those_of_the_labels(x, small):
    with pytest.raises(ValueError, match="two or more classes, got one class"):
        EnsembleClassifier(**small).fit(x, np.ones(len(x), int))
    assert EnsembleClassifier(**small).fit(x, x[:, 0] > 3).predict(x).dtype == bool


@pytest.mark.slow
def test_rows_for_validation_are_in_no_bag(x, y, small):
    options = small | {"num_members": 6, "bootstrap": True, "early_stopping": True, "validation_fraction": 0.25}
    options["select"] = False
    model = EnsembleRegressor(**options).fit(x, y)
    held_out = np.setdiff1d(np.arange(len(x)), model.rows_)
    assert len(held_out) >= 6
    assert np.isnan(model.oob_prediction_[held_out]).all()


@pytest.mark.slow
def test_one_bag_without_a_row_left_is_told(small):
    with pytest.warns(UserWarning, match="No row is out of bag"):
        model = EnsembleRegressor(**small | {"num_members": 1, "batch_size": 1, "bootstrap": True}).fit([[1.0]], [2.0])
    assert np.isnan(model.oob_score_)


@pytest.mark.slow
def test_early_stopping_keeps_the_best_weights(x, y, small):
    options = small | {"max_iter": 200, "learning_rate": 0.3, "early_stopping": True, "n_iter_no_change": 4}
    options["num_members"] = 1
    model = EnsembleRegressor(**options, validation_fraction=0.3).fit(x, y)
    assert model.n_iter_ == len(model.loss_curve_) == len(model.validation_loss_curve_) < 200
    assert np.argmin(model.validation_loss_curve_) == model.n_iter_ - 5
    long = EnsembleRegressor(**options | {"n_iter_no_change": 500}, validation_fraction=0.3).fit(x, y)
    assert long.n_iter_ == 200
