import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import scores

KEY = jax.random.key(0)
VALUES = np.random.default_rng(0).gamma(2, size=50).astype(np.float32)


def test_standard_error_is_the_closed_form():
    # The variance of the mean of n rows drawn with replacement is that of the rows (ddof 0), divided by n.
    want, draws = VALUES.std() / np.sqrt(50), 20_000
    got = scores.bootstrap(VALUES, num_draws=draws, key=KEY)
    np.testing.assert_allclose(got.estimate, VALUES.mean(), rtol=1e-6)
    # A standard deviation of Gaussian draws is uncertain by 1 / sqrt(2 draws); six of these: one alarm in a billion.
    assert abs(got.standard_error / want - 1) < 6 / np.sqrt(2 * draws)
    assert abs(VALUES.std() / want - 1) > 1  # what a forgotten root of n would give
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


def test_the_law_of_weighted_rows():
    # Of three rows two count: four resamples of two.
    values, weights = np.array([0.0, 1.0, np.nan], np.float32), np.array([1.0, 2.0, 0.0])
    rows = np.array(list(itertools.product(range(2), repeat=2)))
    means = (np.nan_to_num(values)[rows] * weights[rows]).sum(1) / weights[rows].sum(1)
    draws = 40_000
    got = scores.bootstrap(values, row_weights=weights, num_draws=draws, key=KEY)
    fourth = np.mean((means - means.mean()) ** 4) / means.var() ** 2
    assert abs(got.standard_error / means.std() - 1) < 6 * np.sqrt((fourth - 1) / (4 * draws))
    # If one row counts, all draws are equal.
    got = scores.bootstrap(VALUES, row_weights=np.eye(50)[3], num_draws=2000, key=KEY)
    np.testing.assert_allclose(got, [VALUES[3], 0, VALUES[3], VALUES[3]], rtol=1e-6)


def test_masked_rows_are_never_drawn():
    mask = np.arange(50) % 3 > 0
    spoilt = np.where(mask, VALUES, np.nan)
    options = {"num_draws": 20_000, "key": KEY}
    got = scores.bootstrap(spoilt, row_weights=mask, **options)
    kept = VALUES[mask]
    np.testing.assert_allclose(got.estimate, kept.mean(), rtol=1e-6)
    assert abs(got.standard_error * np.sqrt(kept.size) / kept.std() - 1) < 6 / np.sqrt(2 * 20_000)
    traced = jax.jit(lambda mask: scores.bootstrap(spoilt, row_weights=mask, **options))(mask)
    np.testing.assert_allclose(traced, got, rtol=1e-6)
    np.testing.assert_allclose(scores.bootstrap(spoilt, row_weights=3.0 * mask, **options), got, rtol=1e-5)
    assert abs(scores.bootstrap(VALUES, **options).estimate - got.estimate) > 0.1


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
    squared = VALUES**2
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


def test_keys_and_jit():
    first = scores.bootstrap(VALUES, key=KEY)
    np.testing.assert_array_equal(first.standard_error, scores.bootstrap(VALUES, key=KEY).standard_error)
    assert scores.bootstrap(VALUES, key=jax.random.key(1)).standard_error != first.standard_error
    traced = jax.jit(lambda x, key: scores.bootstrap(x, key=key))(VALUES, KEY)
    np.testing.assert_allclose(traced, first, rtol=1e-6)
    assert np.isnan(scores.bootstrap(np.append(VALUES, np.float32(np.nan)), key=KEY).standard_error)


def test_rows_that_do_not_count_hold_anything():
    weights, counts = np.arange(50, dtype=np.float32), np.arange(50) % 3 > 0
    want = scores.bootstrap(VALUES, row_weights=np.where(counts, weights, 0), key=KEY)
    spoilt = np.where(counts, VALUES, np.nan)
    np.testing.assert_array_equal(scores.bootstrap(spoilt, row_weights=np.where(counts, weights, 0), key=KEY), want)
    assert np.isfinite(want.standard_error)


@pytest.mark.usefixtures("unhooked")
def test_messages():
    with pytest.raises(ValueError, match="`row_weights` that are not all zero"):
        scores.bootstrap(VALUES, row_weights=np.zeros(50), key=KEY)
    with pytest.raises(ValueError, match=r"`values` with at least one row on the last axis.\n  got shape \(3, 0\)"):
        scores.bootstrap(np.zeros((3, 0), np.float32), key=KEY)
    with pytest.raises(ValueError, match=r"one of `row_weights` per row.\n  expected shape \(50,\), got \(49,\)"):
        scores.bootstrap(VALUES, row_weights=np.ones(49), key=KEY)
    with pytest.raises(ValueError, match=r"finite `row_weights` of zero or more.\n  got -1 at index \(1,\)"):
        scores.bootstrap(VALUES[:2], row_weights=np.array([1, -1]), key=KEY)
    with pytest.raises(ValueError, match="`num_draws` of two or more.\n  got 1"):
        scores.bootstrap(VALUES, num_draws=1, key=KEY)
    with pytest.raises(TypeError, match="`scores.bootstrap` needs one key: for example"):
        scores.bootstrap(VALUES, key=None)


def test_masked_rows_under_double_precision():
    with jax.enable_x64(True):
        values = np.array([1.0, 2.0, 4.0, np.nan])
        found = scores.bootstrap(values, row_weights=np.array([True, True, True, False]), key=jax.random.key(0))
        assert found.estimate.dtype == np.float64
        np.testing.assert_allclose(found.estimate, 7 / 3, rtol=1e-15)
