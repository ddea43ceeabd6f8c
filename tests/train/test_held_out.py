"""Predictions of rows by members that were not trained on them, directly from a run."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee

from ..factories import assert_same

KEY = jax.random.key(0)
ROWS, MEMBERS = 31, 6
X = jax.random.normal(KEY, (ROWS, 3))
Y = jnp.sin(X[:, :1])
ADAM = optax.adam(1e-2)


def make(key):
    return eqx.nn.MLP(3, 1, 8, 1, key=key)


def loss(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def fitted(rows, y=Y, members=MEMBERS, **options):
    options = {"epochs": 2, "batch_size": 8, "progress": False, "key": KEY} | options
    return ee.fit(ee.build(make, members, key=KEY), loss, ADAM, (X, y), rows=rows, **options)


class TestOutOfBag:
    rows = np.asarray(ee.resample.bootstrap(ROWS, MEMBERS, key=KEY))

    def test_is_the_mean_of_the_members_not_trained_on_the_row(self):
        run = fitted(self.rows)
        found, models = run.out_of_bag(X), run.ensemble.unstack()
        for row in range(ROWS):
            unseen = [np.asarray(models[i](X[row])) for i in range(MEMBERS) if row not in self.rows[i]]
            assert found.num_members[row] == len(unseen)
            if unseen:
                np.testing.assert_allclose(found.mean[row], np.mean(unseen, axis=0), rtol=1e-5, atol=1e-6)

    def test_a_poisoned_row_reaches_none_of_its_predictions(self):
        """A target of 1e6 leaves its mark on every member that trained on it, and none on the row's own prediction."""
        clean = fitted(self.rows)
        for row in (3, 17):
            poisoned = fitted(self.rows, Y.at[row].set(1e6))
            unseen = ~(self.rows == row).any(axis=1)
            assert 0 < unseen.sum() < MEMBERS
            assert_same(poisoned.out_of_bag(X).mean[row], clean.out_of_bag(X).mean[row])
            seen = np.asarray(poisoned.ensemble(X[row])[:, 0] - clean.ensemble(X[row])[:, 0]) != 0
            assert seen.tolist() == (~unseen).tolist()

    def test_of_weights(self):
        weights = ee.resample.poisson_weights(ROWS, MEMBERS, key=KEY)

        def weighted(model, batch, key):
            x, y, weight = batch
            return jnp.mean(weight * (jax.vmap(model)(x) - y)[:, 0] ** 2)

        ensemble = ee.build(make, MEMBERS, key=KEY)
        run = ee.fit(ensemble, weighted, ADAM, (X, Y, ee.Each(weights)), epochs=1, progress=False, key=KEY)
        expected = ee.resample.out_of_bag_mean(ee.predict(run.ensemble, X), weights)
        assert_same(run.out_of_bag(X, weights), expected)
        with pytest.raises(TypeError, match="called without `rows`"):
            run.out_of_bag(X)

    def test_of_several_runs(self):
        """A continued run has been trained on the rows of both."""
        both = fitted(self.rows)
        other = np.asarray(ee.resample.bootstrap(ROWS, MEMBERS, key=jax.random.key(5)))
        went_on = lambda rows: ee.fit(both, loss, ADAM, (X, Y), rows=rows, epochs=1, progress=False, key=KEY)
        assert_same(went_on(self.rows).rows, self.rows)
        assert_same(went_on(other).rows, np.concatenate([self.rows, other], axis=1))
        assert went_on(None).rows is None

    @pytest.mark.filterwarnings("ignore:.*diverged")
    def test_members_that_diverged_count_for_nothing(self):
        def faulty(model, batch, key, hyper):
            return jnp.where(hyper == 2, jnp.nan, loss(model, batch, key))

        ensemble = ee.build(make, MEMBERS, key=KEY)
        run = ee.fit(
            ensemble, faulty, ADAM, (X, Y), rows=self.rows, hyper=jnp.arange(MEMBERS), epochs=1, progress=False, key=KEY
        )
        with pytest.warns(UserWarning, match="Run.out_of_bag"):
            found = run.out_of_bag(X)
        kept = [0, 1, 3, 4, 5]
        expected = ee.resample.out_of_bag_mean(ee.predict(run.ensemble[kept], X), self.rows[kept])
        np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-6)
        assert_same(found.num_members, expected.num_members)


