"""From a table to a calibrated ensemble: encoding, draws, selection and calibration, against loops by hand."""

import contextlib
import re
import signal
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest
from sklearn.compose import make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import OneHotEncoder

import eqx_ensemble as ee
from eqx_ensemble.sklearn import EnsembleClassifier, EnsembleRegressor
from eqx_ensemble.sklearn._member import TableNetwork

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(240, 3))
Y = X[:, 0] * X[:, 1] + 0.3 * RNG.normal(size=240)
LABELS = np.where(Y + 0.5 * RNG.normal(size=240) > 0, "yes", "no")
FEW = {"num_members": 4, "max_iter": 4, "random_state": 0}
SEED = np.random.RandomState(0).randint(np.iinfo(np.int32).max)  # what an estimator draws from `random_state`
REST, CALIBRATION = train_test_split(np.arange(240), test_size=24, random_state=SEED)
HELD_OUT = {"validation_fraction": 0.25}


@pytest.fixture(scope="module")
def regressor():
    return EnsembleRegressor(**FEW, **HELD_OUT).fit(X, Y)


def table(rows=60):
    frame = pd.DataFrame(X[:rows], columns=list("abc"))
    frame.loc[::7, "b"] = np.nan
    frame["colour"] = pd.Categorical(np.where(Y[:rows] > 0, "red", "blue"))
    frame["place"] = np.array(["north", None, "south"], object)[np.arange(rows) % 3]
    return frame


def test_a_table_is_encoded_as_by_hand():
    frame = table()
    model = EnsembleRegressor(**FEW, hidden_layer_sizes=(4,), early_stopping=False).fit(frame, Y[:60])
    numbers = SimpleImputer(strategy="median", add_indicator=True)
    encoder = make_column_transformer(
        (numbers, ["a", "b", "c"]), (OneHotEncoder(sparse_output=False), ["colour", "place"])
    )
    encoded = encoder.fit_transform(frame)
    assert encoded.shape == (60, 3 + 1 + 2 + 3)
    by_hand = EnsembleRegressor(**FEW, hidden_layer_sizes=(4,), early_stopping=False).fit(encoded, Y[:60])
    np.testing.assert_allclose(model.predict(frame), by_hand.predict(encoded), rtol=1e-5)

    other = frame.assign(place="west", colour="red")[["a", "b", "c", "colour", "place"]]
    assert np.isfinite(model.predict(other)).all()  # a category that it does not know
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame[["b", "a", "c", "colour", "place"]])
    with pytest.raises(TypeError, match=r"\['day'\] hold times"):
        model.fit(frame.assign(day=pd.Timestamp("2026-01-01")), Y[:60])
    names = pd.DataFrame({"name": [f"row {i}" for i in range(100)]})
    with pytest.warns(UserWarning, match=r"many categories in columns, {'name': 100}"):
        model.fit(names, Y[:100])


def test_arrays_may_have_missing_values():
    holes = np.where(RNG.random(X.shape) < 0.1, np.nan, X)
    assert np.isfinite(
        EnsembleRegressor(**FEW, hidden_layer_sizes=(4,), early_stopping=False).fit(holes, Y).predict(X)
    ).all()


@pytest.mark.parametrize("depth", [0, 2, 3])
def test_a_network_skips_the_blocks_that_it_does_not_use(depth):
    network = TableNetwork(5, 2, 3, 8, "relu", depth=depth, dropout=0.0, scale=1.0, key=KEY)
    x = np.asarray(X[0, [0, 1, 2, 0, 1]], np.float32)
    soft = x / np.sqrt(1 + (x / 3) ** 2)
    waves = np.cos(np.asarray(network.frequencies) * soft[:3, None] + np.asarray(network.phases))
    linear = lambda layer, x: np.asarray(layer.weight) @ x + np.asarray(layer.bias)
    hidden = np.maximum(linear(network.first, np.concatenate([soft, waves.ravel()])), 0)
    for block in network.blocks[:depth]:
        hidden = hidden + np.maximum(linear(block, hidden), 0)
    np.testing.assert_allclose(network(jnp.asarray(x)), linear(network.last, hidden), rtol=1e-4, atol=1e-6)
    grads = eqx.filter_grad(lambda network: jnp.sum(network(jnp.asarray(x))))(network)
    assert not any(np.any(block.weight) for block in grads.blocks[depth:])


def test_dropout_has_the_rate_of_the_member():
    network = TableNetwork(3, 1, 3, 256, "identity", depth=0, dropout=0.3, scale=1.0, key=KEY)
    network = eqx.tree_at(lambda n: (n.first.weight, n.first.bias), network, replace_fn=lambda x: 0 * x + 1)
    network = eqx.tree_at(lambda n: (n.last.weight, n.last.bias), network, (jnp.ones((1, 256)), jnp.zeros(1)))
    x = jnp.zeros(3)
    outputs = jax.vmap(lambda key: network(x, key=key))(jax.random.split(KEY, 200)) / network(x)[None]
    assert np.mean(outputs) == pytest.approx(1, abs=0.02)
    assert np.var(outputs) == pytest.approx(0.3 / 0.7 / 256, rel=0.3)


