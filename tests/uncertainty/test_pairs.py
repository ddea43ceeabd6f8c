import itertools

import jax
import numpy as np
import pytest

from eqx_ensemble import scores, uncertainty


def _logits(shape=(5, 40, 3), seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _correct(members=4, rows=200, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.uniform(size=(members, rows)) < 0.7 + 0.2 * rng.uniform(size=rows)).astype(np.float32)


def test_pairwise_disagreement_is_counted():
    logits = _logits()
    labels = logits.argmax(-1)
    want = np.array([[np.mean(a != b) for b in labels] for a in labels])
    got = uncertainty.pairwise_disagreement(logits)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    # Its mean over all pairs is that of the rows; the share of rows on which anybody differs is not.
    np.testing.assert_allclose(np.mean(got), np.mean(uncertainty.disagreement(logits)), rtol=1e-5)
    assert not np.allclose(np.mean(labels.min(0) != labels.max(0)), np.mean(got), rtol=1e-2)
    np.testing.assert_allclose(uncertainty.pairwise_disagreement(logits.reshape(5, 8, 5, 3)), want, rtol=1e-6)


def test_pairwise_disagreement_with_masks_and_broken_members():
    logits, mask = _logits(), np.arange(40) % 3 > 0
    logits[1, ~mask] = np.nan
    want = uncertainty.pairwise_disagreement(logits[:, mask])
    np.testing.assert_allclose(uncertainty.pairwise_disagreement(logits, row_weights=mask), want, rtol=1e-6)
    broken = np.isnan(uncertainty.pairwise_disagreement(logits))
    np.testing.assert_array_equal(broken, (np.arange(5) == 1)[:, None] | (np.arange(5) == 1)[None])


def test_q_statistic_is_the_table():
    correct = _correct()
    want = np.empty((4, 4))
    for i, j in itertools.product(range(4), repeat=2):
        n = {ab: np.sum((correct[i] == ab[0]) & (correct[j] == ab[1])) for ab in itertools.product((0, 1), repeat=2)}
        want[i, j] = (n[1, 1] * n[0, 0] - n[1, 0] * n[0, 1]) / (n[1, 1] * n[0, 0] + n[1, 0] * n[0, 1])
    got = uncertainty.q_statistic(correct)
    np.testing.assert_allclose(got, want, rtol=1e-4)
    for dtype in (bool, np.int32, np.uint8):
        np.testing.assert_allclose(uncertainty.q_statistic(correct.astype(dtype)), want, rtol=1e-4)
    np.testing.assert_allclose(np.diag(got), 1)
    # Not the correlation, and not the table of errors and successes swapped on one side.
    assert not np.allclose(uncertainty.error_correlation(correct), want, rtol=1e-1)
    assert not np.allclose(uncertainty.q_statistic(np.stack([correct[0], 1 - correct[1]]))[0, 1], want[0, 1], rtol=1e-1)


def test_q_statistic_in_closed_form():
    independent = np.float32([[1, 1, 0, 0], [1, 0, 1, 0]])
    np.testing.assert_allclose(uncertainty.q_statistic(independent), np.eye(2), atol=1e-6)
    opposed = np.float32([[1, 1, 0, 0], [0, 0, 1, 1]])
    np.testing.assert_allclose(uncertainty.q_statistic(opposed), [[1, -1], [-1, 1]])
    never_wrong = uncertainty.q_statistic(np.float32([[1, 1, 1, 1], [0, 0, 1, 1]]))
    np.testing.assert_array_equal(np.isnan(never_wrong), [[True, True], [True, False]])


def test_correlation_is_numpys():
    errors = np.random.default_rng(0).normal(size=(4, 100)) @ np.random.default_rng(1).normal(size=(100, 100))
    errors = errors.astype(np.float32)
    np.testing.assert_allclose(uncertainty.error_correlation(errors), np.corrcoef(errors), rtol=1e-4, atol=1e-6)
    assert not np.allclose(np.cov(errors), np.corrcoef(errors), rtol=1e-1)
    with jax.enable_x64(True):
        exact = errors.astype(np.float64)
        np.testing.assert_allclose(uncertainty.error_correlation(exact), np.corrcoef(exact), rtol=1e-10)
    offset = (1e4 + np.random.default_rng(0).normal(size=(3, 400))).astype(np.float32)
    want = np.corrcoef(offset.astype(np.float64))
    np.testing.assert_allclose(uncertainty.error_correlation(offset), want, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(uncertainty.error_correlation(1e-30 * (offset - 1e4)), want, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("count", [4, 16, 31])  # of 15 and of 30 times 0.1 the float32 mean is not 0.1
def test_errors_that_are_all_the_same_correlate_with_none(count):
    errors = np.stack([np.full(count, 0.1), np.arange(count)]).astype(np.float32)
    errors[:, 1], mask = 7, np.arange(count) != 1
    for found in (
        uncertainty.error_correlation(errors, row_weights=mask),
        uncertainty.error_correlation(errors[:, mask]),
    ):
        assert np.isnan(found[0]).all()
        assert np.isnan(found[1, 0])
        np.testing.assert_allclose(found[1, 1], 1, rtol=1e-6)
    assert np.isfinite(uncertainty.error_correlation(errors)).all()


def test_correlation_determines_the_gain_of_combining():
    errors = np.random.default_rng(0).normal(size=(6, 5000)) + np.random.default_rng(1).normal(size=5000)
    errors = (errors - errors.mean(1, keepdims=True)) / errors.std(1, keepdims=True)
    rho = (np.sum(uncertainty.error_correlation(errors.astype(np.float32))) - 6) / 30
    np.testing.assert_allclose((1 + 5 * rho) / 6, np.var(errors.mean(0)), rtol=1e-4)


@pytest.mark.parametrize("function", [uncertainty.q_statistic, uncertainty.error_correlation])
def test_masks_broken_members_and_transforms(function):
    correct, mask = _correct(), np.arange(200) % 3 > 0
    correct[2, ~mask] = np.nan
    want = function(correct[:, mask])
    np.testing.assert_allclose(function(correct, row_weights=mask), want, rtol=1e-4, atol=1e-6)
    assert np.isfinite(want).all()
    np.testing.assert_array_equal(np.isnan(function(correct))[0], [False, False, True, False])
    np.testing.assert_allclose(jax.jit(function)(correct[:, mask]), want, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(function)(correct[None, :, mask])[0], want, rtol=1e-4, atol=1e-6)


def test_rows_left_out_may_hold_any_mark():
    correct, mask = _correct(), np.arange(200) % 3 > 0
    want = uncertainty.q_statistic(correct, row_weights=mask)
    correct[:, ~mask] = -1
    np.testing.assert_array_equal(uncertainty.q_statistic(correct, row_weights=mask), want)


def test_takes_what_the_scores_give():
    logits = _logits()
    labels = np.random.default_rng(2).integers(3, size=40)
    correct = scores.per_member(scores.accuracy, logits, labels, reduction="none")
    assert uncertainty.q_statistic(correct).shape == (5, 5)


def test_transforms_of_disagreement():
    logits = _logits()
    want = uncertainty.pairwise_disagreement(logits)
    np.testing.assert_allclose(jax.jit(uncertainty.pairwise_disagreement)(logits), want, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(uncertainty.pairwise_disagreement)(logits[None])[0], want, rtol=1e-6)


@pytest.mark.usefixtures("unhooked")
def test_messages():
    with pytest.raises(ValueError, match=r"needs zeros and ones in `correct`.\n  got 0.5 at index \(0, 1\)"):
        uncertainty.q_statistic(np.array([[1.0, 0.5]]))
    with pytest.raises(TypeError, match="error_correlation` needs floating-point `errors`"):
        uncertainty.error_correlation(np.ones((2, 3), int))
    with pytest.raises(ValueError, match=r"one of `row_weights` per row.\n  expected shape \(3,\), got \(2, 3\)"):
        uncertainty.error_correlation(np.ones((2, 3)), row_weights=np.ones((2, 3), bool))
    with pytest.raises(ValueError, match="`uncertainty.pairwise_disagreement` needs one of `row_weights` per row"):
        uncertainty.pairwise_disagreement(_logits(), row_weights=np.ones(3, bool))