def test_of_least_squares_compared_with_scikit_learn():
    """Its bagged linear regressions on the very rows that it drew; ours are trained to the bottom of the same loss."""
    ensemble = pytest.importorskip("sklearn.ensemble")
    from sklearn.linear_model import LinearRegression

    x, noise = np.asarray(X), np.random.default_rng(0).standard_normal((ROWS, 1))
    y = x @ np.array([[1.0], [-2.0], [0.5]]) + 0.3 * noise
    theirs = ensemble.BaggingRegressor(LinearRegression(), n_estimators=12, oob_score=True, random_state=0)
    theirs.fit(x, y[:, 0])
    rows = np.stack(theirs.estimators_samples_)
    ours = ee.fit(
        ee.build(lambda key: eqx.nn.Linear(3, 1, key=key), 12, key=KEY), loss, optax.adam(0.05),
        (X, jnp.asarray(y, jnp.float32)), rows=rows, epochs=1500, batch_size=ROWS, shuffle=False, progress=False,
        key=KEY,
    )  # fmt: skip
    found = ours.out_of_bag(X)
    assert (found.num_members > 0).all()
    # Fifteen hundred steps of Adam end within this distance of the minimum.
    np.testing.assert_allclose(found.mean[:, 0], theirs.oob_prediction_, atol=1e-3)
    error = lambda prediction: np.mean((prediction - y[:, 0]) ** 2)
    np.testing.assert_allclose(error(np.asarray(found.mean[:, 0])), error(theirs.oob_prediction_), rtol=1e-3)
    np.testing.assert_raises(
        AssertionError, np.testing.assert_allclose, ee.predict(ours.ensemble, X).mean(0)[:, 0],
        theirs.oob_prediction_, atol=1e-3,
    )  # fmt: skip


class TestOutOfFold:
    folds = ee.resample.folds(ROWS, 4, key=KEY)

    def test_is_the_prediction_of_the_fold_that_held_it_out(self):
        run = fitted(self.folds.train, members=4)
        found, models = run.out_of_fold(X, self.folds), run.ensemble.unstack()
        for row in range(ROWS):
            (member,) = np.flatnonzero(self.folds.in_test[:, row])
            np.testing.assert_allclose(found.mean[row], models[member](X[row]), rtol=1e-5, atol=1e-6)

    def test_of_inputs_with_a_part_of_a_members_own(self):
        run = fitted(self.folds.train, members=4)
        fn = lambda model, x: model(x[0]) * x[1]
        scale = jnp.arange(1.0, 5.0)[:, None] * jnp.ones((4, ROWS))
        found = run.out_of_fold((X, ee.Each(scale)), self.folds, fn=fn).mean
        number = 1.0 + np.argmax(np.asarray(self.folds.in_test), axis=0).astype(np.float32)
        expected = run.out_of_fold(X, self.folds).mean * number[:, None]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)

    def test_what_would_leak_is_refused(self):
        run = fitted(self.folds.train, members=4)
        with pytest.raises(ValueError, match="needs the folds that were passed to `fit`"):
            run.out_of_fold(X, ee.resample.folds(ROWS, 4, key=jax.random.key(1)))
        with pytest.raises(ValueError, match="expected 31, got 10"):
            run.out_of_fold(X[:10], self.folds)
        copied = dataclasses.replace(run, revived=[ee.train.Revival(2, 5, 3)])
        with pytest.raises(ValueError, match="2 of 3"):
            copied.out_of_fold(X, self.folds)
        with pytest.raises(ValueError, match="2 of 3"):
            copied.out_of_bag(X)

    def test_other_folds(self):
        run = fitted(self.folds.train, members=4)
        with pytest.raises(ValueError, match="one fold per member, got 5 folds and 4 members"):
            run.out_of_fold(X, ee.resample.folds(ROWS, 5))


class TestCrossFit:
    def test_is_training_each_fold_alone(self):
        """With scikit-learn's splits, each fold trained by itself."""
        from sklearn.model_selection import KFold

        folds = ee.resample.from_splits(KFold(4, shuffle=True, random_state=0).split(X), num_rows=ROWS)
        ensemble = ee.build(make, 8, key=KEY)
        run, held_out = ee.methods.cross_fit(
            ensemble, loss, ADAM, (X, Y), folds, x=X, epochs=3, batch_size=8, progress=False, key=KEY
        )
        expected = np.zeros((ROWS, 1))
        for i in range(8):
            alone = ee.fit(
                ensemble[[i]], loss, ADAM, (X, Y), rows=folds.train[i % 4][None], epochs=3, batch_size=8,
                progress=False, key=KEY,
            )  # fmt: skip
            np.testing.assert_allclose(run.history.loss[i], alone.history.loss[0], rtol=1e-4)
            test = np.flatnonzero(folds.in_test[i % 4])
            expected[test] += np.asarray(ee.predict(alone.ensemble, X[test])[0]) / 2
        np.testing.assert_allclose(held_out.mean, expected, rtol=1e-4, atol=1e-5)
        assert (held_out.num_members == 2).all()

    def test_a_wrong_x_is_found_before_training(self):
        never = lambda model, batch, key: pytest.fail("it trained")
        folds = ee.resample.folds(ROWS, 3, key=KEY)
        with pytest.raises(Exception, match="dot_general|shape"):
            ee.methods.cross_fit(ee.build(make, 3, key=KEY), never, ADAM, (X, Y), folds, x=X[:, :2], epochs=1, key=KEY)

    def test_refused(self):
        folds = ee.resample.folds(ROWS, 4, key=KEY)
        with pytest.raises(ValueError, match="got 6 members and 4 folds"):
            ee.methods.cross_fit(
                ee.build(make, 6, key=KEY), loss, ADAM, (X, Y), folds, x=X, epochs=1, progress=False, key=KEY
            )
