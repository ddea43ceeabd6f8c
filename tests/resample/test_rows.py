import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eqx_ensemble as ee
from eqx_ensemble import resample

from ..factories import Alone, assert_close, distance, in_order, mlp, mse, step_key

stats = pytest.importorskip("scipy.stats", reason="the exact laws are scipy's")

KEY = jax.random.key(3)
FALSE_ALARM = 1e-6
LABELS = np.array(["b", "a", "c", "b", "b", "a", "b", "b", "a", "b"])  # 3 a, 6 b, 1 c

DRAWS = {
    "bootstrap": lambda members, key: resample.bootstrap(10, members, key=key),
    "bootstrap of a size": lambda members, key: resample.bootstrap(10, members, size=4, key=key),
    "stratified bootstrap": lambda members, key: resample.bootstrap(10, members, stratify=LABELS, key=key),
    "stratified of a size": lambda members, key: resample.bootstrap(10, members, size=20, stratify=LABELS, key=key),
    "subsets": lambda members, key: resample.subsets(10, members, size=6, key=key),
    "stratified subsets": lambda members, key: resample.subsets(10, members, size=7, stratify=LABELS, key=key),
    "poisson": lambda members, key: resample.poisson_weights(10, members, key=key),
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
    assert (np.asarray(DRAWS[name](3, jax.random.key(4))) != np.asarray(few)).any()


@pytest.mark.parametrize("name", DRAWS)
def test_a_legacy_key_is_the_typed_key(name):
    np.testing.assert_array_equal(DRAWS[name](3, jax.random.PRNGKey(3)), DRAWS[name](3, KEY))


def test_streams_are_those_of_member_keys():
    words = jax.random.key_data(ee.member_keys(KEY, 5, purpose="bootstrap"))
    high, low = (int(word) for word in words[4])
    expected = np.random.Generator(np.random.Philox(key=high * 2**32 + low)).integers(10, size=10)
    np.testing.assert_array_equal(resample.bootstrap(10, 5, key=KEY)[4], expected)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 60), st.integers(0, 2**31))
def test_shapes_and_ranges(num_rows, members, size, seed):
    key = jax.random.key(seed)
    rows = resample.bootstrap(num_rows, members, size=size, key=key)
    assert rows.shape == (members, size)
    assert rows.dtype == jnp.int32
    assert 0 <= rows.min() <= rows.max() < num_rows
    size = min(size, num_rows)
    rows = resample.subsets(num_rows, members, size=size, key=key)
    assert rows.shape == (members, size)
    assert rows.dtype == jnp.int32
    assert 0 <= rows.min() <= rows.max() < num_rows
    assert all(len(np.unique(own)) == size for own in rows)


@pytest.mark.parametrize(("size", "expected"), [(0.5, 5), (1.0, 10), (1, 1), (0.29, 3)])
def test_size_is_a_count_or_a_fraction(size, expected):
    assert resample.bootstrap(10, 2, size=size, key=KEY).shape == (2, expected)
    assert resample.subsets(10, 2, size=size, key=KEY).shape == (2, expected)


@pytest.mark.usefixtures("unhooked")
def test_numbers_of_numpy_are_numbers():
    expected = resample.subsets(10, 3, size=4, key=KEY)
    np.testing.assert_array_equal(resample.subsets(np.int64(10), np.int32(3), size=np.uint8(4), key=KEY), expected)
    np.testing.assert_array_equal(resample.subsets(10, 3, size=np.float32(0.4), key=KEY), expected)


def test_fractions_are_not_cut_off():
    assert 0.29 * 100 < 29
    assert resample.subsets(100, 1, size=0.29, key=KEY).shape == (1, 29)


def test_out_of_bag_share_of_the_bootstrap():
    """Members are independent, so that a row is out of bag for a binomial number of them."""
    missed = lambda rows: np.asarray(resample.out_of_bag(rows, 3)).sum(axis=0)
    rows = resample.bootstrap(3, 4000, key=KEY)
    assert is_binomial(missed(rows), 4000, (1 - 1 / 3) ** 3)
    assert not is_binomial(missed(rows), 4000, np.exp(-1))
    assert not is_binomial(missed(resample.subsets(3, 4000, size=2, key=KEY)), 4000, (1 - 1 / 3) ** 3)
    assert is_binomial(missed(resample.bootstrap(3, 4000, size=7, key=KEY)), 4000, (1 - 1 / 3) ** 7)


