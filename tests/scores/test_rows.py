"""Scores of rows: rankings, selection, groups, row weights and the bootstrap."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble import scores

metrics = pytest.importorskip("sklearn.metrics", reason="the reference rankings are those of scikit-learn")


def _with_ties(distinct, seed=0, num_rows=200):
    """Scores of few distinct values, which rows are positive, and the weight of each."""
    rng = np.random.default_rng(seed)
    positives = rng.uniform(size=num_rows) < 0.3
    values = np.round((rng.normal(size=num_rows) + positives) * distinct) / distinct
    return values.astype(np.float32), positives, rng.integers(0, 4, size=num_rows).astype(np.float32)


@pytest.mark.parametrize("distinct", [1, 4, 1000])
def test_rankings_are_those_of_scikit_learn(distinct):
    values, positives, weights = _with_ties(distinct)
    for given in ({}, {"row_weights": weights}):
        own = given.get("row_weights")
        false, hits, _ = metrics.roc_curve(positives, values, sample_weight=own, drop_intermediate=False)
        want = {
            "auroc": metrics.roc_auc_score(positives, values, sample_weight=own),
            "aupr": metrics.average_precision_score(positives, values, sample_weight=own),
            "fpr_at_tpr": false[np.argmax(hits >= 0.95 - 1e-12)],
        }
        found = {name: getattr(scores, name)(values, positives, **given) for name in want}
        np.testing.assert_allclose([*found.values()], [*want.values()], rtol=1e-5)


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


NAMES = ("roc_curve", "precision_recall_curve")


def _rows(seed, num_rows=40):
    """Scores with many ties, which rows are positive, and weights of which some are zero."""
    rng = np.random.default_rng(seed)
    values = np.round(2 * rng.normal(size=num_rows)).astype(np.float32)
    positives = rng.uniform(size=num_rows) < 0.4
    return values, positives, rng.integers(0, 4, size=num_rows).astype(np.float32)


def _points(name, values, positives, weights=None):
    """Those of scikit-learn, from the highest threshold to the lowest."""
    if name == "roc_curve":
        kept = None if weights is None else weights > 0
        if kept is not None:
            values, positives, weights = values[kept], positives[kept], weights[kept]
        return np.stack(metrics.roc_curve(positives, values, sample_weight=weights, drop_intermediate=False), -1)
    kept = slice(None) if weights is None else weights > 0
    weights = None if weights is None else weights[kept]
    found = metrics.precision_recall_curve(positives[kept], values[kept], sample_weight=weights)
    precision, recall, thresholds = (x[::-1] for x in found)
    return np.stack([precision, recall, np.concatenate([[np.inf], thresholds])], -1)


def assert_same_points(curve, want):
    points = np.stack([np.asarray(x, np.float64) for x in curve], -1)
    _, first = np.unique(-points[:, -1], return_index=True)
    np.testing.assert_allclose(points[first], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(4))
def test_scikit_learn_agrees(name, seed):
    values, positives, weights = _rows(seed)
    function = getattr(scores, name)
    plain = function(values, positives)
    assert all(part.shape == (41,) for part in plain)
    assert_same_points(plain, _points(name, values, positives))
    weighted = function(np.where(weights == 0, np.nan, values), positives, row_weights=0.3 * weights)
    assert_same_points(weighted, _points(name, values, positives, weights))
    # The other kind called positive would not pass.
    with pytest.raises(AssertionError):
        assert_same_points(function(values, ~positives), _points(name, values, positives))


def test_rates_never_fall():
    rng = np.random.default_rng(0)
    values, positives = rng.normal(size=20_000).astype(np.float32), rng.uniform(size=20_000) < 0.5
    weights = rng.exponential(size=20_000) ** 4
    for name in NAMES:
        curve = getattr(scores, name)(values, positives, row_weights=weights)
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


def _rows_of_selective(num_rows=60, seed=0, distinct=None):
    rng = np.random.default_rng(seed)
    values, losses = rng.normal(size=num_rows), rng.exponential(size=num_rows)
    if distinct is not None:
        values = np.round(values * distinct) / distinct
    return (values + 0.3 * losses if distinct is None else values).astype(np.float32), losses.astype(np.float32)


def _risks(order, losses):
    exact = losses.astype(np.float64)
    return np.array([np.mean([exact[i] for i in order[: k + 1]]) for k in range(len(order))])


def test_risk_is_the_mean_loss_of_the_most_certain():
    values, losses = _rows_of_selective()
    want = _risks(np.argsort(values), losses)
    found = ee.scores.risk_coverage(values, losses)
    np.testing.assert_allclose(found.risk, want, rtol=1e-5)
    np.testing.assert_allclose(found.coverage, np.arange(1, 61) / 60, rtol=1e-6)
    np.testing.assert_allclose(ee.scores.aurc(values, losses), want.mean(), rtol=1e-5)
    best = _risks(np.argsort(losses), losses).mean()
    np.testing.assert_allclose(ee.scores.excess_aurc(values, losses), want.mean() - best, rtol=1e-5)
    # The least certain first would not pass.
    assert not np.allclose(_risks(np.argsort(-values), losses), want, rtol=1e-2)
    with jax.enable_x64(True):
        wide = values.astype(np.float64), losses.astype(np.float64)
        np.testing.assert_allclose(ee.scores.aurc(*wide), want.mean(), rtol=1e-12)
        np.testing.assert_allclose(ee.scores.excess_aurc(*wide), want.mean() - best, rtol=1e-12)


def test_tied_rows_have_the_mean_of_their_weights():
    args = jnp.array([0.0, 1.0, 1.0]), jnp.array([0.0, 0.0, 1.0])
    weights = jnp.array([1.0, 1.0, 3.0])  # of which 1, 3 and 5 are covered, at risks 0, 1.5 / 3 and 3 / 5
    np.testing.assert_allclose(ee.scores.aurc(*args, row_weights=weights), (2 * 0.5 + 2 * 0.6) / 5, rtol=1e-6)


def test_ties_are_the_mean_over_all_orders():
    values, losses = np.float32([2, 1, 1, 1, 3, 3]), np.float32([0.5, 3, 0, 1, 2, 7])
    orders = [p for p in itertools.permutations(range(6)) if (np.diff(values[list(p)]) >= 0).all()]
    assert len(orders) == 12
    want = np.mean([_risks(order, losses) for order in orders], axis=0)
    np.testing.assert_allclose(ee.scores.risk_coverage(values, losses).risk, want, rtol=1e-6)
    # The order in which rows that tie were passed is one of them, and would not pass.
    assert not np.allclose(_risks(np.argsort(values, kind="stable"), losses), want, rtol=1e-2)
    np.testing.assert_allclose(ee.scores.aurc(values, losses), want.mean(), rtol=1e-6)


def test_what_losses_have_in_common_costs_the_excess_nothing():
    values, losses = _rows_of_selective(500)
    losses = np.round(losses * 512) / 512  # exact also after 1e4 is added
    far = (1e4 + losses).astype(np.float32)
    want = ee.scores.excess_aurc(values, losses)
    np.testing.assert_allclose(ee.scores.excess_aurc(values, far), want, rtol=1e-5)
    plain = ee.scores.aurc(values, far) - ee.scores.aurc(far, far)
    assert abs(plain / want - 1) > 1e-4  # the difference of two large areas


def test_masked_rows_are_left_out_whatever_they_hold():
    values, losses = _rows_of_selective()
    mask = np.arange(60) % 3 > 0
    values[5] = np.inf  # a row that counts, as uncertain as can be
    broken = np.where(mask, values, np.nan).astype(np.float32), np.where(mask, losses, np.nan).astype(np.float32)
    want, got = ee.scores.risk_coverage(values[mask], losses[mask]), ee.scores.risk_coverage(*broken, row_weights=mask)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one[:40], other, rtol=1e-5)
        np.testing.assert_allclose(one[40:], other[-1], rtol=1e-5)
    for area in (ee.scores.aurc, ee.scores.excess_aurc):
        np.testing.assert_allclose(area(*broken, row_weights=mask), area(values[mask], losses[mask]), rtol=1e-5)
        assert not np.allclose(area(*_rows_of_selective()), area(values[mask], losses[mask]), rtol=1e-2)


RNG = np.random.default_rng(0)
SETS, LABELS = RNG.uniform(size=(60, 4)) < 0.5, RNG.integers(4, size=60)
GROUPS, VALUES = RNG.integers(3, size=60), RNG.normal(size=60).astype(np.float32)
MASK = RNG.uniform(size=60) < 0.7
INSIDE, SIZES = SETS[np.arange(60), LABELS], SETS.sum(-1)


def _loop(values, groups, num_groups, mask):
    rows = [values[mask & (groups == g)] for g in range(num_groups)]
    return [np.mean(np.float64(x)) if len(x) else np.nan for x in rows], [len(x) for x in rows]


def test_is_the_loop():
    spoilt, groups = np.where(MASK, VALUES, np.nan), np.where(MASK, GROUPS, -1)
    want = _loop(VALUES, GROUPS, 4, MASK)
    got = scores.by_group(spoilt.reshape(6, 10), groups.reshape(6, 10), num_groups=4, row_weights=MASK.reshape(6, 10))
    np.testing.assert_allclose(got.mean, want[0], rtol=1e-5)
    np.testing.assert_array_equal(got.count, want[1])
    assert got.count[3] == 0
    assert np.isnan(got.mean[3])
    traced = jax.jit(lambda x, g: scores.by_group(x, g, num_groups=4))
    # While tracing, rows of other groups do not count: not from the end, and not in the last group.
    np.testing.assert_allclose(traced(VALUES, np.where(MASK, GROUPS, -1)).mean, want[0], rtol=1e-5)
    np.testing.assert_allclose(traced(VALUES, np.where(MASK, GROUPS, 9)).mean, want[0], rtol=1e-5)
    assert not np.allclose(traced(VALUES, GROUPS).mean[:3], want[0][:3], rtol=1e-3)


def test_coverage_by_class_and_by_size():
    labels = np.where(MASK, LABELS, -7)
    by_class = scores.class_conditional_coverage(SETS, labels, row_weights=MASK)
    by_size = scores.size_stratified_coverage(SETS, labels, row_weights=MASK)
    for got, groups, count in ((by_class, LABELS, 4), (by_size, SIZES, 5)):
        want = _loop(INSIDE, groups, count, MASK)
        np.testing.assert_allclose(got.mean, want[0], rtol=1e-6)
        np.testing.assert_array_equal(got.count, want[1])
    # Sums of rows are those of all rows.
    covered = scores.set_coverage(SETS, labels, row_weights=MASK)
    for got in (by_class, by_size):
        total = np.nansum(np.asarray(got.mean) * np.asarray(got.count)) / MASK.sum()
        np.testing.assert_allclose(total, covered, rtol=1e-6)
    assert not np.allclose(by_class.mean, scores.class_conditional_coverage(~SETS, LABELS).mean)
    traced = jax.jit(scores.size_stratified_coverage)(SETS, np.where(np.arange(60) == 0, 4, LABELS))
    assert np.isnan(traced.mean[SIZES[0]])


@pytest.mark.slow
def test_many_equal_rows_keep_their_mean():
    """In float32, one accumulator loses percents of the sum of 0.1 over four million rows."""
    rows = 4_000_000
    zeros, tenth, right = np.zeros(rows, np.int32), np.full(rows, 0.1, np.float32), np.arange(rows) < rows // 2
    near = lambda value: pytest.approx(value, rel=1e-4)
    for num_groups in (1, 2000):
        assert scores.by_group(tenth, zeros, num_groups=num_groups).mean[0] == near(0.1), num_groups
    sets, options = np.stack([right, ~right], axis=-1), {"row_weights": tenth}
    assert scores.balanced_accuracy(sets[None].astype(np.float32), zeros, **options) == near(0.5)
    assert scores.class_conditional_coverage(sets, zeros, **options).mean[0] == near(0.5)
    assert scores.size_stratified_coverage(sets, zeros, **options).mean[1] == near(0.5)
    assert scores.aurc(zeros.astype(np.float32), tenth) == near(0.1)
    assert scores.quantile_calibration_error(0 * tenth, num_levels=1, **options) == near(0.5)


TARGETS = RNG.normal(size=20).astype(np.float32)


def test_gradient_of_a_mean_by_its_weights():
    values, weights = TARGETS, np.arange(20, dtype=np.float32)
    mean = lambda w: scores.pinball(jnp.zeros(20), values, level=0.5, row_weights=w)
    pytest.importorskip("scoringrules")
    each = np.abs(values) / 2
    want = (each - np.average(each, weights=weights)) / weights.sum()
    np.testing.assert_allclose(jax.grad(mean)(weights)[1:], want[1:], rtol=1e-4, atol=1e-7)


def test_bins_of_equal_weight():
    rng = np.random.default_rng(3)
    logits, labels = (3 * rng.normal(size=(1, 400, 3))).astype(np.float32), rng.integers(3, size=400)
    weights = rng.exponential(size=400)
    score = functools.partial(scores.ece, num_bins=5, binning="mass")
    np.testing.assert_allclose(score(logits, labels, row_weights=np.full(400, 0.1)), score(logits, labels), rtol=1e-5)
    # Edges are values, up to one row from those that share the weight exactly.
    confidence = np.sort(np.max(np.asarray(jax.nn.softmax(logits[0])), axis=-1))
    order = np.argsort(np.max(np.asarray(jax.nn.softmax(logits[0])), axis=-1))
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


def test_area_of_weighted_rows():
    uncertainty, losses = np.array([0.1, 0.2, 0.3], np.float32), np.array([0.0, 1.0, 4.0], np.float32)
    got = scores.aurc(uncertainty, losses, row_weights=np.array([1.0, 2.0, 1.0]))
    np.testing.assert_allclose(got, (1 * 0 + 2 * (2 / 3) + 1 * (6 / 4)) / 4, rtol=1e-6)
    np.testing.assert_allclose(
        scores.aurc(uncertainty, losses, row_weights=np.full(3, 0.2)), scores.aurc(uncertainty, losses), rtol=1e-6
    )


KEY = jax.random.key(0)
BOOTSTRAP_VALUES = np.random.default_rng(0).gamma(2, size=50).astype(np.float32)


def test_standard_error_is_the_closed_form():
    # The variance of the mean of n rows drawn with replacement is that of the rows (ddof 0), divided by n.
    want, draws = BOOTSTRAP_VALUES.std() / np.sqrt(50), 20_000
    got = scores.bootstrap(BOOTSTRAP_VALUES, num_draws=draws, key=KEY)
    np.testing.assert_allclose(got.estimate, BOOTSTRAP_VALUES.mean(), rtol=1e-6)
    # A standard deviation of Gaussian draws is uncertain by 1 / sqrt(2 draws); six of these: one alarm in a billion.
    assert abs(got.standard_error / want - 1) < 6 / np.sqrt(2 * draws)
    assert abs(BOOTSTRAP_VALUES.std() / want - 1) > 1  # what a forgotten root of n would give
    assert abs((got.upper - got.lower) / (2 * 1.645 * want) - 1) < 0.05  # a mean of 50 is not quite Gaussian
    assert got.lower < got.estimate < got.upper


def test_draws_are_all_resamples_of_three_rows():
    # Every one of the 27 resamples has equal probability, and the standard error is that of their means.
    values, weights = np.array([0.0, 1.0, 10.0], np.float32), np.array([1.0, 2.0, 3.0])
    rows = np.array(list(itertools.product(range(3), repeat=3)))
    means = (values[rows] * weights[rows]).sum(1) / weights[rows].sum(1)
    got = scores.bootstrap(values, row_weights=weights, num_draws=40_000, key=KEY)
    np.testing.assert_allclose(got.estimate, (values * weights).sum() / 6, rtol=1e-6)
    fourth = np.mean((means - means.mean()) ** 4) / means.var() ** 2
    assert abs(got.standard_error / means.std() - 1) < 6 * np.sqrt((fourth - 1) / (4 * 40_000))
    plain = values[rows].mean(1).std()
    assert abs(plain / means.std() - 1) > 0.02


def test_a_paired_difference_is_known_far_better():
    rng = np.random.default_rng(0)
    easy = rng.gamma(2, size=400).astype(np.float32)
    one, other = easy, easy + 0.1 + 0.05 * rng.normal(size=400).astype(np.float32)
    paired = scores.bootstrap(other - one, key=KEY)
    both = scores.bootstrap(np.stack([one, other]), key=KEY)
    assert paired.standard_error < 0.1 * both.standard_error.min()
    np.testing.assert_allclose(both.estimate[1] - both.estimate[0], paired.estimate, rtol=1e-4)
    # The same rows are drawn for both, so that the difference of the draws is the draw of the difference.
    same = scores.bootstrap(np.stack([one, other]), lambda m: m[1] - m[0], key=KEY)
    np.testing.assert_allclose(same, paired, rtol=1e-3, atol=1e-6)
    assert paired.lower > 0


def test_any_statistic():
    squared = BOOTSTRAP_VALUES**2
    got = scores.bootstrap(squared, jnp.sqrt, num_draws=5000, key=KEY)
    np.testing.assert_allclose(got.estimate, np.sqrt(squared.mean()), rtol=1e-6)
    # The delta method, which 50 rows follow within a few per cent.
    delta = squared.std() / np.sqrt(50) / (2 * np.sqrt(squared.mean()))
    assert abs(got.standard_error / delta - 1) < 0.1
    assert abs(scores.bootstrap(squared, num_draws=5000, key=KEY).standard_error / delta - 1) > 1


def test_a_large_offset_costs_no_precision():
    values = np.float32(1e4 + 0.1 * np.random.default_rng(0).normal(size=20_000))
    rest = np.float32(np.float64(values) - 1e4)
    want = scores.bootstrap(rest, num_draws=200, key=KEY).standard_error
    got = scores.bootstrap(values, num_draws=200, key=KEY).standard_error
    np.testing.assert_allclose(got, want, rtol=1e-3)
    # Floats near 1e4 are further apart than the standard error is large.
    draws = np.random.default_rng(0).integers(20_000, size=(200, 20_000))
    careless = np.float32(np.float64(values)[draws].mean(1)).std()
    assert abs(careless / rest[draws].mean(1).std() - 1) > 0.02
