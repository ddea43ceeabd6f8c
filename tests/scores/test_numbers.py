"""Scores of numbers and of distributions: closed forms, other libraries, infinities, offsets and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import conformal, scores

reference = pytest.importorskip("scoringrules")
stats = pytest.importorskip("scipy.stats")
metrics = pytest.importorskip("sklearn.metrics")
WEIGHTS = np.array([0.1, 0.4, 0.2, 0.2, 0.1])


def _samples(shape=(5, 30), seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape).astype(np.float32), rng.normal(size=shape[1:]).astype(np.float32)


@pytest.mark.parametrize("num_members", [2, 5, 33])
@pytest.mark.parametrize("estimator", ["nrg", "fair"])
def test_is_scoringrules(estimator, num_members):
    samples, targets = _samples((num_members, 30))
    want = reference.crps_ensemble(
        np.float64(targets), np.float64(samples.T), estimator=estimator, backend="numpy", sorted_ensemble=False
    )
    rows = scores.crps(samples, targets, estimator=estimator, reduction="none")
    np.testing.assert_allclose(rows, want, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(scores.crps(samples, targets, estimator=estimator), want.mean(), rtol=1e-5)
    other = scores.crps(samples, targets, estimator="fair" if estimator == "nrg" else "nrg", reduction="none")
    assert not np.allclose(other, want, rtol=1e-2)
    assert not np.allclose(scores.crps(samples, targets[::-1], estimator=estimator, reduction="none"), want, rtol=1e-2)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_gradient_is_that_of_the_pairs(weights):
    samples, targets = _samples((5, 30))
    w = jnp.full(5, 0.2) if weights is None else jnp.asarray(weights, jnp.float32)

    def pairs(x):
        outside = jnp.tensordot(w, jnp.abs(x - targets[None]), 1)
        between = jnp.einsum("m,n,mnb->b", w, w, jnp.abs(x[:, None] - x[None]))
        return jnp.mean(outside - between / 2)

    got = jax.jit(jax.grad(lambda x: scores.crps(x, targets, weights=weights)))(samples)
    np.testing.assert_allclose(got, jax.jit(jax.grad(pairs))(samples), rtol=1e-4, atol=1e-6)


def test_fair_does_not_depend_on_the_number_of_members():
    # The expected score of M draws from N(0, 1) for a target from N(0, 1) is 1 / sqrt(pi), for each M.
    rng = np.random.default_rng(0)
    for num_members in (2, 16):
        samples = rng.normal(size=(num_members, 40_000)).astype(np.float32)
        targets = rng.normal(size=40_000).astype(np.float32)
        rows = np.asarray(scores.crps(samples, targets, estimator="fair", reduction="none"))
        # Six standard errors: a false alarm in a billion.
        assert abs(rows.mean() - 1 / np.sqrt(np.pi)) < 6 * rows.std() / 200
        assert scores.crps(samples, targets) - rows.mean() > 6 * rows.std() / 200


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
SCORE = functools.partial(scores.threshold_weighted_crps, SAMPLES, TARGETS)


@pytest.mark.parametrize("estimator", ["nrg", "fair"])
@pytest.mark.parametrize("ends", [(0.3, None), (None, -0.2), (-0.5, 0.8)])
def test_scoringrules_agrees(ends, estimator):
    rules = pytest.importorskip("scoringrules")
    low, high = (-np.inf if ends[0] is None else ends[0]), (np.inf if ends[1] is None else ends[1])
    options = {"m_axis": 0, "estimator": estimator, "backend": "numpy"}
    want = rules.twcrps_ensemble(TARGETS, SAMPLES, low, high, **options)
    got = SCORE(lower=ends[0], upper=ends[1], estimator=estimator, reduction="none")
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)
    assert not np.allclose(got, scores.crps(SAMPLES, TARGETS, estimator=estimator, reduction="none"), atol=1e-2)


def test_integral_of_the_square_above_a_threshold():
    """The definition, on a grid, of weighted members."""
    members = np.array([1, 2, 0, 1, 3, 1]) / 8
    grid = np.linspace(0.3, 6, 40_001)
    below = np.sum(members[:, None, None] * (SAMPLES[:, :5, None] <= grid), axis=0)
    square = (below - (TARGETS[:5, None] <= grid)) ** 2
    got = SCORE(lower=0.3, weights=members, reduction="none")[:5]
    np.testing.assert_allclose(got, np.trapezoid(square, grid, axis=-1), atol=1e-3)


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


def _data(shape=(5, 30), seed=0):
    rng = np.random.default_rng(seed)
    mean, variance = rng.normal(size=shape), rng.uniform(0.1, 3.0, size=shape)
    targets = rng.normal(size=shape[1:])
    return mean.astype(np.float32), variance.astype(np.float32), targets.astype(np.float32)


def test_targets_far_from_every_member():
    mean, variance = np.zeros((2, 1), np.float32), np.ones((2, 1), np.float32)
    want = 0.5 * (np.log(2 * np.pi) + 1e6)
    np.testing.assert_allclose(scores.nll_gaussian_mixture(mean, variance, np.float32([1e3])), want, rtol=1e-6)


def test_gradients_are_those_of_a_dense_loop():
    mean, variance, targets = _data((3, 10))

    def loop(m, v):
        rows = []
        for row in range(10):
            density = jax.scipy.stats.norm.pdf(jnp.full(3, targets[row]), m[:, row], jnp.sqrt(v[:, row]))
            rows.append(-jnp.log(jnp.mean(density)))
        return jnp.mean(jnp.stack(rows))

    want = jax.jit(jax.grad(loop, (0, 1)))(mean, variance)
    got = jax.jit(jax.grad(lambda m, v: scores.nll_gaussian_mixture(m, v, targets), (0, 1)))(mean, variance)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


MULTIVARIATE_WEIGHTS = np.array([0.1, 0.4, 0.0, 0.2, 0.3])


def _vectors(shape=(5, 7, 2), seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape).astype(np.float32), rng.normal(size=shape[1:]).astype(np.float32)


@pytest.mark.parametrize("shape", [(5, 7, 2), (5, 2), (5, 3, 4, 2)])
def test_energy_is_that_of_all_pairs(shape):
    samples, targets = _vectors(shape)
    for weights in (None, MULTIVARIATE_WEIGHTS):
        w = np.full(5, 0.2) if weights is None else weights
        outside = np.tensordot(w, np.linalg.norm(samples - targets, axis=-1), 1)
        between = np.einsum("m,n,mn...->...", w, w, np.linalg.norm(samples[:, None] - samples[None], axis=-1))
        got = scores.energy_score(samples, targets, weights=weights, reduction="none")
        np.testing.assert_allclose(got, outside - between / 2, rtol=1e-5)
    fair = scores.energy_score(samples, targets, estimator="fair", reduction="none")
    between = np.linalg.norm(samples[:, None] - samples[None], axis=-1).sum((0, 1)) / 20
    np.testing.assert_allclose(fair, np.linalg.norm(samples - targets, axis=-1).mean(0) - between / 2, rtol=1e-4)
    assert not np.allclose(fair, got, rtol=1e-2)


def test_energy_has_a_finite_gradient_where_members_coincide():
    samples, targets = _vectors()
    samples[1] = samples[0]
    slope = jax.grad(lambda x: scores.energy_score(x, targets))(samples)
    assert np.isfinite(slope).all()
    step = np.zeros_like(samples)
    step[3, 2, 1] = 1e-2
    change = scores.energy_score(samples + step, targets) - scores.energy_score(samples - step, targets)
    np.testing.assert_allclose(slope[3, 2, 1], change / 2e-2, rtol=1e-2)


def test_intervals_without_an_end_have_an_infinite_score():
    inf = np.inf
    ends = np.array([(-inf, 1), (0, inf), (-inf, inf), (inf, inf), (0, 1), (0, 1), (-inf, np.nan), (0, inf), (0, 1)])
    targets = np.array([0, 3, 5, 0, inf, -inf, 1, np.nan, 0.5])
    got = scores.interval_score(*ends.T, targets, level=0.8, reduction="none")
    np.testing.assert_array_equal(got, [inf] * 6 + [np.nan] * 2 + [1])
    assert scores.interval_score(*ends[:3].T, targets[:3], level=0.8) == inf
    # What few held-out rows give.
    with pytest.warns(UserWarning, match="too few rows"):
        fitted = conformal.split(np.zeros(3), np.ones(3), level=0.9)
    assert scores.interval_score(*fitted(np.zeros(2)), np.zeros(2), level=0.9) == inf
    gradient = jax.grad(lambda low: scores.interval_score(low, np.ones(2), np.full(2, 0.5), level=0.8))
    np.testing.assert_array_equal(gradient(np.array([-inf, 0.0])), [0, -0.5])


VARIOGRAM_SAMPLES, VARIOGRAM_TARGETS = (
    RNG.normal(size=(4, 7, 3)).astype(np.float32),
    RNG.normal(size=(7, 3)).astype(np.float32),
)
MEMBERS = np.array([1, 0, 2, 1]) / 4
PAIRS = np.array([[0, 1, 2], [1, 0, 0.5], [2, 0.5, 0]])


def by_hand(members, pairs, order):
    """One pair of outputs after another."""
    total = np.zeros(7)
    for i in range(3):
        for j in range(3):
            predicted = sum(
                w * abs(x[:, i] - x[:, j]) ** order for w, x in zip(members, VARIOGRAM_SAMPLES, strict=True)
            )
            total += pairs[i, j] * (abs(VARIOGRAM_TARGETS[:, i] - VARIOGRAM_TARGETS[:, j]) ** order - predicted) ** 2
    return total


@pytest.mark.parametrize("order", [0.5, 2])
def test_pairs_by_hand(order):
    got = scores.variogram_score(VARIOGRAM_SAMPLES, VARIOGRAM_TARGETS, order=order, reduction="none")
    want = by_hand(np.full(4, 0.25), np.ones((3, 3)), order)
    np.testing.assert_allclose(got, want, rtol=1e-4)
    got = scores.variogram_score(
        VARIOGRAM_SAMPLES, VARIOGRAM_TARGETS, order=order, weights=MEMBERS, pair_weights=PAIRS, reduction="none"
    )
    np.testing.assert_allclose(got, by_hand(MEMBERS, PAIRS, order), rtol=1e-4)
    assert not np.allclose(got, want, rtol=1e-2)


def test_scoringrules_agrees_on_the_fair_estimator():
    import scoringrules

    want = scoringrules.vs_ensemble(VARIOGRAM_TARGETS, VARIOGRAM_SAMPLES, m_axis=0, estimator="fair", backend="numpy")
    got = scores.variogram_score(VARIOGRAM_SAMPLES, VARIOGRAM_TARGETS, estimator="fair", reduction="none")
    np.testing.assert_allclose(got, want, rtol=1e-4)
    rows = np.arange(7.0)
    got = scores.variogram_score(VARIOGRAM_SAMPLES, VARIOGRAM_TARGETS, estimator="fair", row_weights=rows)
    np.testing.assert_allclose(got, np.average(want, weights=rows), rtol=1e-4)


def test_the_gradient_is_finite_where_outputs_are_equal():
    samples = VARIOGRAM_SAMPLES.copy()
    samples[0, 0, 1] = samples[0, 0, 0]
    assert np.isfinite(jax.grad(lambda x: scores.variogram_score(x, VARIOGRAM_TARGETS))(samples)).all()


def test_a_perfect_fit_has_a_finite_gradient():
    predictions = np.ones((2, 3), np.float32)
    for score in (scores.rmse, scores.mean_member_rmse):
        value, slope = jax.jit(jax.value_and_grad(score))(predictions, predictions[0])
        assert value == 0
        np.testing.assert_array_equal(slope, 0)


PREDICTIONS, ERRORS_TARGETS = RNG.normal(size=(3, 30)).astype(np.float32), RNG.normal(size=30).astype(np.float32)
ROWS = RNG.exponential(size=30)


def test_the_mean_target_explains_nothing():
    np.testing.assert_allclose(scores.r2(np.full((1, 30), ERRORS_TARGETS.mean()), ERRORS_TARGETS), 0, atol=1e-6)
    mean = np.average(ERRORS_TARGETS, weights=ROWS).astype(np.float32)
    np.testing.assert_allclose(scores.r2(np.full((1, 30), mean), ERRORS_TARGETS, row_weights=ROWS), 0, atol=1e-6)
    assert scores.r2(ERRORS_TARGETS[None], ERRORS_TARGETS) == 1


def test_equal_targets_have_no_variance_to_explain():
    same = np.full(7, 0.1, np.float32)
    assert scores.r2(same[None] + 1, same) == -np.inf
    assert np.isnan(scores.r2(same[None], same))


NUM_ROWS = 40_000
DEVIATION = np.exp(RNG.normal(size=NUM_ROWS)).astype(np.float32)
GAUSSIAN_CALIBRATION_TARGETS = (1000 + DEVIATION * RNG.normal(size=NUM_ROWS)).astype(np.float32)
MEAN = np.full(NUM_ROWS, 1000, np.float32)


@pytest.mark.parametrize("c", [0.5, 1.0, 2.0])
def test_errors_of_deviations_that_are_all_wrong_alike(c):
    """`|1 - 1/c|`; where they are right, the floor that noise has."""
    got = float(scores.ence(MEAN, (c * DEVIATION) ** 2, GAUSSIAN_CALIBRATION_TARGETS, num_bins=20))
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


def test_root_mean_variance():
    np.testing.assert_allclose(scores.sharpness(np.array([1.0, 7.0], np.float32)), 2)
    got = scores.sharpness(np.array([1.0, 7.0, np.nan], np.float32), row_weights=np.array([3, 1, 0]))
    np.testing.assert_allclose(got, np.sqrt(10 / 4), rtol=1e-6)
    # A constant forecast is calibrated, and less sharp.
    right = np.full(NUM_ROWS, GAUSSIAN_CALIBRATION_TARGETS.var(), np.float32)
    assert scores.ence(MEAN, right, GAUSSIAN_CALIBRATION_TARGETS, num_bins=20) < 0.05
    assert scores.sharpness(right) > scores.sharpness(DEVIATION) / 2


@pytest.mark.parametrize("c", [0.5, 1.0, 2.0])
def test_levels_of_deviations_that_are_all_wrong_alike(c):
    """Of deviations `c` times the right ones the fraction below the quantile of level `p` is `Phi(c Phi^-1(p))`."""
    stats = pytest.importorskip("scipy.stats")
    levels = np.arange(1, 100) / 100
    gaps = stats.norm.cdf(c * stats.norm.ppf(levels)) - levels
    values = scores.pit_gaussian_mixture(MEAN[None], (c * DEVIATION[None]) ** 2, GAUSSIAN_CALIBRATION_TARGETS)
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


KEY = jax.random.key(0)


def _data_of_pit(shape=(5, 40), seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape).astype(np.float32), rng.normal(size=shape[1:]).astype(np.float32)


def _steps(samples, targets, weights):
    w = np.asarray(weights, np.float64) / np.sum(weights)
    return np.tensordot(w, samples < targets, 1), np.tensordot(w, samples == targets, 1)


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
    samples, targets = _data_of_pit((5, 300))
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


def test_values_outside_zero_to_one_are_not_counted_in_the_outer_bins():
    values = np.float32([-0.5, 0.2, 1.5, np.nan])
    with pytest.raises(ValueError, match=r"`values` from 0 to 1.\n  got -0.5 at index \(0,\), the first of 2 such"):
        scores.pit_histogram(values, num_bins=2)
    np.testing.assert_array_equal(jax.jit(lambda x: scores.pit_histogram(x, num_bins=2))(values), [1, 0])
    mask = np.array([False, True, False, True])
    np.testing.assert_array_equal(scores.pit_histogram(values, num_bins=2, row_weights=mask), [1, 0])
