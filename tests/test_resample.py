"""Rows of the members beside NumPy, scikit-learn, exact laws, and fits of single models."""

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

from .factories import Alone, assert_close, assert_same, distance, in_order, mlp, mse, step_key

stats = pytest.importorskip("scipy.stats", reason="the exact laws are scipy's")
selection = pytest.importorskip("sklearn.model_selection", reason="the reference splits are scikit-learn's")

KEY = jax.random.key(3)
FALSE_ALARM = 1e-6

# Draws.

DRAWS = {
    "bootstrap": lambda members, key: resample.bootstrap(10, members, key=key),
    "bootstrap of a size": lambda members, key: resample.bootstrap(10, members, size=4, key=key),
    "subsets": lambda members, key: resample.subsets(10, members, size=6, key=key),
    "bayesian": lambda members, key: resample.bayesian_weights(10, members, key=key),
}


def is_binomial(counts, trials, share):
    """Whether no count is in the tails of its binomial law, which together hold one in a million."""
    tail = FALSE_ALARM / (2 * len(counts))
    law = stats.binom(trials, share)
    return bool((law.cdf(counts) > tail).all() and (law.sf(np.asarray(counts) - 1) > tail).all())


@pytest.mark.parametrize("name", DRAWS)
def test_growth_changes_no_member(name):
    few, many = DRAWS[name](3, KEY), DRAWS[name](9, KEY)
    np.testing.assert_array_equal(few, many[:3])
    assert len(np.unique(many, axis=0)) == 9
    np.testing.assert_array_equal(DRAWS[name](3, jax.random.PRNGKey(3)), few)
    assert (np.asarray(DRAWS[name](3, jax.random.key(4))) != np.asarray(few)).any()


def test_streams_are_those_of_member_keys():
    high, low = (int(word) for word in jax.random.key_data(ee.member_keys(KEY, 5, purpose="bootstrap"))[4])
    expected = np.random.Generator(np.random.Philox(key=high * 2**32 + low)).integers(10, size=10)
    np.testing.assert_array_equal(resample.bootstrap(10, 5, key=KEY)[4], expected)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 60), st.integers(0, 2**31))
def test_shapes_and_ranges(num_rows, members, size, seed):
    key, least = jax.random.key(seed), min(size, num_rows)
    drawn = resample.bootstrap(num_rows, members, size=size, key=key)
    subsets = resample.subsets(num_rows, members, size=least, key=key)
    for rows, count in ((drawn, size), (subsets, least)):
        assert (rows.shape, rows.dtype) == ((members, count), jnp.int32)
        assert 0 <= rows.min() <= rows.max() < num_rows
    assert all(len(np.unique(own)) == least for own in subsets)


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(("size", "expected"), [(0.5, 5), (1.0, 10), (1, 1), (0.29, 3), (np.float32(0.4), 4)])
def test_size_is_a_count_or_a_fraction(size, expected):
    assert resample.bootstrap(10, 2, size=size, key=KEY).shape == (2, expected)
    assert resample.subsets(10, 2, size=size, key=KEY).shape == (2, expected)


def test_every_entry_of_a_bootstrap_is_uniform():
    rows = np.asarray(resample.bootstrap(5, 3000, key=KEY))
    for position in range(5):
        assert is_binomial(np.bincount(rows[:, position], minlength=5), 3000, 1 / 5)
    assert is_binomial(np.bincount(rows[:, 0] * 5 + rows[:, 1], minlength=25), 3000, 1 / 25)


def test_every_subset_is_as_likely():
    """Twelve ordered pairs of four rows."""
    rows = np.asarray(resample.subsets(4, 6000, size=2, key=KEY))
    pairs = np.bincount(rows[:, 0] * 4 + rows[:, 1], minlength=16)
    assert is_binomial(pairs[~np.eye(4, dtype=bool).ravel()], 6000, 1 / 12)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 10])
