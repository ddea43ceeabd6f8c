import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import scores

NUM_ROWS = 40_000
RNG = np.random.default_rng(0)
DEVIATION = np.exp(RNG.normal(size=NUM_ROWS)).astype(np.float32)
TARGETS = (1000 + DEVIATION * RNG.normal(size=NUM_ROWS)).astype(np.float32)
MEAN = np.full(NUM_ROWS, 1000, np.float32)


@pytest.mark.parametrize("c", [0.5, 1.0, 2.0])
def test_errors_of_deviations_that_are_all_wrong_alike(c):
    """`|1 - 1/c|`; where they are right, the floor that noise has."""
    got = float(scores.ence(MEAN, (c * DEVIATION) ** 2, TARGETS, num_bins=20))
    floor = np.sqrt(20 / (np.pi * NUM_ROWS))
    if c == 1:
        # A mean of 20 half-normal numbers, with the standard deviation 0.17 of its mean.
        assert abs(got / floor - 1) < 5 * 0.17
    else:
        np.testing.assert_allclose(got, abs(1 - 1 / c), atol=5 * floor / c)
        assert abs(got - abs(1 - c)) > 0.3  # divided by the error and not by what was predicted


def test_bins_by_hand():
    rng = np.random.default_rng(1)
    variance, errors = rng.exponential(size=12).astype(np.float32), rng.normal(size=12).astype(np.float32)
    bins = np.argsort(variance).reshape(3, 4)
    predicted, observed = np.sqrt(variance[bins].mean(1)), np.sqrt((errors[bins] ** 2).mean(1))
    got = scores.ence(np.zeros(12, np.float32), variance, errors, num_bins=3)
    np.testing.assert_allclose(got, (abs(predicted - observed) / predicted).mean(), rtol=1e-5)
    # Entries of one variance stay together, and empty bins do not count.
    same = scores.ence(np.zeros(12, np.float32), np.full(12, 4, np.float32), errors, num_bins=5)
    np.testing.assert_allclose(same, abs(2 - np.sqrt((errors**2).mean())) / 2, rtol=1e-5)


def test_a_perfect_fit_has_a_gradient():
    slope = jax.grad(lambda m: scores.ence(m, jnp.ones(6), jnp.zeros(6), num_bins=2))(jnp.zeros(6))
    assert np.isfinite(slope).all()


def test_root_mean_variance():
    np.testing.assert_allclose(scores.sharpness(np.array([1.0, 7.0], np.float32)), 2)
    got = scores.sharpness(np.array([1.0, 7.0, np.nan], np.float32), row_weights=np.array([3, 1, 0]))
    np.testing.assert_allclose(got, np.sqrt(10 / 4), rtol=1e-6)
    # A constant forecast is calibrated, and less sharp.
    right = np.full(NUM_ROWS, TARGETS.var(), np.float32)
    assert scores.ence(MEAN, right, TARGETS, num_bins=20) < 0.05
    assert scores.sharpness(right) > scores.sharpness(DEVIATION) / 2


@pytest.mark.parametrize("c", [0.5, 1.0, 2.0])
def test_levels_of_deviations_that_are_all_wrong_alike(c):
    """Of deviations `c` times the right ones the fraction below the quantile of level `p` is `Phi(c Phi^-1(p))`."""
    stats = pytest.importorskip("scipy.stats")
    levels = np.arange(1, 100) / 100
    gaps = stats.norm.cdf(c * stats.norm.ppf(levels)) - levels
    values = scores.pit_gaussian_mixture(MEAN[None], (c * DEVIATION[None]) ** 2, TARGETS)
    absolute = scores.quantile_calibration_error(values)
    squared = scores.quantile_calibration_error(values, kind="squared")
    noise = 5 / np.sqrt(4 * NUM_ROWS)
    np.testing.assert_allclose(absolute, np.abs(gaps).mean(), atol=noise)
    np.testing.assert_allclose(squared / 99, (gaps**2).mean(), atol=2 * noise * np.abs(gaps).max() + noise**2)
    if c != 1:
        assert squared / 99 > 0.011
        assert abs(absolute - 0.1) < 0.01


def test_levels_by_hand():
    values = np.array([[0.0, 0.1, 0.25], [0.5, 0.9, 1.0]], np.float32)
    gaps = np.array([3 / 6 - 0.25, 4 / 6 - 0.5, 4 / 6 - 0.75])
    np.testing.assert_allclose(scores.quantile_calibration_error(values, num_levels=3), np.abs(gaps).mean(), rtol=1e-5)
    got = scores.quantile_calibration_error(values, num_levels=3, kind="squared")
    np.testing.assert_allclose(got, (gaps**2).sum(), rtol=1e-5)
    rows = np.array([[1, 0, 2], [1, 0, 0]])
    got = scores.quantile_calibration_error(values, num_levels=1, row_weights=rows)
    np.testing.assert_allclose(got, 0.5, rtol=1e-6)


def test_nan_is_nan():
    values = np.array([0.2, np.nan], np.float32)
    assert np.isnan(scores.quantile_calibration_error(values))
    assert np.isfinite(scores.quantile_calibration_error(values, row_weights=np.array([True, False])))
    assert np.isnan(scores.ence(values, np.ones(2, np.float32), np.zeros(2, np.float32), num_bins=1))


@pytest.mark.usefixtures("unhooked")
def test_messages():
    ones = np.ones(3, np.float32)
    with pytest.raises(ValueError, match="`scores.ence` needs variances above zero"):
        scores.ence(ones, 0 * ones, ones)
    with pytest.raises(ValueError, match="`scores.ence` needs `num_bins` of at least 1"):
        scores.ence(ones, ones, ones, num_bins=0)
    with pytest.raises(ValueError, match="`scores.sharpness` needs variances of zero or more"):
        scores.sharpness(-ones)
    with pytest.raises(ValueError, match="`values` from 0 to 1"):
        scores.quantile_calibration_error(2 * ones)
    with pytest.raises(ValueError, match="`kind` to be one of 'absolute', 'squared', got 'l1'"):
        scores.quantile_calibration_error(ones, kind="l1")
