"""Scores of numbers and of distributions: closed forms, other libraries, infinities, offsets and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import conformal, scores

rules = pytest.importorskip("scoringrules")
stats = pytest.importorskip("scipy.stats")
WEIGHTS = np.array([0.1, 0.4, 0.2, 0.2, 0.1])


def test_gradient_is_that_of_the_pairs():
    samples, targets = SAMPLES[:5], TARGETS
    w = jnp.asarray(WEIGHTS, jnp.float32)

    def pairs(x):
        outside = jnp.tensordot(w, jnp.abs(x - targets[None]), 1)
        between = jnp.einsum("m,n,mnb->b", w, w, jnp.abs(x[:, None] - x[None]))
        return jnp.mean(outside - between / 2)

    got = jax.jit(jax.grad(lambda x: scores.crps(x, targets, weights=WEIGHTS)))(samples)
    np.testing.assert_allclose(got, jax.jit(jax.grad(pairs))(samples), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "score", [scores.crps, lambda *args, **kw: scores.threshold_weighted_crps(*args, lower=-1, **kw)]
)
@pytest.mark.parametrize("options", [{}, {"estimator": "fair"}, {"weights": np.array([0.5, 0.3, 0.2])}])
def test_infinite_numbers(score, options):
    """The integral does not converge, unless members and target are at the same infinity."""
    inf = np.inf
    targets = np.array([inf, 0, 0, inf, inf, 0, np.nan], np.float32)
    samples = np.array([[0, 1, 2], [inf, inf, 0], [0, inf, 0], [inf] * 3, [inf, inf, 0], [0, 1, np.nan], [inf] * 3])
    found = score(samples.T.astype(np.float32), targets, reduction="none", **options)
    np.testing.assert_array_equal(found, [inf, inf, inf, 0, inf, np.nan, np.nan])


RNG = np.random.default_rng(0)
SAMPLES, TARGETS = RNG.normal(size=(6, 40)).astype(np.float32), RNG.normal(size=40).astype(np.float32)


@pytest.mark.parametrize("estimator", ["nrg", "fair"])
@pytest.mark.parametrize("ends", [(0.3, None), (None, -0.2), (-0.5, 0.8)])
def test_threshold_weighted_crps_is_that_of_scoringrules(ends, estimator):
    low, high = (-np.inf if ends[0] is None else ends[0]), (np.inf if ends[1] is None else ends[1])
    want = rules.twcrps_ensemble(TARGETS, SAMPLES, low, high, m_axis=0, estimator=estimator, backend="numpy")
    options = {"estimator": estimator, "reduction": "none"}
    got = scores.threshold_weighted_crps(SAMPLES, TARGETS, lower=ends[0], upper=ends[1], **options)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)
    assert not np.allclose(got, scores.crps(SAMPLES, TARGETS, **options), atol=1e-2)


def _gaussians(shape=(5, 30), seed=0):
    rng = np.random.default_rng(seed)
    mean, variance, targets = rng.normal(size=shape), rng.uniform(0.1, 3.0, size=shape), rng.normal(size=shape[1:])
    return mean.astype(np.float32), variance.astype(np.float32), targets.astype(np.float32)


def test_members_without_variance_are_samples():
    mean, _, targets = _gaussians((4, 30))
    zero = np.zeros_like(mean)
    np.testing.assert_allclose(
        scores.crps_gaussian_mixture(mean, zero, targets, reduction="none"),
        scores.crps(mean, targets, reduction="none"),
        rtol=1e-4,
        atol=1e-6,
    )
    np.testing.assert_allclose(
        scores.crps_gaussian(mean[0], zero[0], targets), np.abs(mean[0] - targets).mean(), rtol=1e-6
    )
    slopes = jax.jit(jax.grad(lambda m, v: scores.crps_gaussian_mixture(m, v, targets), (0, 1)))(mean, zero)
    assert all(np.isfinite(slope).all() for slope in slopes)


@pytest.mark.parametrize("variance", [1e-18, 1e-20, 1e-30])
def test_gradient_at_tiny_variances(variance):
    # Far from a Gaussian the score is |y - mean| - sigma / sqrt(pi).
    zero, one = np.zeros(1, np.float32), np.ones(1, np.float32)
    slope = jax.grad(lambda v: scores.crps_gaussian(zero, v, one))(np.float32(variance) * one)
    np.testing.assert_allclose(slope, -1 / (2 * np.sqrt(np.pi * variance)), rtol=1e-5)


def test_mixture_takes_the_memory_of_one_member():
    mean, variance, targets = _gaussians((64, 1000))
    loss = lambda m: scores.crps_gaussian_mixture(m, variance, targets)
    for function in (loss, jax.grad(loss)):
        memory = jax.jit(function).lower(mean).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 16 * mean.nbytes  # every pair at once would be 64 times


@pytest.mark.parametrize("score", [scores.crps_gaussian, scores.crps_gaussian_mixture])
def test_infinite_inputs_have_an_infinite_score(score):
    inf, nan = np.inf, np.nan
    mean, variance = np.float32([inf, 0, 0, 0, nan]), np.float32([1, inf, 1, 1, inf])
    targets = np.float32([0, 0, inf, 0, 0])
    mean, variance = (x if score is scores.crps_gaussian else np.stack([x, x]) for x in (mean, variance))
    got = score(mean, variance, targets, reduction="none")
    np.testing.assert_allclose(got, [inf, inf, inf, 0.233695, nan], rtol=1e-5)


def test_targets_far_from_every_member():
    mean, variance = np.zeros((2, 1), np.float32), np.ones((2, 1), np.float32)
    got = scores.nll_gaussian_mixture(mean, variance, np.float32([1e3]))
    np.testing.assert_allclose(got, 0.5 * (np.log(2 * np.pi) + 1e6), rtol=1e-6)


@pytest.mark.parametrize("score", [scores.energy_score, scores.variogram_score])
def test_gradients_are_finite_where_members_and_outputs_coincide(score):
    samples = VECTORS.copy()
    samples[1] = samples[0]
    samples[0, 0, 1] = samples[0, 0, 0]
    assert np.isfinite(jax.grad(lambda x: score(x, VECTOR_TARGETS))(samples)).all()


@pytest.mark.slow
def test_intervals_without_an_end_have_an_infinite_score():
    inf = np.inf
    ends = np.array([(-inf, 1), (0, inf), (-inf, inf), (inf, inf), (0, 1), (0, 1), (-inf, np.nan), (0, inf), (0, 1)])
    targets = np.array([0, 3, 5, 0, inf, -inf, 1, np.nan, 0.5])
    got = scores.interval_score(*ends.T, targets, level=0.8, reduction="none")
    np.testing.assert_array_equal(got, [inf] * 6 + [np.nan] * 2 + [1])
    # What few held-out rows give.
    with pytest.warns(UserWarning, match="too few rows"):
        fitted = conformal.split(np.zeros(3), np.ones(3), level=0.9)
    assert scores.interval_score(*fitted(np.zeros(2)), np.zeros(2), level=0.9) == inf
    gradient = jax.grad(lambda low: scores.interval_score(low, np.ones(2), np.full(2, 0.5), level=0.8))
    np.testing.assert_array_equal(gradient(np.array([-inf, 0.0])), [0, -0.5])


VECTORS, VECTOR_TARGETS = (RNG.normal(size=shape).astype(np.float32) for shape in ((4, 7, 3), (7, 3)))
PAIRS = np.array([[0, 1, 2], [1, 0, 0.5], [2, 0.5, 0]])


@pytest.mark.parametrize("options", [{}, {"order": 2.0}, {"estimator": "fair"}])
def test_variogram_is_that_of_scoringrules(options):
    own = {"p": options.get("order", 0.5), "estimator": options.get("estimator", "nrg")}
    want = rules.vs_ensemble(VECTOR_TARGETS, VECTORS, w=PAIRS, m_axis=0, backend="numpy", **own)
    got = scores.variogram_score(VECTORS, VECTOR_TARGETS, pair_weights=PAIRS, reduction="none", **options)
    np.testing.assert_allclose(got, want, rtol=1e-4)
    plain = scores.variogram_score(VECTORS, VECTOR_TARGETS, reduction="none", **options)
    assert not np.allclose(plain, want, rtol=1e-2)


def test_a_perfect_fit_has_a_finite_gradient():
    predictions = np.ones((2, 3), np.float32)
    for score in (scores.rmse, scores.mean_member_rmse):
        value, slope = jax.jit(jax.value_and_grad(score))(predictions, predictions[0])
        assert value == 0
        np.testing.assert_array_equal(slope, 0)


def test_equal_targets_have_no_variance_to_explain():
    same = np.full(7, 0.1, np.float32)
    assert scores.r2(same[None] + 1, same) == -np.inf
    assert np.isnan(scores.r2(same[None], same))


def test_bins_of_ence_by_hand():
    rng = np.random.default_rng(1)
    variance, errors = rng.exponential(size=12).astype(np.float32), rng.normal(size=12).astype(np.float32)
    bins = np.argsort(variance).reshape(3, 4)
    predicted, observed = np.sqrt(variance[bins].mean(1)), np.sqrt((errors[bins] ** 2).mean(1))
    got = scores.ence(np.zeros(12, np.float32), variance, errors, num_bins=3)
    np.testing.assert_allclose(got, (abs(predicted - observed) / predicted).mean(), rtol=1e-5)
    # Entries of one variance stay together, and empty bins do not count.
    same = scores.ence(np.zeros(12, np.float32), np.full(12, 4, np.float32), errors, num_bins=5)
    np.testing.assert_allclose(same, abs(2 - np.sqrt((errors**2).mean())) / 2, rtol=1e-5)


def test_sharpness_is_the_root_of_the_mean_variance():
    got = scores.sharpness(np.array([1.0, 7.0, np.nan], np.float32), row_weights=np.array([3, 1, 0]))
    np.testing.assert_allclose(got, np.sqrt(10 / 4), rtol=1e-6)


def test_values_at_a_level_are_below_it():
    values = np.array([[0.0, 0.1, 0.25], [0.5, 0.9, 1.0]], np.float32)
    gaps = np.array([3 / 6 - 0.25, 4 / 6 - 0.5, 4 / 6 - 0.75])
    np.testing.assert_allclose(scores.quantile_calibration_error(values, num_levels=3), np.abs(gaps).mean(), rtol=1e-5)


KEY = jax.random.key(0)


def test_ties_are_spread_over_their_step():
    rng = np.random.default_rng(0)
    samples, targets = rng.poisson(3, size=(5, 4000)).astype(np.float32), rng.poisson(3, size=4000)
    below, level = (samples < targets).mean(0), (samples == targets).mean(0)
    middle = scores.pit(samples, targets)
    np.testing.assert_allclose(middle, below + level / 2, rtol=1e-5, atol=1e-6)
    drawn = np.asarray(scores.pit(samples, targets, key=KEY))
    share = (drawn[level > 0] - below[level > 0]) / level[level > 0]
    # Dvoretzky, Kiefer, Wolfowitz and Massart: a false alarm in a million.
    limit = np.sqrt(np.log(2e6) / (2 * share.size))
    assert stats.kstest(share, "uniform").statistic < limit
    assert stats.kstest((middle[level > 0] - below[level > 0]) / level[level > 0], "uniform").statistic > limit
    assert not np.array_equal(drawn, scores.pit(samples, targets, key=jax.random.key(1)))


def test_pit_histogram_is_numpys():
    values = np.random.default_rng(0).uniform(size=(20, 50)).astype(np.float32)
    mask = np.arange(20)[:, None] % 3 > np.zeros(50)
    for rows, own in ((None, values), (mask, values[mask])):
        got = scores.pit_histogram(values, num_bins=10, row_weights=rows)
        np.testing.assert_array_equal(got, np.histogram(own, bins=10, range=(0, 1))[0])
    ends = np.array([0, 0.25, 0.5, 0.75, 1, np.nan])
    np.testing.assert_array_equal(scores.pit_histogram(ends, num_bins=4), [2, 1, 1, 1])


def test_ranks_without_ties_are_counts():
    samples, targets, mask = RNG.normal(size=(5, 300)), RNG.normal(size=300), np.arange(300) % 2 == 0
    want = np.bincount((samples < targets).sum(0), minlength=6)
    np.testing.assert_array_equal(scores.rank_histogram(samples, targets, key=KEY), want)
    masked = np.bincount((samples < targets).sum(0)[mask], minlength=6)
    spoilt = np.where(mask, samples, np.nan)
    np.testing.assert_array_equal(scores.rank_histogram(spoilt, targets, row_weights=mask, key=KEY), masked)


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


def test_values_outside_zero_to_one_are_not_counted_in_the_outer_bins():
    values = np.float32([-0.5, 0.2, 1.5, np.nan])
    with pytest.raises(ValueError, match=r"`values` from 0 to 1.\n  got -0.5 at index \(0,\), the first of 2 such"):
        scores.pit_histogram(values, num_bins=2)
    np.testing.assert_array_equal(jax.jit(lambda x: scores.pit_histogram(x, num_bins=2))(values), [1, 0])
    mask = np.array([False, True, False, True])
    np.testing.assert_array_equal(scores.pit_histogram(values, num_bins=2, row_weights=mask), [1, 0])
