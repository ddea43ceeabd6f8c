"""Decompositions, distances of members, quantiles, votes and samples: SciPy, NumPy, closed forms and extremes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import combine, uncertainty

stats = pytest.importorskip("scipy.stats")
distance = pytest.importorskip("scipy.spatial.distance")
special = pytest.importorskip("scipy.special")
optimize = pytest.importorskip("scipy.optimize")


def _gradient(loss, argnums=0):
    return jax.jit(jax.grad(loss, argnums))


def _logits(shape=(5, 7, 3), seed=0):
    return 3 * np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _softmax(logits):
    exponentials = np.exp(np.asarray(logits, np.float64))
    return exponentials / exponentials.sum(-1, keepdims=True)


def test_entropy_of_impossible_classes():
    logits = jnp.log(jnp.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]]))
    np.testing.assert_allclose(uncertainty.entropy(logits), [np.log(2), 0, np.log(3)], rtol=1e-6)
    assert np.isfinite(_gradient(lambda x: jnp.sum(uncertainty.entropy(x)))(logits)).all()


def test_closed_forms():
    opposed = uncertainty.decompose_entropy(jnp.log(jnp.array([[1.0, 0.0], [0.0, 1.0]])))
    np.testing.assert_allclose(list(opposed), [np.log(2), 0, np.log(2)], rtol=1e-6)
    weighted = uncertainty.decompose_entropy(jnp.log(jnp.array([[1.0, 0.0], [0.0, 1.0]])), weights=np.array([3, 1]))
    np.testing.assert_allclose(weighted.epistemic, stats.entropy([0.75, 0.25]), rtol=1e-6)
    agreed = uncertainty.decompose_entropy(np.broadcast_to(_logits((1, 50, 4)), (7, 50, 4)))
    assert agreed.epistemic.max() < 1e-10


def test_small_epistemic_parts_are_never_negative_and_keep_their_digits():
    base, noise = _logits((1, 2000, 10)), 1e-3 * _logits((4, 2000, 10), seed=1)
    logits = base + noise
    p = _softmax(logits)
    mixed = p.mean(0, keepdims=True)
    want = np.sum(p * np.log(p / mixed), axis=-1).mean(0)
    epistemic = uncertainty.decompose_entropy(logits).epistemic
    assert epistemic.min() >= 0
    np.testing.assert_allclose(epistemic, want, rtol=5e-3)
    difference = uncertainty.entropy(jnp.log(p.mean(0))) - jnp.mean(uncertainty.entropy(logits), axis=0)
    assert difference.min() < 0  # what the plain difference would report


def test_extreme_logits_stay_finite():
    logits = np.array([[[0.0, -1e30, -np.inf]], [[-1e4, 0.0, -np.inf]], [[88.0, -88.0, 0.0]]])
    for part in uncertainty.decompose_entropy(logits):
        assert np.isfinite(part).all()
    for pick in range(3):
        gradient = _gradient(lambda x: jnp.sum(uncertainty.decompose_entropy(x)[pick]))(logits)  # noqa: B023
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("low", [-np.inf, -200.0])
@pytest.mark.parametrize(
    "divergence", [uncertainty.jensen_shannon, lambda *x, **y: uncertainty.decompose_entropy(*x, **y).total]
)
def test_a_member_of_weight_zero_may_be_infinitely_far_off(divergence, low):
    logits, weights = np.float32([[0.0, low], [0.0, 0.0]]), np.array([1.0, 0.0])
    np.testing.assert_allclose(divergence(logits, weights=weights), 0, atol=1e-6)
    assert divergence(logits) > 0.1
    gradient = _gradient(lambda x: jnp.sum(divergence(x, weights=weights)))(logits)
    assert np.isfinite(gradient).all()
    assert (gradient[1] == 0).all()


def _logits_of_divergence(shape=(5, 7, 3), seed=0):
    return 2 * np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _pairwise(p, weights):
    """KL of every pair of members, one pair after another."""
    total = 0
    for a, w in zip(p, weights, strict=True):
        for b, v in zip(p, weights, strict=True):
            total = total + w * v * np.sum(a * np.log(a / b), axis=-1)
    return total / np.sum(weights) ** 2


def test_jensen_shannon_is_at_most_the_entropy_of_the_weights():
    opposed = jnp.log(jnp.array([[1.0, 0.0], [0.0, 1.0]]))
    np.testing.assert_allclose(uncertainty.jensen_shannon(opposed), np.log(2), rtol=1e-6)
    got = uncertainty.jensen_shannon(opposed, weights=np.array([3, 1]))
    np.testing.assert_allclose(got, -0.75 * np.log(0.75) - 0.25 * np.log(0.25), rtol=1e-6)


def test_small_divergences_are_never_negative_and_keep_their_digits():
    base, noise = _logits_of_divergence((1, 500, 10)), 1e-3 * _logits_of_divergence((4, 500, 10), seed=1)
    want = _pairwise(_softmax(base + noise), np.ones(4))
    got = uncertainty.pairwise_kl(base + noise)
    assert got.min() >= 0
    # float32 logits near 5 are rounded to 5e-7, of differences near 2e-3.
    np.testing.assert_allclose(got, want, rtol=5e-3)


def test_what_members_rule_out():
    logits = jnp.log(jnp.array([[[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]], [[0.9, 0.1, 0.0], [1.0, 0.0, 0.0]]]))
    got = uncertainty.pairwise_kl(logits)
    np.testing.assert_allclose(got[0], uncertainty.pairwise_kl(logits[:, :1, :2])[0], rtol=1e-5)
    assert got[1] == np.inf
    gradient = _gradient(lambda x: uncertainty.pairwise_kl(x)[0])(logits)
    assert np.isfinite(gradient).all()
    assert uncertainty.pairwise_kl(logits, weights=np.array([0, 1]))[1] == 0  # one member rules nothing out for itself


def _logits_of_ambiguity(shape=(5, 7, 3), seed=0):
    return 2 * np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_nll_of_opposed_coins():
    # The pool of p and 1 - p is one half: ambiguity KL(1/2 || p) = -log(4 p (1 - p)) / 2.
    p = np.array([0.6, 0.9, 0.999])
    coins = np.log(np.stack([np.stack([p, 1 - p], -1), np.stack([1 - p, p], -1)])).astype(np.float32)
    parts = uncertainty.decompose_nll(coins, np.array([0, 1, 0]))
    np.testing.assert_allclose(parts.ensemble, np.log(2), rtol=1e-5)
    np.testing.assert_allclose(parts.ambiguity, -np.log(4 * p * (1 - p)) / 2, rtol=1e-5)


def test_small_ambiguities_are_never_negative_and_keep_their_digits():
    base, noise = _logits_of_ambiguity((1, 500, 10)), 1e-3 * _logits_of_ambiguity((4, 500, 10), seed=1)
    logits = base + noise
    logs = np.asarray(logits, np.float64)
    logs = logs - np.log(np.exp(logs).sum(-1, keepdims=True))
    want = -np.log(np.exp(logs.mean(0)).sum(-1))
    got = uncertainty.decompose_nll(logits, np.zeros(500, int)).ambiguity
    assert got.min() >= 0
    # float32 logits near 5 are rounded to 5e-7, of differences near 2e-3.
    np.testing.assert_allclose(got, want, rtol=5e-3)


def test_what_members_rule_out_of_ambiguity():
    logits = jnp.log(jnp.array([[[0.5, 0.5, 0.0]], [[0.2, 0.3, 0.5]]]))
    parts = uncertainty.decompose_nll(logits, jnp.array([0]))
    np.testing.assert_allclose(parts.ambiguity, -np.log(np.sqrt(0.1) + np.sqrt(0.15)), rtol=1e-5)
    for pick in range(3):
        gradient = jax.grad(lambda x: uncertainty.decompose_nll(x, jnp.array([0]))[pick][0])(logits)  # noqa: B023
        assert np.isfinite(gradient).all()


def test_variance_of_the_indicators_of_classes():
    p = np.random.default_rng(0).dirichlet(np.ones(4), size=(5, 7)).astype(np.float32)
    parts = uncertainty.decompose_variance(p, p * (1 - p))
    np.testing.assert_allclose(parts.total, p.mean(0) * (1 - p.mean(0)), rtol=1e-5)
    assert not np.allclose(parts.aleatoric, parts.total, rtol=1e-2)


def test_members_that_agree_have_no_epistemic_part():
    mean = np.broadcast_to(np.float32([1e4, 0.1, 12345.678]), (7, 3))
    np.testing.assert_array_equal(uncertainty.decompose_variance(mean, np.ones_like(mean)).epistemic, 0)


def _logits_of_out_of_distribution(shape=(5, 7, 3), seed=0):
    return 2 * np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_rows_that_are_nearly_certain_keep_their_order():
    gaps = np.linspace(20, 60, 9, dtype=np.float32)
    logits = np.stack([gaps, np.zeros(9, np.float32)], axis=-1)[None]
    np.testing.assert_allclose(uncertainty.least_confidence(logits), np.exp(-gaps.astype(np.float64)), rtol=1e-5)
    assert len(np.unique(1 - np.exp(combine.mixture(logits)).max(-1))) == 1  # what plain subtraction sees
    np.testing.assert_allclose(uncertainty.least_confidence(np.zeros((2, 4), np.float32)), 0.75, rtol=1e-6)


def test_energy_sees_the_size_of_logits_and_nothing_in_probabilities():
    logits = _logits_of_out_of_distribution()
    np.testing.assert_allclose(uncertainty.free_energy(jax.nn.log_softmax(logits)), 0, atol=1e-6)
    np.testing.assert_allclose(uncertainty.free_energy(logits + 100), uncertainty.free_energy(logits) - 100, rtol=1e-5)
    np.testing.assert_allclose(uncertainty.free_energy(np.zeros((1, 8), np.float32)), -np.log(8), rtol=1e-6)


def _logits_of_votes(shape=(5, 40, 3), seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_votes_in_closed_form():
    classes = 4
    opposed = 5 * jnp.eye(classes)  # every member votes for a class of its own
    np.testing.assert_allclose(uncertainty.variation_ratio(opposed), 1 - 1 / classes, rtol=1e-6)
    np.testing.assert_allclose(uncertainty.disagreement(opposed), 1 - 1 / classes, rtol=1e-6)
    agreed = np.broadcast_to(opposed[:1], (7, classes))
    assert uncertainty.variation_ratio(agreed) == 0
    assert uncertainty.disagreement(agreed) == 0


def test_members_that_agree_do_so_exactly_whatever_their_weights():
    agreed = np.broadcast_to(_logits_of_votes((1, 40, 3)), (7, 40, 3))
    weights = np.random.default_rng(1).uniform(size=7)
    np.testing.assert_array_equal(uncertainty.variation_ratio(agreed, weights=weights), 0)
    np.testing.assert_array_equal(uncertainty.disagreement(agreed, weights=weights), 0)


def _logits_of_pairs(shape=(5, 40, 3), seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _correct(members=4, rows=200, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.uniform(size=(members, rows)) < 0.7 + 0.2 * rng.uniform(size=rows)).astype(np.float32)


def test_pairwise_disagreement_is_counted():
    logits = _logits_of_pairs()
    labels = logits.argmax(-1)
    want = np.array([[np.mean(a != b) for b in labels] for a in labels])
    got = uncertainty.pairwise_disagreement(logits)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    # Its mean over all pairs is that of the rows; the share of rows on which anybody differs is not.
    np.testing.assert_allclose(np.mean(got), np.mean(uncertainty.disagreement(logits)), rtol=1e-5)
    assert not np.allclose(np.mean(labels.min(0) != labels.max(0)), np.mean(got), rtol=1e-2)
    np.testing.assert_allclose(uncertainty.pairwise_disagreement(logits.reshape(5, 8, 5, 3)), want, rtol=1e-6)


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


def _values(shape=(10, 7), seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("members", [1, 3, 10, 64])
def test_is_numpys_averaged_inverted_cdf(members):
    values, levels = _values((members, 7)), np.round(np.linspace(0, 1, 21), 2)
    want = np.quantile(values, levels, axis=0, method="averaged_inverted_cdf")
    np.testing.assert_allclose(uncertainty.quantile(values, levels), want, rtol=1e-6)
    one = uncertainty.quantile(values, 0.3)
    np.testing.assert_allclose(one, np.quantile(values, 0.3, axis=0, method="averaged_inverted_cdf"), rtol=1e-6)
    if members > 1:
        # Neither interpolation nor the lower of two values would pass.
        assert not np.allclose(np.quantile(values, levels, axis=0), want, rtol=1e-2)
        if members == 10:
            assert not np.allclose(np.quantile(values, levels, axis=0, method="inverted_cdf"), want, rtol=1e-2)


def test_tenths_meet_levels_of_tenths_though_neither_is_a_binary_number():
    values = np.arange(10, dtype=np.float32)[:, None]
    weights = np.full(10, 0.1, np.float32)
    for level in (0.1, 0.3, 0.6, 0.7, 0.9):
        want = 10 * level - 0.5  # midway between two members
        np.testing.assert_allclose(uncertainty.quantile(values, level), want, rtol=1e-6)
        np.testing.assert_allclose(uncertainty.quantile(values, level, weights=weights), want, rtol=1e-6)


def test_interval_has_its_quantiles_at_its_ends():
    values, weights = _values((40, 7)), np.arange(1, 41)
    lower, upper = uncertainty.interval(values, level=0.8, weights=weights)
    np.testing.assert_array_equal(lower, uncertainty.quantile(values, 0.1, weights=weights))
    np.testing.assert_array_equal(upper, uncertainty.quantile(values, 0.9, weights=weights))
    whole = uncertainty.interval(_values((5, 7)), level=0.9)
    np.testing.assert_array_equal(whole, (_values((5, 7)).min(0), _values((5, 7)).max(0)))
    assert isinstance(whole, uncertainty.Interval)


def test_small_weights_are_met_or_missed_by_themselves():
    # A level of 1e-8 is below the weight of 5e-7 of the lowest member, and 1 - 1e-8 above that of all but the highest.
    values, weights = np.float32([[1], [2], [3]]), np.array([5e-7, 1 - 1e-6, 5e-7])
    levels = np.array([1e-8, 1e-6, 0.5, 1 - 1e-6, 1 - 1e-8])
    np.testing.assert_array_equal(uncertainty.quantile(values, levels, weights=weights)[:, 0], [1, 2, 2, 2, 3])
    # A level that is met exactly, from either end, is still midway to the next value.
    exact = np.array([0.25, 0.75])
    np.testing.assert_array_equal(uncertainty.quantile(np.float32([[1], [2], [4], [8]]), exact)[:, 0], [1.5, 6])


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 1 - 1e-9])
def test_is_scipys_interval(level):
    mean, variance = np.array([0.0, 3.0, -2.0], np.float32), np.array([1.0, 4.0, 0.25], np.float32)
    lower, upper = stats.norm.interval(level, mean, np.sqrt(variance))
    got = uncertainty.gaussian_interval(mean, variance, level=level)
    np.testing.assert_allclose(got.lower, lower, rtol=1e-6)
    np.testing.assert_allclose(got.upper, upper, rtol=1e-6)
    # A variance taken for a standard deviation would not pass.
    assert not np.allclose(stats.norm.interval(level, mean, variance)[0], lower, rtol=1e-2)


stats = pytest.importorskip("scipy.stats", reason="the reference distributions are scipy's")
LEVELS = np.array([1e-9, 0.025, 0.3, 0.5, 0.7, 0.975, 1 - 1e-9])


def _moments_of_mixture_quantile(shape=(5, 7), seed=0, apart=2.0):
    mean, log_variance = np.random.default_rng(seed).normal(size=(2, *shape))
    return (apart * mean).astype(np.float32), np.exp(log_variance).astype(np.float32)


def _root(mean, variance, weights, level):
    """By bracketing, in float64, from the tail that is smaller."""
    mean, sigma = mean.astype(np.float64), np.sqrt(variance.astype(np.float64))
    tail = stats.norm.cdf if level <= 0.5 else stats.norm.sf
    share = level if level <= 0.5 else 1 - level
    excess = lambda x: np.average(tail(x, mean, sigma), weights=weights) - share
    ends = stats.norm.ppf(level, mean, sigma)
    return optimize.brentq(excess, ends.min() - 1e-6, ends.max() + 1e-6, xtol=1e-13)


@pytest.mark.parametrize("weights", [None, np.array([0.1, 0.4, 0.2, 0.2, 0.1])])
def test_is_the_root_of_the_distribution_function(weights):
    mean, variance = _moments_of_mixture_quantile()
    want = np.array([[_root(mean[:, i], variance[:, i], weights, level) for i in range(7)] for level in LEVELS])
    got = uncertainty.gaussian_mixture_quantile(mean, variance, LEVELS, weights=weights)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    with jax.enable_x64(True):
        got = uncertainty.gaussian_mixture_quantile(*_wide(mean, variance), LEVELS, weights=weights)
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)
    # The quantile of the one Gaussian with the same moments would not pass.
    centre = np.average(mean, axis=0, weights=weights)
    total = np.average(variance + (mean - centre) ** 2, axis=0, weights=weights)
    assert not np.allclose(stats.norm.ppf(LEVELS[:, None], centre, np.sqrt(total)), want, rtol=1e-2)


def _wide(*arrays):
    return tuple(array.astype(np.float64) for array in arrays)


def test_far_apart_members_have_the_quantiles_of_one_of_them():
    # Below one half only the lower member counts, with twice the level; in between there is hardly any density.
    mean, variance = np.float32([[-1e4], [1e4]]), np.ones((2, 1), np.float32)
    levels = np.array([0.01, 0.25, 0.4])
    want = -1e4 + stats.norm.ppf(2 * levels)[:, None]
    np.testing.assert_allclose(uncertainty.gaussian_mixture_quantile(mean, variance, levels), want, atol=1e-3)
    with jax.enable_x64(True):
        got = uncertainty.gaussian_mixture_quantile(*_wide(mean, variance), levels)
        np.testing.assert_allclose(got - want, 0, atol=1e-11)
    assert not np.allclose(want, -1e4 + stats.norm.ppf(levels)[:, None], atol=1e-1)


def _narrow_mixtures(cases, members, seed):
    """Means far apart, spreads from a millionth of the distance to all of it, some of them points; random weights."""
    generator = np.random.default_rng(seed)
    mean = generator.choice([1.0, 10.0, 100.0], cases) * generator.normal(size=(members, cases))
    sigma = 10.0 ** generator.uniform(-7, 2, size=(members, cases)) * (generator.random((members, cases)) > 0.1)
    weights = generator.dirichlet(np.ones(members)) if seed % 2 else None
    return mean, sigma**2, weights


def _below(x, mean, variance, weights):
    """What the mixture has at or below `x`, and above it, in float64."""
    with np.errstate(divide="ignore", invalid="ignore"):
        distance = np.where(variance == 0, np.where(x >= mean, np.inf, -np.inf), (x - mean) / np.sqrt(variance))
    return tuple(np.average(stats.norm.cdf(sign * distance), axis=0, weights=weights) for sign in (1, -1))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_level_is_between_the_neighbours_of_the_quantile_and_order_is_kept(dtype, seed):
    # Where a component is narrow, no x has the level itself: a little lower x has too little, a little higher enough.
    with jax.enable_x64(True):
        mean, variance, weights = _narrow_mixtures(200, 5, seed)
        mean, variance = mean.astype(dtype), variance.astype(dtype)
        levels = np.sort(np.concatenate([10.0 ** -np.arange(1, 30, 2.0), np.linspace(0.02, 0.98, 49), LEVELS]))
        got = np.asarray(uncertainty.gaussian_mixture_quantile(mean, variance, levels, weights=weights))
        assert got.dtype == dtype
        assert (np.diff(got, axis=0) >= 0).all()
        eps = np.finfo(dtype).eps
        exact = mean.astype(np.float64), variance.astype(np.float64), weights
        # Rounding of x and of the middle that is taken off; of a sum of five probabilities, each to some ulp.
        reach = 8 * eps * (np.abs(got).astype(np.float64) + np.abs(exact[0]).max(0))
        slack = 64 * eps
        for level, x, apart in zip(levels, got.astype(np.float64), reach, strict=True):
            below, over = _below(x - apart, *exact)
            assert ((below <= level * (1 + slack)) | (over >= (1 - level) * (1 - slack))).all()
            below, over = _below(x + apart, *exact)
            assert ((below >= level * (1 - slack)) | (over <= (1 - level) * (1 + slack))).all()


def test_infinite_moments_have_infinite_quantiles_of_their_own_only():
    mean, variance = np.float32([[0.0, 0.0], [1.0, 1.0], [np.inf, 2.0]]), np.float32([[0, 0], [0, 0], [1, np.inf]])
    got = uncertainty.gaussian_mixture_quantile(mean, variance, np.array([1e-300, 0.1, 0.3, 0.6, 0.9]))
    # A variance without bound has half of its member's third at either end.
    np.testing.assert_array_equal(got[1:], [[0, -np.inf], [0, 0], [1, 1], [np.inf, np.inf]])
    assert (got[0] == -np.inf).all()


def test_gradient_is_that_of_the_implicit_function():
    with jax.enable_x64(True):
        mean, variance = (jnp.asarray(x, jnp.float64) for x in _moments_of_mixture_quantile((4, 3)))
        weights, levels = jnp.array([0.1, 0.2, 0.3, 0.4]), jnp.array([0.1, 0.8])

        def loss(mean, variance, weights):
            quantiles = uncertainty.gaussian_mixture_quantile(mean, variance, levels, weights=weights)
            return jnp.sum(quantiles * jnp.arange(1.0, 7.0).reshape(2, 3))

        point = (mean, variance, weights)
        for i, gradient in enumerate(jax.jit(jax.grad(loss, (0, 1, 2)))(*point)):
            direction = jnp.asarray(np.random.default_rng(i).normal(size=point[i].shape))
            moved = [
                tuple(p + sign * 1e-6 * direction if j == i else p for j, p in enumerate(point)) for sign in (1, -1)
            ]
            numeric = (loss(*moved[0]) - loss(*moved[1])) / 2e-6
            np.testing.assert_allclose(jnp.sum(gradient * direction), numeric, rtol=1e-6)
            assert abs(numeric) > 1e-3


KEY = jax.random.key(0)
NUM_SAMPLES = 20_000


@pytest.mark.parametrize("joint", [False, True])
def test_gaussian_samples_have_the_distribution_of_the_mixture(joint):
    mean, variance, weights = np.float32([[-2.0], [1.0]]), np.float32([[0.25], [1.0]]), np.array([1, 3])
    drawn = uncertainty.sample_gaussian_mixture(mean, variance, NUM_SAMPLES, joint=joint, weights=weights, key=KEY)
    assert drawn.shape == (NUM_SAMPLES, 1)
    cdf = lambda x: 0.25 * stats.norm.cdf(x, -2, 0.5) + 0.75 * stats.norm.cdf(x, 1, 1)
    # A false alarm in a million, were the seed not fixed.
    assert stats.kstest(np.asarray(drawn)[:, 0], cdf).pvalue > 1e-6
    other = lambda x: 0.5 * stats.norm.cdf(x, -2, 0.5) + 0.5 * stats.norm.cdf(x, 1, 1)
    assert stats.kstest(np.asarray(drawn)[:, 0], other).pvalue < 1e-6
    plain = uncertainty.sample_gaussian_mixture(mean, variance, NUM_SAMPLES, joint=joint, key=KEY)
    assert stats.kstest(np.asarray(plain)[:, 0], other).pvalue > 1e-6


def test_joint_samples_follow_one_member():
    mean, variance = np.float32([[-1.0, -2.0], [1.0, 2.0]]), np.zeros((2, 2), np.float32)
    joint = uncertainty.sample_gaussian_mixture(mean, variance, 200, joint=True, key=KEY)
    np.testing.assert_array_equal(joint[:, 1], 2 * joint[:, 0])
    alone = uncertainty.sample_gaussian_mixture(mean, variance, 200, key=KEY)
    assert set(np.unique(alone[:, 1] / alone[:, 0]).tolist()) == {-2.0, 2.0}
    labels = uncertainty.sample_class_mixture(50 * jnp.stack([jnp.eye(3), jnp.eye(3)[::-1]]), 200, joint=True, key=KEY)
    np.testing.assert_array_equal(labels[:, 0] + labels[:, 2], 2)
    labels = uncertainty.sample_class_mixture(50 * jnp.stack([jnp.eye(3), jnp.eye(3)[::-1]]), 200, key=KEY)
    assert len(np.unique(labels[:, 0] + labels[:, 2])) > 1


@pytest.mark.parametrize("joint", [False, True])
def test_labels_have_the_probabilities_of_the_mixture(joint):
    logits = 2 * np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    weights = np.array([0.1, 0.6, 0.3])
    drawn = uncertainty.sample_class_mixture(logits, NUM_SAMPLES, joint=joint, weights=weights, key=KEY)
    assert drawn.shape == (NUM_SAMPLES,)
    assert drawn.dtype == jnp.int32
    counts = np.bincount(drawn, minlength=4)
    expected = np.exp(np.asarray(combine.mixture(logits, weights=weights), np.float64))
    assert stats.chisquare(counts, NUM_SAMPLES * expected / expected.sum()).pvalue > 1e-6
    pooled = np.exp(np.asarray(combine.mean_logits(logits, weights=weights), np.float64))
    assert stats.chisquare(counts, NUM_SAMPLES * pooled / pooled.sum()).pvalue < 1e-6