def test_bayesian_weights_are_of_the_dirichlet_law(num_rows):
    """One weight is `num_rows` times a Beta(1, n - 1) variable."""
    drawn = resample.bayesian_weights(num_rows, 5000, key=KEY)
    assert (drawn.shape, drawn.dtype) == ((5000, num_rows), np.float32)
    weights = np.asarray(drawn, np.float64) / num_rows
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)
    for row in range(num_rows if num_rows > 1 else 0):
        assert stats.kstest(weights[:, row], stats.beta(1, num_rows - 1).cdf).pvalue > FALSE_ALARM / num_rows
    if num_rows > 2:
        assert stats.kstest(weights[:, :2].sum(axis=1), stats.beta(2, num_rows - 2).cdf).pvalue > FALSE_ALARM


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([1, 4, 13]), st.sampled_from([1, 3]), st.sampled_from([1, 6]), st.integers(0, 2**31))
def test_counts_and_out_of_bag_rows_are_those_of_numpy(num_rows, members, size, seed):
    rows = np.random.default_rng(seed).integers(num_rows, size=(members, size))
    expected = np.stack([np.bincount(own, minlength=num_rows) for own in rows])
    for of_rows, want in ((resample.counts, expected), (resample.out_of_bag, expected == 0)):
        np.testing.assert_array_equal(of_rows(rows, num_rows), want)
        np.testing.assert_array_equal(of_rows(rows.astype(np.uint8), num_rows), want)
        np.testing.assert_array_equal(jax.jit(of_rows, static_argnums=1)(rows, num_rows), want)


# Folds.

CLASSES = np.array(list("aabbbbabcabccbbabcbabbcaabbbcb"))
GROUPS = np.repeat([3, 0, 2, 4, 1, 5], [11, 6, 5, 4, 3, 1])  # too unlike to make folds of one length


def assert_folds(folds, splits, num_rows, *, uneven=None):
    """The masks are exactly the splits, and the rows are theirs: no test row is ever trained on."""
    folds = jax.tree.map(np.asarray, folds)
    lengths = [len(train) for train, _ in splits]
    length = max(lengths) if uneven == "repeat" else min(lengths)
    assert folds.train.shape == (len(splits), length)
    assert folds.train.dtype == folds.test.dtype == jnp.int32
    assert folds.in_train.shape == folds.in_test.shape == (len(splits), num_rows)
    for i, (train, test) in enumerate(splits):
        np.testing.assert_array_equal(np.flatnonzero(folds.in_train[i]), np.unique(train))
        np.testing.assert_array_equal(np.flatnonzero(folds.in_test[i]), np.sort(test))
        np.testing.assert_array_equal(folds.test[i][folds.valid[i]], test)
        assert not set(folds.train[i]) & set(test)
        assert set(folds.test[i]) == set(test)
        times = np.bincount(folds.train[i], minlength=num_rows)[train]
        assert times.sum() == length
        assert times.min() >= (uneven == "repeat")
        assert times.max() <= -(-length // len(train))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_folds_are_kfold_of_rows_in_order_or_drawn(data):
    num_rows = data.draw(st.integers(2, 40))
    num_folds = data.draw(st.integers(2, num_rows))
    splits = list(selection.KFold(num_folds).split(np.zeros(num_rows)))
    assert_folds(resample.folds(num_rows, num_folds), splits, num_rows)
    drawn = resample.folds(num_rows, num_folds, key=jax.random.key(data.draw(st.integers(0, 2**31))))
    drawn = jax.tree.map(np.asarray, drawn)
    np.testing.assert_array_equal(np.sum(drawn.in_test, axis=0), 1)
    np.testing.assert_array_equal(drawn.in_train, ~drawn.in_test)
    np.testing.assert_array_equal(np.sum(drawn.in_test, axis=1), [len(test) for _, test in splits])
    assert_folds(drawn, [(np.flatnonzero(~own), np.flatnonzero(own)) for own in drawn.in_test], num_rows)


def test_each_key_draws_other_folds():
    legacy = resample.folds(30, 4, key=jax.random.PRNGKey(3))
    assert_same(resample.folds(30, 4, key=KEY), legacy)
    pairs = [np.asarray(resample.folds(4, 2, key=jax.random.key(i)).in_test[0]) for i in range(100)]
    assert len(np.unique(pairs, axis=0)) == 6  # one is missed with a probability of 7e-8


def test_what_is_left_out_is_spread():
    """Of 442 rows, the last three of five folds have one row fewer to test on."""
    folds = resample.folds(442, 5)
    missing = [np.setdiff1d(np.flatnonzero(a), b) for a, b in zip(folds.in_train, folds.train, strict=True)]
    assert [len(rows) for rows in missing] == [0, 0, 1, 1, 1]
    assert len({int(rows[0]) for rows in missing[2:]}) == 3


SPLITTERS = {
    "StratifiedKFold": selection.StratifiedKFold(4),
    "ShuffleSplit": selection.ShuffleSplit(6, test_size=0.3, train_size=0.5, random_state=0),
    "LeaveOneOut": selection.LeaveOneOut(),
    "PredefinedSplit": selection.PredefinedSplit(np.arange(30) % 4),
    "TimeSeriesSplit": selection.TimeSeriesSplit(4),
    "GroupKFold": selection.GroupKFold(4),
}


@pytest.mark.parametrize("name", SPLITTERS)
def test_splitters_of_scikit_learn(name):
    splits = list(SPLITTERS[name].split(CLASSES, CLASSES, GROUPS if "Group" in name else None))
    for uneven in ("trim", "repeat"):
        assert_folds(resample.from_splits(splits, 30, uneven=uneven), splits, 30, uneven=uneven)
    if np.ptp([len(train) for train, _ in splits]) <= 1:
        assert_folds(resample.from_splits(iter(splits), 30), splits, 30)
    else:
        with pytest.raises(ValueError, match='training parts that differ by one row at most.\n.*\n.*uneven="trim"'):
            resample.from_splits(splits, 30)


def test_repeated_training_rows_and_masks():
    mask = np.array([True, True, False, True, False])
    folds = resample.from_splits([([4, 4, 1, 0], [2]), (mask, np.flatnonzero(~mask))], 5)
    np.testing.assert_array_equal(folds.train, [[4, 4, 1], [0, 1, 3]])
    np.testing.assert_array_equal(folds.in_train[0], [True, True, False, False, True])
    np.testing.assert_array_equal(folds.test, [[2, 2], [2, 4]])
    assert ee.tree.take(folds, [0, 0, 1]).train.shape == (3, 3)  # a tree: two models for one fold


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: resample.folds(5, 6), ValueError, "`resample.folds` needs `num_folds` from 2 to the number of rows"),
        (lambda: resample.from_splits([([0, 1], [1, 2])], 3), ValueError, "got row 1 in both parts of split 0"),
        (lambda: resample.from_splits([([0, 3], [1])], 3), IndexError, "3 is out of bounds"),
        (lambda: resample.subsets(5, 2, size=6, key=KEY), ValueError, "`size` of at most the number of rows"),
        (lambda: resample.bootstrap(np.ones(5), 2, key=KEY), TypeError, "`resample.bootstrap` needs an integer `num_r"),
        (lambda: resample.counts([[0, 5]], 5), ValueError, "`resample.counts` needs `rows` from 0 to 4"),
        (lambda: resample.counts(np.arange(3), 3), ValueError, r"One member\? Add a leading axis: `rows\[None\]`"),
        (lambda: resample.held_out_mean(PREDICTIONS, UNSEEN[:, :4]), ValueError, "`unseen` for the rows of `predict"),
    ],
)
def test_mistakes(call, error, message):
    with pytest.raises(error, match=message):
        call()


