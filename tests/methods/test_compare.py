"""`compare` equals a loop by hand, bit for bit; `cross_fit` equals one `fit` with the rows of the folds."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble.methods import compare, cross_fit, paired_differences

from ..factories import assert_same

KEY = jax.random.key(0)
X = np.asarray(jax.random.normal(KEY, (18, 3)))
Y = X[:, 0] * X[:, 1]
FOLDS = ee.resample.folds(18, 3, key=KEY)
SCORES = {"rmse": ee.scores.rmse, "crps": ee.scores.crps}


def make(key):
    return eqx.nn.MLP(3, "scalar", 4, 1, key=key)


def loss(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def method(rate):
    def train(data, key):
        ensemble = ee.build(make, 2, key=key)
        return ee.fit(ensemble, loss, optax.sgd(rate), data, epochs=2, batch_size=6, progress=False, key=key).predict

    return train


METHODS = {"slow": method(0.01), "fast": method(0.1)}


@pytest.fixture(scope="module")
def columns():
    return compare(METHODS, (X, Y), SCORES, folds=FOLDS, seeds=2, key=KEY)


def test_the_loops_by_hand(columns):
    assert list(columns) == ["method", "seed", "fold", "seconds", "rmse", "crps"]
    row = 0
    for seed in range(2):
        for fold in range(3):
            key = jax.random.fold_in(jax.random.fold_in(KEY, seed), fold)
            train, test = FOLDS.train[fold], FOLDS.test[fold]
            for name, one in METHODS.items():
                found = one((X[train], Y[train]), key)(X[test])
                assert (columns["method"][row], columns["seed"][row], columns["fold"][row]) == (name, seed, fold)
                for score, fn in SCORES.items():
                    assert columns[score][row] == float(fn(found, Y[test]))
                row += 1
    assert len(columns["crps"]) == row


def test_paired_differences_are_those_of_numpy(columns):
    gaps = columns["crps"][1::2] - columns["crps"][::2]
    found = paired_differences(columns, "crps", "slow", ratio=6 / 12)  # 6 test and 12 training rows
    assert found["slow"] == (0, 0)
    np.testing.assert_allclose(found["fast"], [gaps.mean(), np.sqrt((1 / 6 + 6 / 12) * gaps.var(ddof=1))])
    plain = paired_differences(columns, "crps", "slow")
    np.testing.assert_allclose(plain["fast"][1], gaps.std(ddof=1) / np.sqrt(6))


def test_members_that_diverge_are_scores_of_nan(columns):
    with pytest.warns(UserWarning, match="diverged"):
        found = compare({"slow": METHODS["slow"], "lost": method(1e30)}, (X, Y), SCORES, folds=FOLDS, key=KEY)
    np.testing.assert_array_equal(found["crps"][::2], columns["crps"][:6:2])
    assert np.isnan(found["crps"][1::2]).all()
    assert np.isnan(paired_differences(found, "crps", "slow")["lost"]).all()


class TestCrossFit:
    @pytest.mark.parametrize("times", [1, 2])
    def test_every_row_by_those_that_held_it_out(self, times):
        ensemble = ee.build(make, 3 * times, key=KEY)
        options = {"epochs": 2, "batch_size": 6, "progress": False, "key": KEY}
        run, held_out = cross_fit(ensemble, loss, optax.sgd(0.1), (X, Y), FOLDS, x=X, **options)
        rows = np.tile(FOLDS.train, (times, 1))
        expected = ee.fit(ensemble, loss, optax.sgd(0.1), (X, Y), rows=rows, **options)
        assert_same(run.ensemble, expected.ensemble)
        found = np.asarray(expected.predict(X))
        for fold in range(3):
            for row in FOLDS.test[fold]:
                np.testing.assert_allclose(held_out.mean[row], found[fold::3, row].mean(0), rtol=1e-5)
        assert held_out.num_members.tolist() == [times] * 18

    def test_a_fold_that_diverged_is_left_out(self):
        data = X, np.where(np.arange(18) == FOLDS.test[0][0], np.inf, Y)
        options = {"epochs": 1, "batch_size": 6, "progress": False, "key": KEY}
        ensemble = ee.build(make, 3, key=KEY)
        with pytest.warns(UserWarning, match="members 1, 2 diverged"):
            _, held_out = cross_fit(ensemble, loss, optax.sgd(0.1), data, FOLDS, x=X, **options)
        assert np.isfinite(held_out.mean[FOLDS.test[0]]).all()
        assert np.isnan(held_out.mean[FOLDS.test[1]]).all()

    def test_messages(self):
        ensemble = ee.build(make, 4, key=KEY)
        with pytest.raises(ValueError, match="as many members for each of 3 folds, got 4"):
            cross_fit(ensemble, loss, optax.sgd(0.1), (X, Y), FOLDS, x=X, epochs=1, key=KEY)
        with pytest.raises(TypeError, match="multiple values for keyword argument 'rows'"):
            cross_fit(ensemble[:3], loss, optax.sgd(0.1), (X, Y), FOLDS, x=X, epochs=1, rows=FOLDS.train, key=KEY)
