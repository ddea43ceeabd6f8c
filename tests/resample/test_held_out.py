import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eqx_ensemble as ee
from eqx_ensemble import resample

KEY = jax.random.key(3)
MEMBERS, ROWS = 6, 11
ROWS_SEEN = np.asarray(resample.bootstrap(ROWS, MEMBERS, key=KEY)).copy()
ROWS_SEEN[:, 0] = 4  # a row that every member saw
UNSEEN = np.stack([~np.isin(np.arange(ROWS), own) for own in ROWS_SEEN])
PREDICTIONS = np.random.default_rng(0).normal(size=(MEMBERS, ROWS, 2)).astype(np.float32)
WEIGHTS = np.array([0.5, 1, 0, 2, 1, 3])


def expected_means(predictions, unseen, weights=None):
    """Row by row, over the members that did not see it."""
    weights = np.ones(len(predictions)) if weights is None else weights
    used = unseen & (weights > 0)[:, None]
    means = np.full(predictions.shape[1:], np.nan)
    for row in range(predictions.shape[1]):
        if used[:, row].any():
            own = used[:, row]
            means[row] = np.average(predictions[own, row].astype(np.float64), axis=0, weights=weights[own])
    return means, used.sum(axis=0)


def assert_means(got, expected):
    assert isinstance(got, resample.HeldOut)
    np.testing.assert_allclose(got.mean, expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got.num_members, expected[1])


# Few shapes, because each is compiled.
@settings(max_examples=40, deadline=None)
@given(st.sampled_from([1, 4, 13]), st.sampled_from([1, 3]), st.sampled_from([1, 6]), st.integers(0, 2**31))
def test_out_of_bag_is_what_is_not_among_the_rows(num_rows, members, size, seed):
    rows = np.random.default_rng(seed).integers(num_rows, size=(members, size))
    expected = np.stack([~np.isin(np.arange(num_rows), own) for own in rows])
    np.testing.assert_array_equal(resample.out_of_bag(rows, num_rows), expected)
    counts = resample.counts(rows, num_rows)
    np.testing.assert_array_equal(resample.out_of_bag(counts, num_rows), expected)
    np.testing.assert_array_equal(resample.out_of_bag(counts > 0, num_rows), expected)
    np.testing.assert_array_equal(jax.jit(resample.out_of_bag, static_argnums=1)(rows, num_rows), expected)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("shape", [(), (2,), (2, 1)])
def test_out_of_bag_mean_is_the_mean_row_by_row(weights, shape):
    predictions = PREDICTIONS[..., 0] if shape == () else PREDICTIONS.reshape(MEMBERS, ROWS, *shape)
    expected = expected_means(predictions, UNSEEN, weights)
    assert expected[1][4] == 0
    assert np.isnan(expected[0][4]).all()
    got = resample.out_of_bag_mean(predictions, ROWS_SEEN, weights=weights)
    assert_means(got, expected)
    counts = resample.counts(ROWS_SEEN, ROWS)
    assert_means(jax.jit(resample.out_of_bag_mean)(predictions, counts, weights=weights), expected)
    with pytest.raises(AssertionError):
        assert_means(resample.out_of_bag_mean(predictions, np.roll(ROWS_SEEN, 1, axis=0), weights=weights), expected)
    with pytest.raises(AssertionError):
        assert_means(got, expected_means(predictions, ~UNSEEN, weights))


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_members_trained_on_a_row_do_not_predict_it(poison, weights):
    left_out = ~UNSEEN if weights is None else ~(UNSEEN & (weights > 0)[:, None])
    clean = resample.out_of_bag_mean(PREDICTIONS, ROWS_SEEN, weights=weights)
    poisoned = np.where(left_out[..., None], np.float32(poison), PREDICTIONS)
    got = resample.out_of_bag_mean(poisoned, ROWS_SEEN, weights=weights)
    np.testing.assert_array_equal(got.mean, clean.mean)
    member, row = np.argwhere(~left_out)[0]
    poisoned[member, row] = poison
    got = resample.out_of_bag_mean(poisoned, ROWS_SEEN, weights=weights)
    changed = np.flatnonzero((np.asarray(got.mean) != np.asarray(clean.mean)).any(axis=1))
    assert set(changed) == {row, 4}, "row 4 has no mean, and NaN differs from itself"


def test_gradients_are_finite():
    poisoned = jnp.where(UNSEEN[..., None], PREDICTIONS, jnp.nan)
    loss = lambda p: jnp.nansum(resample.out_of_bag_mean(p, ROWS_SEEN).mean ** 2)
    gradient = jax.grad(loss)(poisoned)
    assert np.isfinite(gradient).all()
    assert ((np.asarray(gradient) != 0).any(axis=2) == UNSEEN).all()


