import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eqx_ensemble as ee
from eqx_ensemble import resample

from ..factories import assert_close, assert_same, distance, mlp

selection = pytest.importorskip("sklearn.model_selection", reason="the reference splits are scikit-learn's")

KEY = jax.random.key(3)
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
        if uneven == "repeat":
            assert times.min() >= 1
            assert times.max() <= -(-length // len(train))
        else:
            assert times.max() == 1
            assert times.sum() == length


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_without_a_key_they_are_kfold(data):
    num_rows = data.draw(st.integers(2, 40))
    num_folds = data.draw(st.integers(2, num_rows))
    splits = list(selection.KFold(num_folds).split(np.zeros(num_rows)))
    assert_folds(resample.folds(num_rows, num_folds), splits, num_rows)
    repeated = resample.folds(num_rows, num_folds, uneven="repeat")
    assert_folds(repeated, splits, num_rows, uneven="repeat")


def test_a_leak_would_be_noticed():
    splits = list(selection.KFold(3).split(np.zeros(10)))
    folds = resample.folds(10, 3)
    leaking = folds._replace(train=folds.train.at[0, 0].set(0))
    with pytest.raises(AssertionError):
        assert_folds(leaking, splits, 10)
    with pytest.raises(AssertionError):
        assert_folds(resample.folds(10, 3, key=KEY), splits, 10)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_with_a_key_rows_are_drawn(data):
    num_rows = data.draw(st.integers(2, 40))
    num_folds = data.draw(st.integers(2, num_rows))
    folds = resample.folds(num_rows, num_folds, key=jax.random.key(data.draw(st.integers(0, 2**31))))
    folds = jax.tree.map(np.asarray, folds)
    np.testing.assert_array_equal(np.sum(folds.in_test, axis=0), 1)
    np.testing.assert_array_equal(folds.in_train, ~folds.in_test)
    expected = [len(part) for part in np.array_split(np.arange(num_rows), num_folds)]
    np.testing.assert_array_equal(np.sum(folds.in_test, axis=1), expected)
    splits = [(np.flatnonzero(a), np.flatnonzero(b)) for a, b in zip(folds.in_train, folds.in_test, strict=True)]
    assert_folds(folds, splits, num_rows)


def test_each_key_draws_other_folds():
    legacy = resample.folds(30, 4, key=jax.random.PRNGKey(3))
    assert_same(resample.folds(30, 4, key=KEY), legacy)
    assert (resample.folds(30, 4, key=jax.random.key(4)).in_test != legacy.in_test).any()
    pairs = [np.asarray(resample.folds(4, 2, key=jax.random.key(i)).in_test[0]) for i in range(100)]
    assert len(np.unique(pairs, axis=0)) == 6  # one is missed with a probability of 7e-8


def test_what_is_left_out_is_spread():
    """Of 442 rows, the last three of five folds have one row fewer to test on."""
    folds = resample.folds(442, 5)
    missing = [np.setdiff1d(np.flatnonzero(a), b) for a, b in zip(folds.in_train, folds.train, strict=True)]
    assert [len(rows) for rows in missing] == [0, 0, 1, 1, 1]
    assert len({int(rows[0]) for rows in missing[2:]}) == 3


LABELLED = {
    "stratify": (selection.StratifiedKFold, {"stratify": CLASSES}, None),
    "groups": (selection.GroupKFold, {"groups": GROUPS}, "trim"),
    "both": (selection.StratifiedGroupKFold, {"stratify": CLASSES, "groups": GROUPS}, "repeat"),
}


@pytest.mark.parametrize("name", LABELLED)
def test_labelled_folds_are_scikit_learns(name):
    kind, labels, uneven = LABELLED[name]
    splits = list(kind(4).split(CLASSES, CLASSES, labels.get("groups")))
    assert_folds(resample.folds(30, 4, uneven=uneven, **labels), splits, 30, uneven=uneven)
    drawn = resample.folds(30, 4, uneven=uneven, key=KEY, **labels)
    np.testing.assert_array_equal(np.sum(drawn.in_test, axis=0), 1)
    assert_same(resample.folds(30, 4, uneven=uneven, key=KEY, **labels), drawn)
    assert (drawn.in_test != resample.folds(30, 4, uneven=uneven, **labels).in_test).any()
    for own in np.asarray(drawn.in_test):
        if "groups" in labels:
            assert not set(GROUPS[own]) & set(GROUPS[~own])
        else:
            shares = [np.sum(CLASSES[own] == c) - np.sum(CLASSES == c) / 4 for c in "abc"]
            assert np.abs(shares).max() < 1
    plain = np.asarray(resample.folds(30, 4, key=KEY).in_test)
    assert any(set(GROUPS[own]) & set(GROUPS[~own]) for own in plain)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 5), st.lists(st.integers(5, 12), min_size=1, max_size=4), st.randoms())
def test_stratified_folds_need_no_choice(num_folds, sizes, random):
    """Their training parts differ by one row at most, whatever the classes."""
    classes = np.repeat(np.arange(len(sizes)), sizes)
    random.shuffle(classes)
    folds = resample.folds(len(classes), num_folds, stratify=classes, key=KEY)
    assert np.ptp(np.sum(folds.in_train, axis=1)) <= 1


