"""Decompositions, distances of members, quantiles, votes and samples: SciPy, NumPy, closed forms and extremes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from eqx_ensemble import combine, uncertainty

stats = pytest.importorskip("scipy.stats")
special = pytest.importorskip("scipy.special")
optimize = pytest.importorskip("scipy.optimize")


def _logits(shape=(5, 7, 3), seed=0, scale=3.0):
    return (scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def test_entropy_of_impossible_classes():
    logits = jnp.log(jnp.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]]))
    np.testing.assert_allclose(uncertainty.entropy(logits), [np.log(2), 0, np.log(3)], rtol=1e-6)
    assert np.isfinite(jax.grad(lambda x: jnp.sum(uncertainty.entropy(x)))(logits)).all()


def test_parts_of_a_weighted_variance():
    rng = np.random.default_rng(0)
    mean, variance, weights = rng.normal(size=(4, 6)), rng.uniform(1, 2, (4, 6)), np.array([0.5, 0.2, 0.3, 0.0])
    parts = uncertainty.decompose_variance(jnp.float32(mean), jnp.float32(variance), weights=weights)
    spread = weights @ mean**2 - (weights @ mean) ** 2
    np.testing.assert_allclose(parts.epistemic, spread, rtol=1e-5)
    np.testing.assert_allclose(parts.aleatoric, weights @ variance, rtol=1e-5)


SMALL = {
    "epistemic": (
        lambda x: uncertainty.decompose_entropy(x).epistemic,
        lambda logs: np.sum(np.exp(logs) * (logs - np.log(np.exp(logs).mean(0))), axis=-1).mean(0),
    ),
    "divergence": (
        uncertainty.pairwise_kl,
        lambda logs: np.sum(np.exp(logs[:, None]) * (logs[:, None] - logs[None]), axis=-1).mean((0, 1)),
    ),
    "ambiguity": (
        lambda x: uncertainty.decompose_nll(x, np.zeros(500, int)).ambiguity,
        lambda logs: -np.log(np.exp(logs.mean(0)).sum(-1)),
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_small_differences_are_never_negative_and_keep_their_digits(name):
    logits = _logits((1, 500, 10)) + _logits((4, 500, 10), seed=1, scale=3e-3)
    function, definition = SMALL[name]
    got = function(logits)
    assert got.min() >= 0
    # float32 logits near 5 are rounded to 5e-7, of differences near 2e-3.
    np.testing.assert_allclose(got, definition(special.log_softmax(np.float64(logits), -1)), rtol=5e-3)


def test_extreme_logits_stay_finite():
    logits = np.array([[[0.0, -1e30, -np.inf]], [[-1e4, 0.0, -np.inf]], [[88.0, -88.0, 0.0]]])
    for pick, part in enumerate(uncertainty.decompose_entropy(logits)):
        assert np.isfinite(part).all()
        gradient = jax.grad(lambda x, pick=pick: jnp.sum(uncertainty.decompose_entropy(x)[pick]))(logits)
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("low", [-np.inf, -200.0])
@pytest.mark.parametrize(
    "divergence", [uncertainty.jensen_shannon, lambda *x, **y: uncertainty.decompose_entropy(*x, **y).total]
)
def test_a_member_of_weight_zero_may_be_infinitely_far_off(divergence, low):
    logits, weights = np.float32([[0.0, low], [0.0, 0.0]]), np.array([1.0, 0.0])
    np.testing.assert_allclose(divergence(logits, weights=weights), 0, atol=1e-6)
    assert divergence(logits) > 0.1
    gradient = jax.grad(lambda x: jnp.sum(divergence(x, weights=weights)))(logits)
    assert np.isfinite(gradient).all()
    assert (gradient[1] == 0).all()


@pytest.mark.slow
def test_what_members_rule_out():
    logits = jnp.log(jnp.array([[[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]], [[0.9, 0.1, 0.0], [1.0, 0.0, 0.0]]]))
    got = uncertainty.pairwise_kl(logits)
    np.testing.assert_allclose(got[0], uncertainty.pairwise_kl(logits[:, :1, :2])[0], rtol=1e-5)
    assert got[1] == np.inf
    gradient = jax.grad(lambda x: uncertainty.pairwise_kl(x)[0])(logits)
    assert np.isfinite(gradient).all()
    assert uncertainty.pairwise_kl(logits, weights=np.array([0, 1]))[1] == 0  # one member rules nothing out for itself
    parts = lambda x: uncertainty.decompose_nll(x[:, :1], jnp.array([0]))
    np.testing.assert_allclose(parts(logits).ambiguity, -np.log(np.sqrt(0.45) + np.sqrt(0.05)), rtol=1e-5)
    assert all(np.isfinite(jax.jacobian(parts)(logits)[pick]).all() for pick in range(3))


def test_members_that_agree_have_no_epistemic_part():
    mean = np.broadcast_to(np.float32([1e4, 0.1, 12345.678]), (7, 3))
    np.testing.assert_array_equal(uncertainty.decompose_variance(mean, np.ones_like(mean)).epistemic, 0)


def test_rows_that_are_nearly_certain_keep_their_order():
    gaps = np.linspace(20, 60, 9, dtype=np.float32)
    logits = np.stack([gaps, np.zeros(9, np.float32)], axis=-1)[None]
    np.testing.assert_allclose(uncertainty.least_confidence(logits), np.exp(-gaps.astype(np.float64)), rtol=1e-5)
    assert len(np.unique(1 - np.exp(combine.mixture(logits)).max(-1))) == 1  # what plain subtraction sees
    np.testing.assert_allclose(uncertainty.least_confidence(np.zeros((2, 4), np.float32)), 0.75, rtol=1e-6)


def test_energy_sees_the_size_of_logits_and_nothing_in_probabilities():
    logits = _logits()
    np.testing.assert_allclose(uncertainty.free_energy(jax.nn.log_softmax(logits)), 0, atol=1e-6)
    np.testing.assert_allclose(uncertainty.free_energy(logits + 100), uncertainty.free_energy(logits) - 100, rtol=1e-5)


def test_members_that_agree_do_so_exactly_whatever_their_weights():
    agreed, weights = np.broadcast_to(_logits((1, 40, 3)), (7, 40, 3)), np.random.default_rng(1).uniform(size=7)
    np.testing.assert_array_equal(uncertainty.variation_ratio(agreed, weights=weights), 0)
    np.testing.assert_array_equal(uncertainty.disagreement(agreed, weights=weights), 0)
    assert uncertainty.decompose_entropy(agreed, weights=weights).epistemic.max() < 1e-10


def test_pairwise_disagreement_is_counted():
    logits = _logits((5, 40, 3))
    labels = logits.argmax(-1)
    want = np.array([[np.mean(a != b) for b in labels] for a in labels])
    got = uncertainty.pairwise_disagreement(logits)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    # Its mean over all pairs is that of the rows; the share of rows on which anybody differs is not.
    np.testing.assert_allclose(np.mean(got), np.mean(uncertainty.disagreement(logits)), rtol=1e-5)
    assert not np.allclose(np.mean(labels.min(0) != labels.max(0)), np.mean(got), rtol=1e-2)


def test_q_statistic_is_the_table():
    rng = np.random.default_rng(0)
    correct = (rng.uniform(size=(4, 200)) < 0.7 + 0.2 * rng.uniform(size=200)).astype(np.float32)
    want = np.empty((4, 4))
    for i, j in itertools.product(range(4), repeat=2):
        n = {ab: np.sum((correct[i] == ab[0]) & (correct[j] == ab[1])) for ab in itertools.product((0, 1), repeat=2)}
        want[i, j] = (n[1, 1] * n[0, 0] - n[1, 0] * n[0, 1]) / (n[1, 1] * n[0, 0] + n[1, 0] * n[0, 1])
    for dtype in (np.float32, bool, np.uint8):
        np.testing.assert_allclose(uncertainty.q_statistic(correct.astype(dtype)), want, rtol=1e-4)
    # Not the correlation.
    assert not np.allclose(uncertainty.error_correlation(correct), want, rtol=1e-1)


def test_q_statistic_in_closed_form():
    independent = np.float32([[1, 1, 0, 0], [1, 0, 1, 0]])
    np.testing.assert_allclose(uncertainty.q_statistic(independent), np.eye(2), atol=1e-6)
    opposed = np.float32([[1, 1, 0, 0], [0, 0, 1, 1]])
    np.testing.assert_allclose(uncertainty.q_statistic(opposed), [[1, -1], [-1, 1]])
    never_wrong = uncertainty.q_statistic(np.float32([[1, 1, 1, 1], [0, 0, 1, 1]]))
    np.testing.assert_array_equal(np.isnan(never_wrong), [[True, True], [True, False]])


def test_correlation_is_numpys():
    errors = np.random.default_rng(0).normal(size=(4, 100)) @ np.random.default_rng(1).normal(size=(100, 100))
    offset = (1e4 + np.random.default_rng(0).normal(size=(3, 400))).astype(np.float32)
    for x in (errors.astype(np.float32), offset, 1e-30 * (offset - 1e4)):
        found, want = uncertainty.error_correlation(x), np.corrcoef(x.astype(np.float64))
        np.testing.assert_allclose(found, want, rtol=1e-3, atol=1e-5)
    with jax.enable_x64(True):
        np.testing.assert_allclose(uncertainty.error_correlation(errors), np.corrcoef(errors), rtol=1e-10)


@pytest.mark.parametrize("count", [4, 31])  # of 15 and of 30 times 0.1 the float32 mean is not 0.1
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


@pytest.mark.parametrize("members", [1, 10])
def test_is_numpys_averaged_inverted_cdf(members):
    values, levels = _logits((members, 7)), np.round(np.linspace(0, 1, 21), 2)
    want = np.quantile(values, levels, axis=0, method="averaged_inverted_cdf")
    np.testing.assert_allclose(uncertainty.quantile(values, levels), want, rtol=1e-6)
    np.testing.assert_allclose(uncertainty.quantile(values, levels[6]), want[6], rtol=1e-6)


def test_tenths_meet_levels_of_tenths_though_neither_is_a_binary_number():
    values = np.arange(10, dtype=np.float32)[:, None]
    weights = np.full(10, 0.1, np.float32)
    for level in (0.1, 0.3, 0.6, 0.7, 0.9):
        want = 10 * level - 0.5  # midway between two members
        np.testing.assert_allclose(uncertainty.quantile(values, level, weights=weights), want, rtol=1e-6)


def test_intervals_have_their_quantiles_at_their_ends():
    values, weights = _logits((40, 7)), np.arange(1, 41)
    found = uncertainty.interval(values, level=0.8, weights=weights)
    assert isinstance(found, uncertainty.Interval)
    np.testing.assert_array_equal(found, uncertainty.quantile(values, np.array([0.1, 0.9]), weights=weights))
    mean, variance = np.array([0.0, 3.0, -2.0], np.float32), np.array([1.0, 4.0, 0.25], np.float32)
    for level in (0.5, 0.9, 1 - 1e-9):
        want = stats.norm.interval(level, mean, np.sqrt(variance))
        np.testing.assert_allclose(uncertainty.gaussian_interval(mean, variance, level=level), want, rtol=1e-6)
    pair = (np.tile(x, (2, 1)) for x in (mean, variance))
    want = stats.norm.interval(0.9, mean, np.sqrt(variance))
    np.testing.assert_allclose(uncertainty.gaussian_mixture_interval(*pair, level=0.9), want, rtol=1e-5)


def test_small_weights_are_met_or_missed_by_themselves():
    # A level of 1e-8 is below the weight of 5e-7 of the lowest member, and 1 - 1e-8 above that of all but the highest.
    values, weights = np.float32([[1], [2], [3]]), np.array([5e-7, 1 - 1e-6, 5e-7])
    levels = np.array([1e-8, 1e-6, 0.5, 1 - 1e-6, 1 - 1e-8])
    np.testing.assert_array_equal(uncertainty.quantile(values, levels, weights=weights)[:, 0], [1, 2, 2, 2, 3])
    # A level that is met exactly, from either end, is still midway to the next value.
    exact = np.array([0.25, 0.75])
    np.testing.assert_array_equal(uncertainty.quantile(np.float32([[1], [2], [4], [8]]), exact)[:, 0], [1.5, 6])


LEVELS = np.array([1e-9, 0.025, 0.3, 0.5, 0.7, 0.975, 1 - 1e-9])


@pytest.mark.parametrize("weights", [None, np.array([0.1, 0.4, 0.2, 0.2, 0.1])])
def test_is_the_root_of_the_distribution_function(weights):
    mean, variance = _logits((5, 7), scale=2.0), np.exp(_logits((5, 7), seed=1, scale=1.0))

    def root(mean, sigma, level):
        """By bracketing, in float64, from the tail that is smaller."""
        tail, share = (stats.norm.cdf, level) if level <= 0.5 else (stats.norm.sf, 1 - level)
        ends = stats.norm.ppf(level, mean, sigma)
        excess = lambda x: np.average(tail(x, mean, sigma), weights=weights) - share
        return optimize.brentq(excess, ends.min() - 1e-6, ends.max() + 1e-6, xtol=1e-13)

    wide = np.float64(mean), np.sqrt(np.float64(variance))
    want = np.array([[root(m, s, level) for m, s in zip(*(x.T for x in wide), strict=True)] for level in LEVELS])
    got = uncertainty.gaussian_mixture_quantile(mean, variance, LEVELS, weights=weights)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    with jax.enable_x64(True):
        got = uncertainty.gaussian_mixture_quantile(np.float64(mean), np.float64(variance), LEVELS, weights=weights)
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


def test_far_apart_members_have_the_quantiles_of_one_of_them():
    # Below one half only the lower member counts, with twice the level; in between there is hardly any density.
    mean, variance = np.float32([[-1e4], [1e4]]), np.ones((2, 1), np.float32)
    levels = np.array([0.01, 0.25, 0.4])
    want = -1e4 + stats.norm.ppf(2 * levels)[:, None]
    np.testing.assert_allclose(uncertainty.gaussian_mixture_quantile(mean, variance, levels), want, atol=1e-3)
    with jax.enable_x64(True):
        got = uncertainty.gaussian_mixture_quantile(np.float64(mean), np.float64(variance), levels)
        np.testing.assert_allclose(got - want, 0, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1))
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_level_is_between_the_neighbours_of_the_quantile_and_order_is_kept(dtype, seed):
    # Where a component is narrow, no x has the level itself: a little lower x has too little, a little higher enough.
    with jax.enable_x64(True):
        # Means far apart, spreads from a millionth of the distance to all of it, some of them points.
        rng = np.random.default_rng(seed)
        mean = (rng.choice([1.0, 10.0, 100.0], 200) * rng.normal(size=(5, 200))).astype(dtype)
        sigma = 10.0 ** rng.uniform(-7, 2, size=(5, 200)) * (rng.random((5, 200)) > 0.1)
        variance, weights = (sigma**2).astype(dtype), rng.dirichlet(np.ones(5)) if seed else None
        levels = np.sort(np.concatenate([10.0 ** -np.arange(1, 30, 2.0), np.linspace(0.02, 0.98, 49), LEVELS]))
        got = np.asarray(uncertainty.gaussian_mixture_quantile(mean, variance, levels, weights=weights))
        assert got.dtype == dtype
        assert (np.diff(got, axis=0) >= 0).all()
        eps = np.finfo(dtype).eps
        exact = mean.astype(np.float64), variance.astype(np.float64)

        def below(x):
            """What the mixture has at or below `x`, and above it, in float64."""
            at_point = np.where(x >= exact[0], np.inf, -np.inf)
            with np.errstate(divide="ignore", invalid="ignore"):
                distance = np.where(exact[1] == 0, at_point, (x - exact[0]) / np.sqrt(exact[1]))
            return (np.average(stats.norm.cdf(sign * distance), axis=0, weights=weights) for sign in (1, -1))

        # Rounding of x and of the middle that is taken off; of a sum of five probabilities, each to some ulp.
        reach = 8 * eps * (np.abs(got).astype(np.float64) + np.abs(exact[0]).max(0))
        slack = 64 * eps
        for level, x, apart in zip(levels, got.astype(np.float64), reach, strict=True):
            under, over = below(x - apart)
            assert ((under <= level * (1 + slack)) | (over >= (1 - level) * (1 - slack))).all()
            under, over = below(x + apart)
            assert ((under >= level * (1 - slack)) | (over <= (1 - level) * (1 + slack))).all()


def test_infinite_moments_have_infinite_quantiles_of_their_own_only():
    mean, variance = np.float32([[0.0, 0.0], [1.0, 1.0], [np.inf, 2.0]]), np.float32([[0, 0], [0, 0], [1, np.inf]])
    got = uncertainty.gaussian_mixture_quantile(mean, variance, np.array([1e-300, 0.1, 0.3, 0.6, 0.9]))
    # A variance without bound has half of its member's third at either end.
    np.testing.assert_array_equal(got[1:], [[0, -np.inf], [0, 0], [1, 1], [np.inf, np.inf]])
    assert (got[0] == -np.inf).all()


@pytest.mark.slow
def test_gradient_is_that_of_the_implicit_function():
    with jax.enable_x64(True):
        mean, variance = jnp.float64(_logits((4, 3))), jnp.exp(jnp.float64(_logits((4, 3), seed=1, scale=1.0)))
        weights, levels = jnp.array([0.1, 0.2, 0.3, 0.4]), jnp.array([0.1, 0.8])

        def loss(mean, variance, weights):
            quantiles = uncertainty.gaussian_mixture_quantile(mean, variance, levels, weights=weights)
            return jnp.sum(quantiles * jnp.arange(1.0, 7.0).reshape(2, 3))

        check_grads(loss, (mean, variance, weights), order=1, modes=("rev",), rtol=1e-6)
        assert all(np.abs(slope).max() > 1e-3 for slope in jax.grad(loss, (0, 1, 2))(mean, variance, weights))


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


@pytest.mark.slow
def test_joint_samples_follow_one_member():
    mean, variance = np.float32([[-1.0, -2.0], [1.0, 2.0]]), np.zeros((2, 2), np.float32)
    joint = uncertainty.sample_gaussian_mixture(mean, variance, 200, joint=True, key=KEY)
    np.testing.assert_array_equal(joint[:, 1], 2 * joint[:, 0])
    alone = uncertainty.sample_gaussian_mixture(mean, variance, 200, key=KEY)
    assert set(np.unique(alone[:, 1] / alone[:, 0]).tolist()) == {-2.0, 2.0}
    logits = 50 * jnp.stack([jnp.eye(3), jnp.eye(3)[::-1]])
    for joint, sums in ((True, [2]), (False, [0, 2, 4])):
        labels = uncertainty.sample_class_mixture(logits, 200, joint=joint, key=KEY)
        np.testing.assert_array_equal(np.unique(labels[:, 0] + labels[:, 2]), sums)


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