def test_integers_are_rows_and_floats_are_weights():
    drawn = np.array([[0, 2], [1, 1]])
    np.testing.assert_array_equal(resample.out_of_bag(drawn, 2 + 1), [[False, True, False], [True, False, True]])
    np.testing.assert_array_equal(resample.out_of_bag(drawn.astype(float), 2), [[True, False], [False, False]])


def assert_same_held_out(got, expected):
    np.testing.assert_array_equal(got.mean, expected.mean)
    np.testing.assert_array_equal(got.num_members, expected.num_members)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_out_of_fold_is_the_held_out_prediction(data):
    """Bit for bit, whether members predict all rows or their own."""
    num_rows, num_folds = data.draw(st.sampled_from([(2, 2), (7, 3), (7, 7), (12, 5), (12, 4)]))
    folds = resample.folds(num_rows, num_folds, key=jax.random.key(data.draw(st.integers(0, 2**31))))
    predictions = np.random.default_rng(0).normal(size=(num_folds, num_rows, 2)).astype(np.float32)
    expected = predictions[np.argmax(folds.in_test, axis=0), np.arange(num_rows)]
    got = resample.out_of_fold(predictions, folds)
    np.testing.assert_array_equal(got.mean, expected)
    np.testing.assert_array_equal(got.num_members, 1)
    own = np.take_along_axis(predictions, np.asarray(folds.test)[..., None], axis=1)
    assert_same_held_out(resample.out_of_fold(own, folds, rows="test"), got)
    poisoned = np.where(np.asarray(folds.in_test)[..., None], predictions, np.float32(np.nan))
    assert_same_held_out(resample.out_of_fold(poisoned, folds), got)
    poisoned = np.where(np.asarray(folds.valid)[..., None], own, np.float32(np.nan))
    assert_same_held_out(resample.out_of_fold(poisoned, folds, rows="test"), got)
    wrong = resample.out_of_fold(predictions, folds._replace(in_test=folds.in_train))
    assert (np.asarray(wrong.mean) != expected).any()


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_rows_tested_often_or_never(weights):
    """As ShuffleSplit does."""
    draws = [np.random.default_rng(i).permutation(ROWS) for i in range(MEMBERS)]
    folds = resample.from_splits([(draw[:5], draw[5 : 7 + i % 3]) for i, draw in enumerate(draws)], ROWS)
    expected = expected_means(PREDICTIONS, np.asarray(folds.in_test), weights)
    assert {0, 1, 2} <= set(expected[1])
    assert_means(resample.out_of_fold(PREDICTIONS, folds, weights=weights), expected)
    own = np.take_along_axis(PREDICTIONS, np.asarray(folds.test)[..., None], axis=1)
    assert_means(resample.out_of_fold(own, folds, rows="test", weights=weights), expected)
    jitted = jax.jit(lambda p, folds: resample.out_of_fold(p, folds, rows="test", weights=weights))
    assert_means(jitted(own, folds), expected)
    with pytest.raises(AssertionError):
        assert_means(resample.out_of_fold(own[::-1], folds, rows="test", weights=weights), expected)


def test_half_precision_is_computed_in_float32():
    folds = resample.folds(10, 2)
    half = jnp.arange(20, dtype=jnp.bfloat16).reshape(2, 10)
    assert resample.out_of_fold(half, folds).mean.dtype == jnp.float32
    assert resample.out_of_bag_mean(half, folds.train).mean.dtype == jnp.float32


def test_out_of_fold_of_a_run_is_the_loop_over_folds():
    """Least squares, whose best fit is known: every held-out prediction is that of the other rows' best fit."""
    x = jax.random.normal(jax.random.key(0), (20, 2))
    y = jnp.sin(3 * x[:, :1]) + x[:, 1:]
    folds = resample.folds(20, 4, key=KEY)
    ensemble = ee.build(lambda key: eqx.nn.Linear(2, 1, use_bias=False, key=key), 4, key=KEY)
    loss = lambda model, batch, key: jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2)
    options = {"steps": 200, "batch_size": 15, "key": KEY}
    run = ee.fit(ensemble, loss, optax.sgd(0.3), (x, y), rows=folds.train, **options)
    expected = np.empty((20, 1))
    for own in np.asarray(folds.in_test):
        fitted = np.linalg.lstsq(np.asarray(x)[~own], np.asarray(y)[~own], rcond=None)[0]
        expected[own] = np.asarray(x)[own] @ fitted
    np.testing.assert_allclose(resample.out_of_fold(ee.predict(run.ensemble, x), folds).mean, expected, atol=1e-4)
    own = ee.predict(run.ensemble, ee.Each(x[folds.test]))
    np.testing.assert_allclose(resample.out_of_fold(own, folds, rows="test").mean, expected, atol=1e-4)
    fitted = np.linalg.lstsq(np.asarray(x), np.asarray(y), rcond=None)[0]
    assert np.abs(np.asarray(x) @ fitted - expected).max() > 1e-2