SPLITTERS = {
    "KFold": selection.KFold(4, shuffle=True, random_state=0),
    "StratifiedKFold": selection.StratifiedKFold(4),
    "ShuffleSplit": selection.ShuffleSplit(6, test_size=0.3, train_size=0.5, random_state=0),
    "StratifiedShuffleSplit": selection.StratifiedShuffleSplit(6, test_size=0.3, random_state=0),
    "RepeatedKFold": selection.RepeatedKFold(n_splits=4, n_repeats=3, random_state=0),
    "LeaveOneOut": selection.LeaveOneOut(),
    "PredefinedSplit": selection.PredefinedSplit(np.arange(30) % 4),
}
UNEVEN = {
    "TimeSeriesSplit": selection.TimeSeriesSplit(4),
    "GroupKFold": selection.GroupKFold(4),
    "LeaveOneGroupOut": selection.LeaveOneGroupOut(),
}


@pytest.mark.parametrize("name", SPLITTERS)
def test_splitters_of_scikit_learn(name):
    splits = list(SPLITTERS[name].split(CLASSES, CLASSES))
    assert_folds(resample.from_splits(iter(splits), 30), splits, 30)


@pytest.mark.parametrize("name", UNEVEN)
@pytest.mark.parametrize("uneven", ["trim", "repeat"])
def test_splitters_with_training_parts_of_many_lengths(name, uneven):
    groups = GROUPS if "Group" in name else None
    splits = list(UNEVEN[name].split(CLASSES, CLASSES, groups))
    assert_folds(resample.from_splits(splits, 30, uneven=uneven), splits, 30, uneven=uneven)
    with pytest.raises(ValueError, match="training sets whose lengths differ by at most one row"):
        resample.from_splits(splits, 30)


def test_repeated_training_rows_stay():
    train = np.array([4, 4, 1, 0])
    folds = resample.from_splits([(train, np.array([2])), (np.array([3, 2, 1, 0]), [4])], 5)
    np.testing.assert_array_equal(folds.train, [[4, 4, 1, 0], [3, 2, 1, 0]])
    np.testing.assert_array_equal(folds.in_train[0], [True, True, False, False, True])


def test_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.model_selection", None)
    with pytest.raises(ImportError) as caught:
        resample.folds(30, 4, stratify=CLASSES)
    assert str(caught.value) == (
        "`resample.folds(stratify=..., groups=...)` needs scikit-learn.\n"
        "Install it: `pip install 'eqx_ensemble[sklearn]'`."
    )
    assert resample.folds(30, 4, key=KEY).train.shape == (4, 22)


SGD = optax.sgd(0.05)
X = jax.random.normal(jax.random.key(0), (23, 25))
Y = jnp.sin(X[:, :2])


def weighted(model, batch, key):
    x, y, weight = batch
    return jnp.sum(weight * jnp.mean((jax.vmap(model)(x) - y) ** 2, axis=1)) / jnp.sum(weight)


def trained(folds, y, *, exact):
    ensemble, options = ee.build(mlp, 4, key=KEY), {"steps": 12, "key": KEY}
    if exact:
        return ee.fit(ensemble, weighted, SGD, (X, y, ee.Each(folds.in_train.astype(float))), batch_size=23, **options)
    mse = lambda model, batch, key: weighted(model, (*batch, jnp.ones(len(batch[0]))), key)
    return ee.fit(ensemble, mse, SGD, (X, y), rows=folds.train, batch_size=17, **options)


@pytest.mark.parametrize("exact", [False, True], ids=["rows", "weights"])
def test_held_out_rows_reach_no_member(exact):
    """Targets of fold 0 that go wrong change no bit of member 0, and every other member."""
    folds = resample.folds(23, 4, key=KEY)
    run = trained(folds, Y, exact=exact).ensemble
    poisoned = trained(folds, jnp.where(folds.in_test[0][:, None], 3.0, Y), exact=exact).ensemble
    assert_same(run[0], poisoned[0])
    for i in range(1, 4):
        assert distance(run[i], poisoned[i]) > 1e-2


def test_weights_train_on_exactly_the_rows_of_each_split():
    folds = resample.folds(23, 4, key=KEY)
    run = trained(folds, Y, exact=True)
    for i, model in enumerate(ee.build(mlp, 4, key=KEY).unstack()):
        own = np.flatnonzero(folds.in_train[i])
        alone = ee.fit(
            ee.stack([model]),
            weighted,
            SGD,
            (X[own], Y[own], jnp.ones(len(own))),
            batch_size=len(own),
            steps=12,
            key=KEY,
        )
        assert_close(run.ensemble[i], alone.ensemble[0], 1e-5)
    assert len(folds.train[0]) < len(np.flatnonzero(folds.in_train[3]))


def test_any_choice_of_members_of_folds():
    """Folds are a tree: two models for each fold."""
    twice = ee.tree.take(resample.folds(23, 4), [0, 0, 1, 1, 2, 2, 3, 3])
    assert isinstance(twice, resample.Folds)
    assert twice.train.shape == (8, 17)