# Held-out predictions.

MEMBERS, NUM_ROWS = 6, 11
ROWS = np.array(resample.bootstrap(NUM_ROWS, MEMBERS, key=KEY))
ROWS[:, 0] = 4  # a row that every member saw
UNSEEN = np.asarray(resample.out_of_bag(ROWS, NUM_ROWS))
PREDICTIONS = np.random.default_rng(0).normal(size=(MEMBERS, NUM_ROWS, 2)).astype(np.float32)
WEIGHTS = np.array([0.5, 1, 0, 2, 1, 3])


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("shape", [(), (2,), (2, 1)])
@pytest.mark.parametrize("poison", [0.0, np.nan, np.inf])
def test_held_out_means_are_those_row_by_row_whatever_other_members_predict(weights, shape, poison):
    predictions = PREDICTIONS[..., 0] if shape == () else PREDICTIONS.reshape(MEMBERS, NUM_ROWS, *shape)
    given = np.ones(MEMBERS) if weights is None else weights
    used, means = UNSEEN & (given > 0)[:, None], np.full(predictions.shape[1:], np.nan)
    for row in np.flatnonzero(used.any(axis=0)):
        own = used[:, row]
        means[row] = np.average(predictions[own, row].astype(np.float64), axis=0, weights=given[own])
    spoilt = np.where(np.expand_dims(used, tuple(range(2, predictions.ndim))), predictions, np.float32(poison))
    for function in (resample.held_out_mean, jax.jit(resample.held_out_mean)):
        got = function(spoilt, UNSEEN, weights=weights)
        np.testing.assert_allclose(got.mean, means, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(got.num_members, used.sum(axis=0))
        assert got.num_members[4] == 0


def test_gradients_are_finite():
    poisoned = jnp.where(UNSEEN[..., None], PREDICTIONS, jnp.nan)
    gradient = jax.grad(lambda p: jnp.nansum(resample.held_out_mean(p, UNSEEN).mean ** 2))(poisoned)
    assert np.isfinite(gradient).all()
    assert ((np.asarray(gradient) != 0).any(axis=2) == UNSEEN).all()


def test_the_prediction_of_the_one_member_that_held_a_row_out_is_returned_bit_for_bit():
    folds = resample.folds(NUM_ROWS, MEMBERS, key=KEY)
    got = resample.held_out_mean(PREDICTIONS, folds.in_test, weights=np.arange(1, 7) / 7)
    np.testing.assert_array_equal(got.mean, PREDICTIONS[np.argmax(folds.in_test, axis=0), np.arange(NUM_ROWS)])
    np.testing.assert_array_equal(got.num_members, 1)
    assert resample.held_out_mean(PREDICTIONS.astype(jnp.bfloat16), folds.in_test).mean.dtype == jnp.float32


# In training.

SGD = optax.sgd(0.05, momentum=0.9)
X = jax.random.normal(jax.random.key(0), (20, 25))
DATA = X, jnp.sin(X[:, :2])


FITTED = resample.bootstrap(20, 3, key=KEY)


@pytest.mark.parametrize("rows", [FITTED, resample.folds(20, 3, key=KEY).train])
def test_fit_on_rows_is_the_loop_of_single_fits(rows):
    ensemble = ee.build(mlp, 3, key=jax.random.key(1))
    run = ee.fit(ensemble, mse, SGD, DATA, rows=rows, batch_size=8, shuffle=False, steps=9, key=KEY)
    alone = Alone(mse, SGD)
    for i, model in enumerate(ensemble.unstack()):
        keys = [step_key(KEY, i, step) for step in range(9)]
        expected, _, losses = alone(model, in_order(DATA, 8, 9, rows=rows[i]), keys)
        assert_close(run.ensemble[i], expected, 1e-5)
        np.testing.assert_allclose(run.history.loss[i], losses, rtol=1e-5)
        other, _, _ = alone(model, in_order(DATA, 8, 9, rows=rows[i - 1]), keys)
        assert distance(run.ensemble[i], other) > 1e-3


@pytest.mark.slow
def test_fit_with_counts_is_fit_on_the_rows():
    """A full batch of weighted rows has the gradient of the rows repeated."""

    def weighted(model, batch, key):
        x, y, weight = batch
        return jnp.sum(weight * jnp.mean((jax.vmap(model)(x) - y) ** 2, axis=1)) / jnp.sum(weight)

    rows, ensemble = FITTED, ee.build(mlp, 3, key=KEY)
    options = {"steps": 10, "batch_size": 20, "key": KEY}
    repeated = ee.fit(ensemble, mse, SGD, DATA, rows=rows, **options).ensemble
    weights = resample.counts(rows, 20)
    of = lambda weights: ee.fit(ensemble, weighted, SGD, (*DATA, ee.Each(weights)), **options).ensemble
    assert_close(of(weights), repeated, 1e-5)
    assert distance(of(weights[::-1]), repeated) > 1e-3


def test_held_out_means_of_a_run_are_the_loop_over_folds():
    """Least squares, whose best fit is known: every held-out prediction is that of the other rows' best fit."""
    x = jax.random.normal(jax.random.key(0), (20, 2))
    y = jnp.sin(3 * x[:, :1]) + x[:, 1:]
    folds = resample.folds(20, 4, key=KEY)
    ensemble = ee.build(lambda key: eqx.nn.Linear(2, 1, use_bias=False, key=key), 4, key=KEY)
    options = {"steps": 200, "batch_size": 15, "key": KEY}
    run = ee.fit(ensemble, mse, optax.sgd(0.3), (x, y), rows=folds.train, **options)
    expected = np.empty((20, 1))
    for own in np.asarray(folds.in_test):
        fitted = np.linalg.lstsq(np.asarray(x)[~own], np.asarray(y)[~own], rcond=None)[0]
        expected[own] = np.asarray(x)[own] @ fitted
    np.testing.assert_allclose(resample.held_out_mean(run.predict(x), folds.in_test).mean, expected, atol=1e-4)
    np.testing.assert_allclose(run.out_of_bag(x).mean, expected, atol=1e-4)
    np.testing.assert_allclose(run.out_of_bag(x, folds.in_test).mean, expected, atol=1e-4)