def test_members_differ_in_what_is_drawn(regressor):
    assert set(regressor.hyper_) == {"learning_rate", "weight_decay", "depth", "dropout", "scale"}
    drawn = ee.sweep.draw({"learning_rate": ee.sweep.LogUniform(3e-4, 5e-3)}, 4, key=jax.random.key(SEED))
    assert np.isin(regressor.hyper_["learning_rate"], drawn["learning_rate"]).all()
    fixed = EnsembleRegressor(**FEW, **HELD_OUT, learning_rate=1e-2, select=False).fit(X, Y)
    np.testing.assert_allclose(fixed.hyper_["learning_rate"], np.full(4, 1e-2), rtol=1e-6)
    np.testing.assert_array_equal(fixed.weights_, np.full(4, 0.25))
    assert np.unique(fixed.hyper_["weight_decay"]).size == 4


def averages(model, rows):
    """The standardised mean of every member for some rows."""
    scaled = (model.predict(X[rows]) - model.target_scaler_.mean_) / model.target_scaler_.scale_
    members = [jax.vmap(member)(jnp.asarray(X[rows], jnp.float32))[0] for member in model.ensemble_.unstack()]
    return scaled, (np.asarray(members) - model.target_scaler_.mean_) / model.target_scaler_.scale_


def test_the_selected_ensemble_is_the_best_that_greedy_steps_find(regressor):
    """On the rows that `train_test_split` holds out; every choice of each step is tried by hand."""
    held_out = REST[train_test_split(np.arange(216), test_size=54, random_state=SEED)[1]]
    every = EnsembleRegressor(**FEW, **HELD_OUT, select=False).fit(X, Y)
    _, members = averages(every, held_out)
    y = (Y[held_out] - every.target_scaler_.mean_) / every.target_scaler_.scale_
    np.testing.assert_allclose(every.validation_scores_, np.mean((members - y) ** 2, axis=1), rtol=1e-4)
    chosen, best = [int(np.argmin(every.validation_scores_))], (np.inf, None)
    while len(chosen) <= 8:
        score = np.mean((members[chosen].mean(axis=0) - y) ** 2)
        best = min(best, (score, np.bincount(chosen, minlength=4) / len(chosen)), key=lambda x: x[0])
        trials = [np.mean((members[[*chosen, i]].mean(axis=0) - y) ** 2) for i in range(4)]
        chosen.append(int(np.argmin(trials)))
    assert regressor.validation_score_ == pytest.approx(best[0], rel=1e-4)
    np.testing.assert_allclose(regressor.weights_, best[1][best[1] > 0], rtol=1e-5)
    mean, members = averages(regressor, held_out)
    np.testing.assert_allclose(mean, regressor.weights_ @ members, rtol=1e-4, atol=1e-5)


def test_calibration_rows_change_intervals_alone(regressor):
    wild = Y.copy()
    wild[CALIBRATION] += 100
    other = EnsembleRegressor(**FEW, **HELD_OUT).fit(X, wild)
    mean, std = regressor.predict(X, return_std=True)
    np.testing.assert_array_equal(other.predict(X), mean)
    assert (other.predict(X, return_std=True)[1] > 10 * std).all()

    # The 22nd of 24 errors in units of the standard deviation: ceil(.9 * 25) = 23, counted from the smallest.
    spread = std / regressor.std_scale_
    errors = np.abs(Y - mean)[CALIBRATION] / spread[CALIBRATION]
    lower, upper = regressor.predict_interval(X, level=0.9)
    np.testing.assert_allclose(upper - lower, 2 * np.sort(errors)[22] * spread, rtol=1e-4)
    np.testing.assert_allclose(regressor.std_scale_**2, np.mean(errors**2), rtol=1e-4)


def test_few_calibration_rows_say_little():
    """Of 24 rows, 24/25 are the highest level; fewer than 20 do not calibrate."""
    with pytest.warns(UserWarning, match="infinite"):
        lower, upper = EnsembleRegressor(**FEW, **HELD_OUT).fit(X, Y).predict_interval(X, level=0.97)
    assert np.isneginf(lower).all()
    assert np.isposinf(upper).all()
    few = EnsembleRegressor(**FEW).fit(X[:4], Y[:4])
    with pytest.warns(UserWarning, match="too few rows were given to `fit` to calibrate"):
        assert np.isfinite(few.predict_interval(X)).all()
    with pytest.raises(ValueError, match="2 rows or more for `early_stopping`, got 1 sample"):
        few.fit(X[:1], Y[:1])


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"make": eqx.nn.Linear, "hidden_layer_sizes": (4,)}, "cannot use `hidden_layer_sizes` with this `make`"),
        ({"optimiser": optax.adam, "weight_decay": 0.1}, "cannot use `weight_decay` with this `optimiser`"),
        ({"optimiser": optax.adam(1e-3), "learning_rate": 0.1}, "cannot use `learning_rate` with this `optimiser`"),
        ({"optimiser": "adam"}, "`optimiser` to be an optax optimiser, or a function.*got 'adam'"),
        ({"make": 5}, "`make` to be a function; got 5"),
    ],
)
def test_parameters_that_would_be_ignored_are_told(unhooked, parameters, message):
    with pytest.raises(TypeError, match=message):
        EnsembleRegressor(**parameters).fit(X, Y)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["gaussian", "point"])