def test_every_entry_of_a_bootstrap_is_uniform():
    rows = np.asarray(resample.bootstrap(5, 3000, key=KEY))
    for position in range(5):
        assert is_binomial(np.bincount(rows[:, position], minlength=5), 3000, 1 / 5)
    pairs = np.bincount(rows[:, 0] * 5 + rows[:, 1], minlength=25)
    assert is_binomial(pairs, 3000, 1 / 25)
    assert not is_binomial(np.bincount(np.sort(rows)[:, 0], minlength=5), 3000, 1 / 5)


def test_every_subset_is_as_likely():
    """Twelve ordered pairs of four rows."""
    rows = np.asarray(resample.subsets(4, 6000, size=2, key=KEY))
    pairs = lambda rows: np.bincount(rows[:, 0] * 4 + rows[:, 1], minlength=16)
    different = ~np.eye(4, dtype=bool).ravel()
    assert is_binomial(pairs(rows)[different], 6000, 1 / 12)
    assert not is_binomial(pairs(np.sort(rows, axis=1))[different], 6000, 1 / 12)


@pytest.mark.parametrize("draw", ["bootstrap", "subsets"])
@pytest.mark.parametrize(("size", "expected"), [(10, [3, 6, 1]), (7, [2, 4, 1]), (0.8, [2, 5, 1])])
def test_classes_keep_their_shares(draw, size, expected):
    """By largest remainders: of 7 rows the quotas are 2.1, 4.2, 0.7; of 8 they are 2.4, 4.8, 0.8."""
    rows = np.asarray(getattr(resample, draw)(10, 50, size=size, stratify=LABELS, key=KEY))
    found = np.stack([[np.sum(LABELS[own] == name) for name in "abc"] for own in rows])
    np.testing.assert_array_equal(found, np.broadcast_to(expected, found.shape))
    free = np.asarray(getattr(resample, draw)(10, 50, size=5, key=KEY))
    assert len({tuple(sorted(LABELS[own])) for own in free}) > 1


def test_a_stratified_bootstrap_keeps_the_order_of_classes():
    rows = np.asarray(resample.bootstrap(10, 50, stratify=LABELS, key=KEY))
    np.testing.assert_array_equal(LABELS[rows], np.broadcast_to(LABELS, rows.shape))
    assert (LABELS[np.asarray(resample.bootstrap(10, 50, key=KEY))] != LABELS).any()


def test_stratified_draws_are_uniform_within_a_class():
    rows = np.asarray(resample.bootstrap(10, 3000, stratify=LABELS, key=KEY))
    assert is_binomial([np.sum(rows[:, 0] == row) for row in np.flatnonzero(LABELS == "b")], 3000, 1 / 6)
    rows = np.asarray(resample.subsets(10, 3000, size=7, stratify=LABELS, key=KEY))
    assert is_binomial([np.sum(rows == row) for row in np.flatnonzero(LABELS == "b")], 3000, 4 / 6)
    assert is_binomial([np.sum(LABELS[rows[:, 0]] == "a")], 3000, 2 / 7)
    in_order = np.sort(rows, axis=1)
    assert not is_binomial([np.sum(LABELS[in_order[:, 0]] == "a")], 3000, 2 / 7)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-2, 3), min_size=1, max_size=40), st.integers(0, 2**31), st.data())
def test_shares_are_within_a_row_of_the_quotas(labels, seed, data):
    labels = np.array(labels)
    classes, sizes = np.unique(labels, return_counts=True)
    size = data.draw(st.integers(-(-len(labels) // sizes.min()), len(labels)))
    quotas = size * sizes / len(labels)
    assert quotas.min() >= 1, "else a class may be left out, which is refused"
    for own in np.asarray(resample.subsets(len(labels), 2, size=size, stratify=labels, key=jax.random.key(seed))):
        assert len(np.unique(own)) == size
        found = np.array([np.sum(labels[own] == name) for name in classes])
        assert (np.abs(found - quotas) < 1).all()


@pytest.mark.parametrize("labels", [LABELS.tolist(), LABELS.astype(object), LABELS == "b", jnp.arange(10) % 2])
def test_labels_of_any_discrete_kind(labels):
    rows = np.asarray(resample.bootstrap(10, 4, stratify=labels, key=KEY))
    labels = np.asarray(labels)
    np.testing.assert_array_equal(labels[rows], np.broadcast_to(labels, rows.shape))


SGD = optax.sgd(0.05, momentum=0.9)
X = jax.random.normal(jax.random.key(0), (20, 25))
DATA = X, jnp.sin(X[:, :2])


@pytest.mark.parametrize(
    "rows",
    [
        resample.bootstrap(20, 3, key=KEY),
        resample.subsets(20, 3, size=16, key=KEY),
        resample.folds(20, 3, key=KEY).train,
    ],
    ids=["bootstrap", "subsets", "folds"],
)
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
