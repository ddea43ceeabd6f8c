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
OPTIONS = {"epochs": 2, "batch_size": 6, "progress": False}


def make(key):
    return eqx.nn.MLP(3, "scalar", 4, 1, key=key)


def loss(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def method(rate):
    return lambda data, key: ee.fit(ee.build(make, 2, key=key), loss, optax.sgd(rate), data, key=key, **OPTIONS).predict


METHODS = {"slow": method(0.01), "fast": method(0.1)}


@pytest.fixture(scope="module")
def columns():
    return compare(METHODS, (X, Y), SCORES, folds=FOLDS, seeds=2, key=KEY)


def test_the_loops_by_hand(columns):
    assert list(columns) == ["method", "seed", "fold", "seconds", "rmse", "crps"]
    expected = []
    for seed in range(2):
        for fold in range(3):
            key = jax.random.fold_in(jax.random.fold_in(KEY, seed), fold)
            train, test = FOLDS.train[fold], FOLDS.test[fold]
            for name, one in METHODS.items():
                found = one((X[train], Y[train]), key)(X[test])
                expected.append((name, seed, fold, *(float(fn(found, Y[test])) for fn in SCORES.values())))
    assert list(zip(*(columns[name] for name in columns if name != "seconds"), strict=True)) == expected


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


def test_every_row_is_predicted_by_those_that_held_it_out():
    ensemble, sgd = ee.build(make, 6, key=KEY), optax.sgd(0.1)
    run, held_out = cross_fit(ensemble, loss, sgd, (X, Y), FOLDS, x=X, key=KEY, **OPTIONS)
    expected = ee.fit(ensemble, loss, sgd, (X, Y), rows=np.tile(FOLDS.train, (2, 1)), key=KEY, **OPTIONS)
    assert_same(run.ensemble, expected.ensemble)
    found = np.asarray(expected.predict(X))
    for fold in range(3):
        for row in FOLDS.test[fold]:
            np.testing.assert_allclose(held_out.mean[row], found[fold::3, row].mean(0), rtol=1e-5)
    assert held_out.num_members.tolist() == [2] * 18
    data = X, np.where(np.arange(18) == FOLDS.test[0][0], np.inf, Y)  # a fold that diverges is left out
    with pytest.warns(UserWarning, match="members 1, 2 diverged"):
        _, held_out = cross_fit(ensemble[:3], loss, sgd, data, FOLDS, x=X, key=KEY, **OPTIONS)
    assert np.isfinite(held_out.mean[FOLDS.test[0]]).all()
    assert np.isnan(held_out.mean[FOLDS.test[1]]).all()
    with pytest.raises(ValueError, match="as many members for each of 3 folds, got 4"):
        cross_fit(ensemble[:4], loss, sgd, (X, Y), FOLDS, x=X, epochs=1, key=KEY)