def test_intervals_of_several_targets_cover_each(head):
    y = np.stack([Y, 1000 * Y[::-1]], axis=1)
    model = EnsembleRegressor(**FEW, **HELD_OUT, head=head).fit(X, y)
    lower, upper = model.predict_interval(X[CALIBRATION], level=0.9)
    covered = ((lower <= y[CALIBRATION]) & (y[CALIBRATION] <= upper)).mean(axis=0)
    np.testing.assert_allclose(covered, 23 / 24, atol=1e-6)  # those of calibration are covered by construction


def test_folds_train_every_row_and_select_by_those_held_out():
    """Draws of one learning rate far too small are not selected, and each selected draw has five networks."""
    model = EnsembleRegressor(**FEW | {"max_iter": 30}).fit(X, Y)
    assert model.ensemble_.num_members % 5 == 0
    shares = model.weights_.reshape(-1, 5)
    np.testing.assert_allclose(shares, np.repeat(shares[:, :1], 5, axis=1), rtol=1e-6)
    assert model.weights_.sum() == pytest.approx(1)
    assert model.validation_scores_.shape == (4,)
    assert model.validation_score_ <= model.validation_scores_.min() + 1e-6


def test_temperatures_are_fitted_to_rows_that_do_nothing_else():
    x, labels = np.tile(X, (5, 1)) + RNG.normal(size=(1200, 3)) * 0.1, np.tile(LABELS, 5)
    _, rows = train_test_split(np.arange(1200), test_size=120, random_state=SEED, stratify=labels == "yes")
    model = EnsembleClassifier(**FEW, **HELD_OUT).fit(x, labels)
    raw = jax.nn.log_softmax(model.temperature_ * model.predict_log_proba(x[rows]))
    wanted = ee.calibrate.temperature(raw[None], (labels[rows] == "yes").astype(int), pool="mixture")
    assert model.temperature_ == pytest.approx(float(wanted.temperature[0]), rel=1e-3)


@pytest.mark.slow
def test_labels_without_meaning_are_told_and_a_perfect_fit_is_not():
    x = RNG.normal(size=(1000, 3))
    with pytest.warns(UserWarning, match="leaves probabilities as they are"):
        model = EnsembleClassifier(**FEW, **HELD_OUT).fit(x, RNG.permutation(1000) % 2)
    assert model.temperature_ == 1
    perfect = EnsembleClassifier(**FEW | {"max_iter": 20}, **HELD_OUT).fit(x + 9 * np.sign(x), x[:, 0] > 0)
    assert perfect.temperature_ == 1


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_and_a_time_limit_give_what_there_is():
    long = FEW | {"max_iter": 10**6, "n_iter_no_change": 10**6}
    for options in ({"time_limit": 3.0}, {}):
        if not options:
            threading.Timer(3, signal.raise_signal, [signal.SIGINT]).start()
        with contextlib.nullcontext() if options else pytest.warns(UserWarning, match="was interrupted"):
            model = EnsembleRegressor(**long, **HELD_OUT, **options).fit(X, Y)
        assert 0 < model.n_iter_ < 10**6
        assert np.isfinite(model.predict_interval(X)).all()


@pytest.mark.slow
def test_the_progress_line_tells_of_the_ensemble(capsys):
    EnsembleRegressor(**FEW | {"max_iter": 40}, **HELD_OUT, verbose=True).fit(X, Y)
    assert re.search(r"\d+ training, best [\d.]+, ensemble [\d.]+", capsys.readouterr().err)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_a_mesh_changes_nothing(regressor):
    sharded = EnsembleRegressor(**FEW, **HELD_OUT, mesh=ee.make_mesh(members=4)).fit(X, Y)
    np.testing.assert_allclose(sharded.predict(X), regressor.predict(X), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(sharded.weights_, regressor.weights_, rtol=1e-6)


@pytest.mark.slow
def test_diverged_draws_are_left_out():
    with pytest.warns(UserWarning, match="diverged"):
        model = EnsembleRegressor(**FEW, **HELD_OUT, optimiser=_explodes).fit(X, Y)
    rates = ee.sweep.draw({"learning_rate": ee.sweep.LogUniform(3e-4, 5e-3)}, 4, key=jax.random.key(SEED))
    lost = np.asarray(rates["learning_rate"]) > 1.2e-3
    assert 0 < lost.sum() < 4
    np.testing.assert_array_equal(np.isnan(model.validation_scores_), lost)
    assert np.isfinite(model.predict(X)).all()


def _explodes(rate):
    return optax.sgd(jnp.where(rate > 1.2e-3, 1e30, rate))
