import warnings

import jax
import numpy as np
import pytest

from eqx_ensemble import scores

RNG = np.random.default_rng(0)
LOGITS, LABELS = RNG.normal(size=(1, 60, 5)).astype(np.float32), RNG.integers(5, size=60)
ROWS = RNG.exponential(size=60)


@pytest.mark.parametrize("weighted", [False, True])
def test_scikit_learn_agrees(weighted):
    metrics = pytest.importorskip("sklearn.metrics")
    rows = ROWS if weighted else None
    for k in (1, 2, 4):
        want = metrics.top_k_accuracy_score(LABELS, LOGITS[0], k=k, sample_weight=rows, labels=range(5))
        np.testing.assert_allclose(scores.top_k_accuracy(LOGITS, LABELS, k=k, row_weights=rows), want, rtol=1e-5)
        assert not np.isclose(want, scores.top_k_accuracy(LOGITS, LABELS, k=k + 1), rtol=1e-3)
    want = metrics.balanced_accuracy_score(LABELS, LOGITS[0].argmax(1), sample_weight=rows)
    np.testing.assert_allclose(scores.balanced_accuracy(LOGITS, LABELS, row_weights=rows), want, rtol=1e-5)
    assert not np.isclose(want, scores.accuracy(LOGITS, LABELS, row_weights=rows), rtol=1e-3)


def test_one_of_all_classes():
    for k in (1, 5):
        got = scores.top_k_accuracy(LOGITS, LABELS, k=k, reduction="none")
        want = scores.accuracy(LOGITS, LABELS, reduction="none") if k == 1 else np.ones(60)
        np.testing.assert_array_equal(got, want)


def test_ties_go_to_the_lowest_class():
    logits = np.zeros((1, 4, 4), np.float32)
    got = scores.top_k_accuracy(logits, np.arange(4), k=2, reduction="none")
    np.testing.assert_array_equal(got, [1, 1, 0, 0])


def test_members_are_mixed_before_classes_are_ranked():
    logits = np.log(np.array([[[0.5, 0.4, 0.1]], [[0.1, 0.4, 0.5]]], np.float32))
    np.testing.assert_array_equal(scores.top_k_accuracy(logits, np.array([1]), k=1), 1)
    np.testing.assert_array_equal(scores.top_k_accuracy(logits, np.array([2]), k=1, weights=np.array([0, 1])), 1)


def test_nan_is_nan():
    logits = LOGITS.copy()
    logits[0, 3, 1] = np.nan
    assert np.isnan(scores.top_k_accuracy(logits, LABELS, k=2))
    assert np.isnan(scores.balanced_accuracy(logits, LABELS))
    assert np.isfinite(scores.balanced_accuracy(logits, LABELS, row_weights=np.arange(60) != 3))


def test_classes_without_a_row_are_left_out():
    metrics = pytest.importorskip("sklearn.metrics")
    kept = LABELS != 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of predictions of a class that no row has
        want = metrics.balanced_accuracy_score(LABELS[kept], LOGITS[0, kept].argmax(1))
    np.testing.assert_allclose(scores.balanced_accuracy(LOGITS, LABELS, row_weights=kept), want, rtol=1e-5)


def test_balanced_is_accuracy_with_weights_of_classes():
    rows = 1 / np.bincount(LABELS)[LABELS]
    got = scores.balanced_accuracy(LOGITS, LABELS)
    np.testing.assert_allclose(got, scores.accuracy(LOGITS, LABELS, row_weights=rows), rtol=1e-6)


def test_worst_bin():
    p = np.asarray(jax.nn.softmax(4 * LOGITS[0]), np.float64)
    confidence, right = p.max(1), p.argmax(1) == LABELS
    index = np.ceil(confidence * 10).astype(int)
    gaps = {i: abs(right[index == i].mean() - confidence[index == i].mean()) for i in np.unique(index)}
    got = scores.mce(4 * LOGITS, LABELS, num_bins=10)
    np.testing.assert_allclose(got, max(gaps.values()), rtol=1e-5)
    assert got > scores.ece(4 * LOGITS, LABELS, num_bins=10) + 0.05
    assert not np.isclose(got, np.mean(list(gaps.values())), rtol=1e-2)
    # One bin has nothing but its mean gap.
    one = scores.ece(4 * LOGITS, LABELS, num_bins=1)
    np.testing.assert_allclose(scores.mce(4 * LOGITS, LABELS, num_bins=1), one, rtol=1e-6)


def test_worst_bin_of_a_calibrated_model_is_far_off_by_chance():
    rng = np.random.default_rng(1)
    p = rng.uniform(0.5, 1, size=300)
    logits = np.log(np.stack([p, 1 - p], -1))[None].astype(np.float32)
    labels = (rng.uniform(size=300) > p).astype(int)
    many, few = (scores.mce(logits, labels, num_bins=n, binning="mass") for n in (60, 3))
    assert many > 3 * few


@pytest.mark.usefixtures("unhooked")
def test_messages():
    for k, message in ((6, "`k` of at most 5, the number of classes.\n  got 6"), (0, "`k` of at least 1, got 0")):
        with pytest.raises(ValueError, match=message):
            scores.top_k_accuracy(LOGITS, LABELS, k=k)
    with pytest.raises(TypeError, match="integer `k`"):
        scores.top_k_accuracy(LOGITS, LABELS, k=2.5)
