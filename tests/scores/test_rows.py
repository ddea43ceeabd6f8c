"""Scores of rows: rankings, selection, groups, row weights and the bootstrap."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import scores

metrics = pytest.importorskip("sklearn.metrics", reason="the reference rankings are those of scikit-learn")


@pytest.mark.parametrize("level", [0.25, 0.5, 0.75, 0.95])
def test_the_share_that_is_found_is_met_exactly(level):
    # Twenty positive rows, one negative between each two: k / 20 is met at the k-th, after k - 1 negative ones.
    values, positives = -np.arange(40, dtype=np.float32), np.arange(40) % 2 == 0
    for weights in (None, np.full(40, 0.1, np.float32)):
        got = scores.fpr_at_tpr(values, positives, level=level, row_weights=weights)
        np.testing.assert_allclose(got, (round(20 * level) - 1) / 20, rtol=1e-5)


def _points(name, values, positives, weights=None):
    """Those of scikit-learn, from the highest threshold to the lowest."""
    kept = slice(None) if weights is None else weights > 0
    weights = None if weights is None else weights[kept]
    if name == "roc_curve":
        found = metrics.roc_curve(positives[kept], values[kept], sample_weight=weights, drop_intermediate=False)
        return np.stack(found, -1)
    found = metrics.precision_recall_curve(positives[kept], values[kept], sample_weight=weights)
    precision, recall, thresholds = (x[::-1] for x in found)
    return np.stack([precision, recall, np.concatenate([[np.inf], thresholds])], -1)


def assert_same_points(curve, want):
    points = np.stack([np.asarray(x, np.float64) for x in curve], -1)
    _, first = np.unique(-points[:, -1], return_index=True)
    np.testing.assert_allclose(points[first], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["roc_curve", "precision_recall_curve"])
@pytest.mark.parametrize("seed", range(4))
def test_curves_are_those_of_scikit_learn(name, seed):
    rng = np.random.default_rng(seed)
    values = np.round(2 * rng.normal(size=40)).astype(np.float32)  # many ties
    positives, weights = rng.uniform(size=40) < 0.4, rng.integers(0, 4, size=40).astype(np.float32)
    function = getattr(scores, name)
    plain = function(values, positives)
    assert all(part.shape == (41,) for part in plain)
    assert_same_points(plain, _points(name, values, positives))
    weighted = function(np.where(weights == 0, np.nan, values), positives, row_weights=0.3 * weights)
    assert_same_points(weighted, _points(name, values, positives, weights))
    # The other kind called positive would not pass.
    with pytest.raises(AssertionError):
        assert_same_points(function(values, ~positives), _points(name, values, positives))


@pytest.mark.slow
def test_rates_never_fall():
    rng = np.random.default_rng(0)
    values, positives = rng.normal(size=20_000).astype(np.float32), rng.uniform(size=20_000) < 0.5
    weights = rng.exponential(size=20_000) ** 4
    for function in (scores.roc_curve, scores.precision_recall_curve):
        curve = function(values, positives, row_weights=weights)
        assert (np.diff(curve[1]) >= 0).all()
        assert curve[1][0] == 0
        np.testing.assert_allclose(curve[1][-1], 1, rtol=1e-6)
        assert np.max(curve[1]) <= 1


def test_infinite_scores_are_thresholds():
    values = np.array([np.inf, 1.0, -np.inf, 0.0], np.float32)
    curve = scores.roc_curve(
        values, np.array([True, False, True, False]), row_weights=np.array([True, True, True, False])
    )
    np.testing.assert_array_equal(curve.thresholds, [np.inf, np.inf, 1, -np.inf, -np.inf])
    np.testing.assert_array_equal(curve.true_positive_rate, [0, 0.5, 0.5, 1, 1])


RNG = np.random.default_rng(0)
VALUES = RNG.normal(size=60).astype(np.float32)


def _risks(order, losses):
    return np.cumsum(np.float64(losses)[list(order)]) / np.arange(1, len(order) + 1)


def test_ties_are_the_mean_over_all_orders():
    values, losses = np.float32([2, 1, 1, 1, 3, 3]), np.float32([0.5, 3, 0, 1, 2, 7])
    orders = [p for p in itertools.permutations(range(6)) if (np.diff(values[list(p)]) >= 0).all()]
    assert len(orders) == 12
    want = np.mean([_risks(order, losses) for order in orders], axis=0)
    found = scores.risk_coverage(values, losses)
    np.testing.assert_allclose(found.risk, want, rtol=1e-6)
    np.testing.assert_allclose(found.coverage, np.arange(1, 7) / 6, rtol=1e-6)
    # The order in which rows that tie were passed is one of them, and would not pass.
    assert not np.allclose(_risks(np.argsort(values, kind="stable"), losses), want, rtol=1e-2)
    np.testing.assert_allclose(scores.aurc(values, losses), want.mean(), rtol=1e-6)


@pytest.mark.slow
def test_what_losses_have_in_common_costs_the_excess_nothing():
    values, losses = VALUES, np.round(np.abs(VALUES[::-1]) * 512) / 512  # exact also after 1e4 is added
    far = (1e4 + losses).astype(np.float32)
    np.testing.assert_allclose(scores.excess_aurc(values, far), scores.excess_aurc(values, losses), rtol=1e-5)


def test_ignored_rows_are_the_end_of_a_curve():
    values, losses, mask = VALUES.copy(), np.abs(VALUES[::-1]), np.arange(60) % 3 > 0
    values[5] = np.inf  # a row that counts, as uncertain as can be
    want = scores.risk_coverage(values[mask], losses[mask])
    broken = (np.where(mask, x, np.nan).astype(np.float32) for x in (values, losses))
    for one, other in zip(scores.risk_coverage(*broken, row_weights=mask), want, strict=True):
        np.testing.assert_allclose(one[:40], other, rtol=1e-5)
        np.testing.assert_allclose(one[40:], other[-1], rtol=1e-5)


def test_coverage_by_group_by_class_and_by_size():
    sets, labels, mask = RNG.uniform(size=(60, 4)) < 0.5, RNG.integers(4, size=60), RNG.uniform(size=60) < 0.7
    inside, sizes, other = sets[np.arange(60), labels], sets.sum(-1), np.where(mask, labels, -7)
    # While tracing, rows of other groups do not count: not from the end, and not in the last group.
    of_group = jax.jit(lambda groups: scores.by_group(inside.astype(np.float32), groups, num_groups=5))
    for got, groups, count in (
        (scores.class_conditional_coverage(sets, other, row_weights=mask), labels, 4),
        (scores.size_stratified_coverage(sets, other, row_weights=mask), sizes, 5),
        (of_group(other), labels, 5),
        (of_group(np.where(mask, labels, 9)), labels, 5),
    ):
        rows = [inside[mask & (groups == g)] for g in range(count)]
        np.testing.assert_allclose(got.mean, [x.mean() if len(x) else np.nan for x in rows], rtol=1e-6)
        np.testing.assert_array_equal(got.count, [len(x) for x in rows])
    traced = jax.jit(scores.size_stratified_coverage)(sets, np.where(np.arange(60) == 0, 4, labels))
    assert np.isnan(traced.mean[sizes[0]])


@pytest.mark.slow
def test_many_equal_rows_keep_their_mean():
    """In float32, one accumulator loses percents of the sum of 0.1 over four million rows."""
    zeros, tenth = np.zeros(4_000_000, np.int32), np.full(4_000_000, 0.1, np.float32)
    np.testing.assert_allclose(scores.by_group(tenth, zeros, num_groups=2000).mean[0], 0.1, rtol=1e-4)
    np.testing.assert_allclose(scores.aurc(zeros.astype(np.float32), tenth), 0.1, rtol=1e-4)


@pytest.mark.slow
def test_gradient_of_a_mean_by_its_weights():
    values, weights = VALUES[:20], np.arange(20, dtype=np.float32)
    mean = lambda w: scores.pinball(jnp.zeros(20), values, level=0.5, row_weights=w)
    each = np.abs(values) / 2
    want = (each - np.average(each, weights=weights)) / weights.sum()
    np.testing.assert_allclose(jax.grad(mean)(weights)[1:], want[1:], rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_bins_of_equal_weight():
    rng = np.random.default_rng(3)
    logits, labels = (3 * rng.normal(size=(1, 400, 3))).astype(np.float32), rng.integers(3, size=400)
    weights = rng.exponential(size=400)
    score = functools.partial(scores.ece, num_bins=5, binning="mass")
    # Edges are values, up to one row from those that share the weight exactly.
    confidence = np.max(np.asarray(jax.nn.softmax(logits[0])), axis=-1)
    order = np.argsort(confidence)
    confidence = confidence[order]
    right = (logits[0].argmax(-1) == labels)[order]
    at_most = np.cumsum(weights[order])
    position = (at_most[-1] - at_most[-1] / 400) * np.arange(1, 5) / 5
    index = np.searchsorted(confidence[np.searchsorted(at_most, position, side="right")], confidence)
    per_bin = [np.bincount(index, weights[order] * x, 5) for x in (np.ones(400), confidence, right)]
    assert np.ptp(per_bin[0]) <= 2 * weights.max()
    want = np.abs(per_bin[1] - per_bin[2]).sum() / weights.sum()
    np.testing.assert_allclose(score(logits, labels, row_weights=weights), want, rtol=1e-5)
    assert not np.allclose(score(logits, labels), want, rtol=1e-3)


@pytest.mark.slow
def test_noise_of_weighted_labels_is_subtracted():
    """A calibrated model has no squared error on average; by sums of weights, or none, too little is subtracted."""
    rng = np.random.default_rng(4)
    weights, p = rng.exponential(size=60) ** 2, 0.7
    logits = jnp.log(jnp.broadcast_to(jnp.array([p, 1 - p]), (1, 60, 2)))
    labels = (rng.uniform(size=(4000, 60)) > p).astype(int)
    score = functools.partial(scores.squared_calibration_error, num_bins=1, row_weights=weights)
    found = jax.vmap(lambda labels: score(logits, labels))(labels)
    error = found.std() / np.sqrt(4000)
    assert abs(found.mean()) < 5 * error
    plain = jax.vmap(lambda labels: score(logits, labels, debiased=False))(labels)
    # What 60 rows of equal weight would have is not what is to be subtracted.
    assert plain.mean() - p * (1 - p) / 60 > 20 * error
    np.testing.assert_allclose(plain.mean(), p * (1 - p) * (weights**2).sum() / weights.sum() ** 2, rtol=0.15)


KEY = jax.random.key(0)
BOOTSTRAP_VALUES = np.random.default_rng(0).gamma(2, size=50).astype(np.float32)


@pytest.mark.slow
def test_standard_error_is_the_closed_form():
    # The variance of the mean of n rows drawn with replacement is that of the rows (ddof 0), divided by n.
    want, draws = BOOTSTRAP_VALUES.std() / np.sqrt(50), 20_000
    got = scores.bootstrap(BOOTSTRAP_VALUES, num_draws=draws, key=KEY)
    np.testing.assert_allclose(got.estimate, BOOTSTRAP_VALUES.mean(), rtol=1e-6)
    # A standard deviation of Gaussian draws is uncertain by 1 / sqrt(2 draws); six of these: one alarm in a billion.
    assert abs(got.standard_error / want - 1) < 6 / np.sqrt(2 * draws)
    assert abs((got.upper - got.lower) / (2 * 1.645 * want) - 1) < 0.05  # a mean of 50 is not quite Gaussian
    assert got.lower < got.estimate < got.upper


@pytest.mark.slow
def test_draws_are_all_resamples_of_three_rows():
    # Every one of the 27 resamples has equal probability, and the standard error is that of their means.
    values, weights = np.array([0.0, 1.0, 10.0], np.float32), np.array([1.0, 2.0, 3.0])
    rows = np.array(list(itertools.product(range(3), repeat=3)))
    means = (values[rows] * weights[rows]).sum(1) / weights[rows].sum(1)
    got = scores.bootstrap(values, row_weights=weights, num_draws=40_000, key=KEY)
    np.testing.assert_allclose(got.estimate, (values * weights).sum() / 6, rtol=1e-6)
    fourth = np.mean((means - means.mean()) ** 4) / means.var() ** 2
    assert abs(got.standard_error / means.std() - 1) < 6 * np.sqrt((fourth - 1) / (4 * 40_000))


@pytest.mark.slow
def test_a_paired_difference_is_known_far_better():
    one = np.random.default_rng(0).gamma(2, size=400).astype(np.float32)
    other = one + 0.1 + 0.05 * np.random.default_rng(1).normal(size=400).astype(np.float32)
    paired = scores.bootstrap(other - one, key=KEY)
    both = scores.bootstrap(np.stack([one, other]), key=KEY)
    assert paired.standard_error < 0.1 * both.standard_error.min()
    np.testing.assert_allclose(both.estimate[1] - both.estimate[0], paired.estimate, rtol=1e-4)
    # The same rows are drawn for both, so that the difference of the draws is the draw of the difference.
    same = scores.bootstrap(np.stack([one, other]), lambda m: m[1] - m[0], key=KEY)
    np.testing.assert_allclose(same, paired, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_a_large_offset_costs_the_standard_error_no_precision():
    values = np.float32(1e4 + 0.1 * np.random.default_rng(0).normal(size=20_000))
    rest = np.float32(np.float64(values) - 1e4)  # floats near 1e4 are further apart than the standard error is large
    got, want = (scores.bootstrap(x, num_draws=200, key=KEY).standard_error for x in (values, rest))
    np.testing.assert_allclose(got, want, rtol=1e-3)
