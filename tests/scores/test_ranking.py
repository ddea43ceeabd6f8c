import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee

METRICS = {"auroc": ee.scores.auroc, "aupr": ee.scores.aupr, "fpr_at_tpr": ee.scores.fpr_at_tpr}


def _rows(num_rows=200, seed=0, distinct=None):
    """Scores, with few distinct values on request, which rows are positive, and the weight of each."""
    rng = np.random.default_rng(seed)
    positives = rng.uniform(size=num_rows) < 0.3
    scores = rng.normal(size=num_rows) + positives
    if distinct is not None:
        scores = np.round(scores * distinct) / distinct
    return scores.astype(np.float32), positives, rng.integers(0, 4, size=num_rows).astype(np.float32)


def _sklearn(name, scores, positives, row_weights=None, level=0.95):
    metrics = pytest.importorskip("sklearn.metrics", reason="the reference metrics are scikit-learn's")
    if name == "auroc":
        return metrics.roc_auc_score(positives, scores, sample_weight=row_weights)
    if name == "aupr":
        return metrics.average_precision_score(positives, scores, sample_weight=row_weights)
    false, hits, _ = metrics.roc_curve(positives, scores, sample_weight=row_weights, drop_intermediate=False)
    return false[np.argmax(hits >= level - 1e-12)]


@pytest.mark.parametrize("distinct", [None, 1, 4])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", METRICS)
def test_is_scikit_learns(name, weighted, distinct):
    scores, positives, row_weights = _rows(distinct=distinct)
    row_weights = row_weights if weighted else None
    want = _sklearn(name, scores, positives, row_weights)
    np.testing.assert_allclose(METRICS[name](scores, positives, row_weights=row_weights), want, rtol=1e-5)
    with jax.enable_x64(True):
        got = METRICS[name](scores.astype(np.float64), positives, row_weights=row_weights)
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got, want, rtol=1e-12)
    # The other kind called positive, and the weights left out, would not pass.
    assert not np.allclose(_sklearn(name, -scores, ~positives, row_weights), want, rtol=1e-3) or name == "auroc"
    if weighted:
        assert not np.allclose(_sklearn(name, scores, positives), want, rtol=1e-3)


def test_auroc_is_the_share_of_pairs():
    scores, positives, _ = _rows(60, distinct=2)
    pairs = list(itertools.product(scores[positives], scores[~positives]))
    want = np.mean([0.5 if one == other else float(one > other) for one, other in pairs])
    np.testing.assert_allclose(ee.scores.auroc(scores, positives), want, rtol=1e-6)
    # Ties counted as wins would not pass.
    assert not np.isclose(np.mean([one >= other for one, other in pairs]), want, rtol=1e-2)


def test_auroc_of_two_gaussians():
    # The probability that a Gaussian with mean 1 exceeds one with mean 0 is the distribution function at 1/sqrt(2).
    rng = np.random.default_rng(0)
    scores = np.concatenate([rng.normal(size=20_000), 1 + rng.normal(size=20_000)]).astype(np.float32)
    want = 0.5 * (1 + math.erf(0.5))
    # Six standard errors of at most sqrt(1 / (4 * 20,000)).
    assert abs(ee.scores.auroc(scores, np.arange(40_000) >= 20_000) - want) < 6 * np.sqrt(1 / 80_000)
    assert abs(want - 0.5) > 0.2


def test_perfect_reversed_and_constant_scores():
    positives = np.arange(10) >= 6
    ladder = np.arange(10, dtype=np.float32)
    found = [metric(ladder, positives) for metric in METRICS.values()]
    np.testing.assert_allclose(found, [1, 1, 0], atol=1e-6)
    average_precision = np.mean([k / (6 + k) for k in range(1, 5)])
    found = [metric(-ladder, positives) for metric in METRICS.values()]
    np.testing.assert_allclose(found, [0, average_precision, 1], atol=1e-6)
    found = [metric(np.zeros(10, np.float32), positives) for metric in METRICS.values()]
    np.testing.assert_allclose(found, [0.5, 0.4, 1], atol=1e-6)


@pytest.mark.parametrize("level", [0.25, 0.5, 0.75, 0.95])
def test_the_share_that_is_found_is_met_exactly(level):
    # Twenty positive rows, one negative between each two: k / 20 is met at the k-th, after k - 1 negative ones.
    scores = -np.arange(40, dtype=np.float32)
    positives = np.arange(40) % 2 == 0
    want = (round(20 * level) - 1) / 20
    np.testing.assert_allclose(ee.scores.fpr_at_tpr(scores, positives, level=level), want, rtol=1e-6)
    weights = np.full(40, 0.1, np.float32)
    got = ee.scores.fpr_at_tpr(scores, positives, level=level, row_weights=weights)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert want != (round(20 * level)) / 20


@pytest.mark.parametrize("name", METRICS)
def test_row_weights_count_rows_and_masks_leave_them_out(name):
    metric = METRICS[name]
    scores, positives, row_weights = _rows(distinct=3)
    repeat = row_weights.astype(int)
    want = metric(np.repeat(scores, repeat), np.repeat(positives, repeat))
    np.testing.assert_allclose(metric(scores, positives, row_weights=row_weights), want, rtol=1e-5)
    mask = row_weights > 1
    want = metric(scores[mask], positives[mask])
    broken = np.where(mask, scores, np.nan).astype(np.float32)
    np.testing.assert_allclose(metric(broken, positives, row_weights=mask), want, rtol=1e-5)
    broken = np.where(mask, scores, np.inf).astype(np.float32)
    np.testing.assert_allclose(metric(broken, positives, row_weights=mask.astype(np.float32)), want, rtol=1e-5)
    assert not np.allclose(metric(scores, positives), want, rtol=1e-3)


@pytest.mark.parametrize("name", METRICS)
def test_transforms_and_unknown_scores(name):
    metric = METRICS[name]
    scores, positives, _ = _rows(distinct=3)
    want = metric(scores, positives)
    np.testing.assert_allclose(jax.jit(metric)(scores, positives), want, rtol=1e-6)
    both = jax.vmap(metric, in_axes=(0, None))(np.stack([scores, -scores]), positives)
    np.testing.assert_allclose(both, [want, metric(-scores, positives)], rtol=1e-6)
    np.testing.assert_allclose(metric(scores.reshape(20, 10), positives.reshape(20, 10)), want, rtol=1e-6)
    shuffled = np.random.default_rng(1).permutation(200)
    np.testing.assert_allclose(metric(scores[shuffled], positives[shuffled]), want, rtol=1e-6)
    np.testing.assert_allclose(metric(np.exp(scores), positives), want, rtol=1e-6)
    scores[3] = np.nan
    assert np.isnan(metric(scores, positives))
    assert np.isnan(jax.jit(metric)(scores, np.ones(200, bool)))  # one kind only


@pytest.mark.parametrize("name", METRICS)
def test_infinite_scores_are_ranked(name):
    scores, positives, _ = _rows(50)
    infinite = np.where(scores > 1, np.inf, np.where(scores < -1, -np.inf, scores)).astype(np.float32)
    finite = np.clip(scores, -1, 1)
    want = METRICS[name](np.where(scores > 1, 5, np.where(scores < -1, -5, scores)).astype(np.float32), positives)
    np.testing.assert_allclose(METRICS[name](infinite, positives), want, rtol=1e-6)
    assert finite.min() == -1
