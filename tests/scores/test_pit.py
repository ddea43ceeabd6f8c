import jax
import numpy as np
import pytest

from eqx_ensemble import scores

stats = pytest.importorskip("scipy.stats", reason="the reference distributions are scipy's")

KEY = jax.random.key(0)


def _data(shape=(5, 40), seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape).astype(np.float32), rng.normal(size=shape[1:]).astype(np.float32)


def _steps(samples, targets, weights):
    w = np.asarray(weights, np.float64) / np.sum(weights)
    return np.tensordot(w, samples < targets, 1), np.tensordot(w, samples == targets, 1)


@pytest.mark.parametrize("weights", [np.ones(5), np.array([1, 0, 2, 3, 4])])
def test_pit_is_the_distribution_function(weights):
    samples, targets = _data()
    below, _ = _steps(samples, targets, weights)
    np.testing.assert_allclose(scores.pit(samples, targets, weights=weights), below, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(scores.pit(samples, targets, weights=weights, key=KEY), below, rtol=1e-5, atol=1e-7)
    assert not np.allclose(scores.pit(samples, -targets, weights=weights), below, rtol=1e-2)


def test_ties_are_spread_over_their_step():
    rng = np.random.default_rng(0)
    samples, targets = rng.poisson(3, size=(5, 4000)).astype(np.float32), rng.poisson(3, size=4000)
    below, level = _steps(samples, targets, np.ones(5))
    middle = scores.pit(samples, targets)
    np.testing.assert_allclose(middle, below + level / 2, rtol=1e-5, atol=1e-6)
    drawn = np.asarray(scores.pit(samples, targets, key=KEY))
    share = (drawn[level > 0] - below[level > 0]) / level[level > 0]
    # Dvoretzky, Kiefer, Wolfowitz and Massart: a false alarm in a million.
    limit = np.sqrt(np.log(2e6) / (2 * share.size))
    assert stats.kstest(share, "uniform").statistic < limit
    assert stats.kstest((middle[level > 0] - below[level > 0]) / level[level > 0], "uniform").statistic > limit
    assert not np.array_equal(drawn, scores.pit(samples, targets, key=jax.random.key(1)))


def test_pit_of_gaussians_is_scipys():
    mean, targets = _data()
    variance = np.exp(_data(seed=1)[0])
    weights = np.array([1, 0, 2, 3, 4])
    want = np.tensordot(weights / 10, stats.norm.cdf(targets, np.float64(mean), np.sqrt(np.float64(variance))), 1)
    np.testing.assert_allclose(scores.pit_gaussian_mixture(mean, variance, targets, weights=weights), want, rtol=2e-5)
    assert not np.allclose(scores.pit_gaussian_mixture(mean, np.sqrt(variance), targets, weights=weights), want, 1e-2)


def test_a_large_offset_costs_no_precision():
    mean, targets = _data()
    mean, targets, variance = mean + np.float32(1e4), targets + np.float32(1e4), np.ones((5, 40), np.float32)
    want = stats.norm.cdf(np.float64(targets), np.float64(mean), 1).mean(0)
    np.testing.assert_allclose(scores.pit_gaussian_mixture(mean, variance, targets), want, rtol=1e-5)
    careless = stats.norm.cdf(np.float64(np.float32(targets / 3) - np.float32(mean / 3)) * 3, 0, 1).mean(0)
    assert not np.allclose(careless, want, rtol=1e-5)


def test_pit_of_a_calibrated_forecast_is_uniform():
    mean = _data((1, 20_000))[0]
    targets = mean[0] + _data((1, 20_000), seed=1)[1]
    limit = np.sqrt(np.log(2e6) / (2 * targets.size))
    assert stats.kstest(scores.pit_gaussian_mixture(mean, np.ones_like(mean), targets), "uniform").statistic < limit
    narrow = scores.pit_gaussian_mixture(mean, 0.8 * np.ones_like(mean), targets)
    assert stats.kstest(narrow, "uniform").statistic > limit


def test_nan_and_masks():
    samples, targets = _data()
    samples[0, 3], targets[5] = np.nan, np.nan
    mask = np.arange(40) != 7
    for got in (
        scores.pit(samples, targets, row_weights=mask),
        scores.pit_gaussian_mixture(samples, np.ones_like(samples), targets, row_weights=mask),
    ):
        np.testing.assert_array_equal(np.flatnonzero(np.isnan(got)), [3, 5, 7])
    weights = np.array([0, 1, 1, 1, 1])
    assert np.isfinite(scores.pit(samples, targets, weights=weights)[3])
    samples[:, 0] = [np.inf, -np.inf, 0, 0, 0]
    targets[0] = np.inf
    np.testing.assert_allclose(scores.pit(samples, targets)[0], 0.8 + 0.1, rtol=1e-6)


@pytest.mark.parametrize("num_bins", [1, 4, 10])
def test_pit_histogram_is_numpys(num_bins):
    values = np.random.default_rng(0).uniform(size=(20, 50)).astype(np.float32)
    mask = np.arange(20)[:, None] % 3 > np.zeros(50)
    want = np.histogram(values, bins=num_bins, range=(0, 1))[0]
    np.testing.assert_array_equal(scores.pit_histogram(values, num_bins=num_bins), want)
    masked = np.histogram(values[mask], bins=num_bins, range=(0, 1))[0]
    np.testing.assert_array_equal(scores.pit_histogram(values, num_bins=num_bins, row_weights=mask), masked)
    assert not np.array_equal(want, masked)


def test_ends_of_the_pit_histogram():
    np.testing.assert_array_equal(
        scores.pit_histogram(np.array([0, 0.25, 0.5, 0.75, 1, np.nan]), num_bins=4), [2, 1, 1, 1]
    )


def test_ranks_without_ties_are_counts():
    samples, targets = _data((5, 300))
    want = np.bincount((samples < targets).sum(0), minlength=6)
    np.testing.assert_array_equal(scores.rank_histogram(samples, targets, key=KEY), want)
    mask = np.arange(300) % 2 == 0
    masked = np.bincount((samples < targets).sum(0)[mask], minlength=6)
    spoilt = np.where(mask, samples, np.nan)
    np.testing.assert_array_equal(scores.rank_histogram(spoilt, targets, row_weights=mask, key=KEY), masked)
    assert not np.array_equal(scores.rank_histogram(samples, -targets, key=KEY), want)


def test_tied_ranks_are_drawn_with_equal_probability():
    # All five members and the target are equal: every rank has probability 1/6. Of another one, ranks 2, 3 and 4.
    rows = 60_000
    samples = np.stack([np.zeros(rows), np.full(rows, 1), np.full(rows, 1), np.full(rows, 3), np.full(rows, 5)])
    for drawn, want in (
        (scores.rank_histogram(np.zeros((5, rows)), np.zeros(rows), key=KEY), np.full(6, 1 / 6)),
        (scores.rank_histogram(samples, np.ones(rows), key=KEY), np.array([0, 1, 1, 1, 0, 0]) / 3),
    ):
        # Six standard deviations of a binomial count: a false alarm in a hundred million.
        drawn = np.asarray(drawn)
        assert (np.abs(drawn - rows * want) <= 6 * np.sqrt(rows * want * (1 - want))).all()
        assert np.abs(drawn - rows * np.roll(want, 1)).max() > 600 or len(set(want)) == 1


def test_ranks_of_exchangeable_targets_are_uniform():
    # Counts, so that there are ties: without drawing them the histogram would not be flat.
    rows = 30_000
    values = np.random.default_rng(0).poisson(2, size=(6, rows)).astype(np.float32)
    drawn = np.asarray(scores.rank_histogram(values[1:], values[0], key=KEY))
    assert stats.chisquare(drawn).pvalue > 1e-6
    lowest = np.bincount((values[1:] < values[0]).sum(0), minlength=6)
    assert stats.chisquare(lowest).pvalue < 1e-6


def test_jit_and_vmap():
    samples, targets = _data()
    counts = jax.jit(lambda x, y, key: scores.rank_histogram(x, y, key=key))(samples, targets, KEY)
    np.testing.assert_array_equal(counts, scores.rank_histogram(samples, targets, key=KEY))
    legacy = scores.rank_histogram(np.zeros((2, 9)), np.zeros(9), key=jax.random.PRNGKey(0))
    np.testing.assert_array_equal(legacy, scores.rank_histogram(np.zeros((2, 9)), np.zeros(9), key=KEY))
    twice = jax.vmap(scores.pit)(np.stack([samples] * 2), np.stack([targets] * 2))
    np.testing.assert_allclose(twice[1], scores.pit(samples, targets), rtol=1e-6)


def test_values_outside_zero_to_one_are_not_counted_in_the_outer_bins():
    values = np.float32([-0.5, 0.2, 1.5, np.nan])
    with pytest.raises(ValueError, match=r"`values` from 0 to 1.\n  got -0.5 at index \(0,\), the first of 2 such"):
        scores.pit_histogram(values, num_bins=2)
    np.testing.assert_array_equal(jax.jit(lambda x: scores.pit_histogram(x, num_bins=2))(values), [1, 0])
    mask = np.array([False, True, False, True])
    np.testing.assert_array_equal(scores.pit_histogram(values, num_bins=2, row_weights=mask), [1, 0])
