import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import scores, uncertainty

stats = pytest.importorskip("scipy.stats", reason="the reference distributions are scipy's")
optimize = pytest.importorskip("scipy.optimize", reason="the reference roots are scipy's")

LEVELS = np.array([1e-9, 0.025, 0.3, 0.5, 0.7, 0.975, 1 - 1e-9])


def _moments(shape=(5, 7), seed=0, apart=2.0):
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
    mean, variance = _moments()
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


def test_one_member_is_scipys_gaussian():
    mean, variance = _moments((1, 7))
    want = stats.norm.ppf(LEVELS[:, None], mean, np.sqrt(variance))
    np.testing.assert_allclose(uncertainty.gaussian_mixture_quantile(mean, variance, LEVELS), want, rtol=1e-5)
    assert not np.allclose(stats.norm.ppf(LEVELS[:, None], mean, variance), want, rtol=1e-2)


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


def test_a_large_offset_costs_no_precision():
    mean, variance = _moments((8, 20), apart=1.0)
    far = (1e4 + mean).astype(np.float32)
    want = uncertainty.gaussian_mixture_quantile((far - np.float32(1e4)).astype(np.float32), variance, LEVELS)
    got = uncertainty.gaussian_mixture_quantile(far, variance, LEVELS)
    # The spacing of float32 numbers near 1e4 is 1e-3.
    np.testing.assert_allclose(np.asarray(got, np.float64) - 1e4, want, atol=1.5e-3)


def test_members_that_are_points_are_steps():
    mean, variance = np.float32([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]]), np.zeros((3, 2), np.float32)
    variance[2, 1] = 1.0
    got = uncertainty.gaussian_mixture_quantile(mean, variance, np.array([0.2, 0.5, 0.9]))
    np.testing.assert_allclose(got[:, 0], [1, 2, 3], rtol=1e-6)
    # Two thirds of the second mixture are at 0, from level 1/6 to 5/6.
    np.testing.assert_allclose(got[:, 1], [0, 0, stats.norm.ppf(0.7)], atol=1e-6)


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


def test_narrow_members_do_not_stop_the_search():
    mean, variance = np.float32([[0], [70], [20], [80], [50]]), np.full((5, 1), 1e-12, np.float32)
    np.testing.assert_array_equal(uncertainty.gaussian_mixture_interval(mean, variance, level=0.9), [[0], [80]])


def test_infinite_moments_have_infinite_quantiles_of_their_own_only():
    mean, variance = np.float32([[0.0, 0.0], [1.0, 1.0], [np.inf, 2.0]]), np.float32([[0, 0], [0, 0], [1, np.inf]])
    got = uncertainty.gaussian_mixture_quantile(mean, variance, np.array([1e-300, 0.1, 0.3, 0.6, 0.9]))
    # A variance without bound has half of its member's third at either end.
    np.testing.assert_array_equal(got[1:], [[0, -np.inf], [0, 0], [1, 1], [np.inf, np.inf]])
    assert (got[0] == -np.inf).all()


@pytest.mark.parametrize("level", [0.5, 0.9, 1 - 1e-7])
def test_interval_is_central(level):
    mean, variance = _moments((4, 6))
    lower, upper = uncertainty.gaussian_mixture_interval(mean, variance, level=level)
    exact = mean.astype(np.float64), np.sqrt(variance.astype(np.float64))
    np.testing.assert_allclose(stats.norm.cdf(lower, *exact).mean(0), (1 - level) / 2, rtol=1e-3)
    np.testing.assert_allclose(stats.norm.sf(upper, *exact).mean(0), (1 - level) / 2, rtol=1e-3)
    one = uncertainty.gaussian_mixture_interval(mean[:1], variance[:1], level=level)
    want = uncertainty.gaussian_interval(mean[0], variance[0], level=level)
    np.testing.assert_allclose(one, want, rtol=1e-5, atol=1e-6)
    assert not np.allclose(lower, want.lower, rtol=1e-2)


def test_interval_covers_where_one_gaussian_does_not():
    mean, variance = np.float32([[-3.0], [3.0]]), np.full((2, 1), 0.01, np.float32)
    truth = np.array([-3.1, -3.0, -2.9, 0.0, 2.9, 3.0, 3.1])
    lower, upper = uncertainty.gaussian_mixture_interval(mean, variance, level=0.9)
    at = np.ones(7, np.float32)
    np.testing.assert_array_equal(
        scores.coverage(at * lower, at * upper, truth, reduction="none"), [1, 1, 1, 1, 1, 1, 1]
    )
    np.testing.assert_allclose(upper, 3 + 0.1 * stats.norm.ppf(0.9), rtol=1e-5)


def test_gradient_is_that_of_the_implicit_function():
    with jax.enable_x64(True):
        mean, variance = (jnp.asarray(x, jnp.float64) for x in _moments((4, 3)))
        weights, levels = jnp.array([0.1, 0.2, 0.3, 0.4]), jnp.array([0.1, 0.8])

        def loss(mean, variance, weights, levels):
            quantiles = uncertainty.gaussian_mixture_quantile(mean, variance, levels, weights=weights)
            return jnp.sum(quantiles * jnp.arange(1.0, 7.0).reshape(2, 3))

        point = (mean, variance, weights, levels)
        for i, gradient in enumerate(jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*point)):
            direction = jnp.asarray(np.random.default_rng(i).normal(size=point[i].shape))
            moved = [
                tuple(p + sign * 1e-6 * direction if j == i else p for j, p in enumerate(point)) for sign in (1, -1)
            ]
            numeric = (loss(*moved[0]) - loss(*moved[1])) / 2e-6
            np.testing.assert_allclose(jnp.sum(gradient * direction), numeric, rtol=1e-6)
            assert abs(numeric) > 1e-3


def test_weight_zero_jit_and_vmap():
    mean, variance = _moments((3, 6))
    want = uncertainty.gaussian_mixture_quantile(mean[[0, 0, 2]], variance[[0, 0, 2]], 0.3)
    broken = jnp.asarray(mean).at[1].set(jnp.nan), jnp.asarray(variance).at[1].set(jnp.nan)
    function = lambda m, v: uncertainty.gaussian_mixture_quantile(m, v, 0.3, weights=np.array([2, 0, 1]))
    np.testing.assert_allclose(function(*broken), want, rtol=1e-5, atol=1e-5)
    for gradient in jax.grad(lambda m, v: jnp.sum(function(m, v)), (0, 1))(*broken):
        assert np.isfinite(gradient).all()
    assert np.isnan(uncertainty.gaussian_mixture_quantile(*broken, 0.3)).all()
    np.testing.assert_allclose(jax.jit(function)(*broken), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jax.vmap(function, in_axes=1)(*broken), want, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("unhooked")
def test_messages():
    mean, variance = _moments((3, 6))
    with pytest.raises(ValueError, match="mixture_quantile` needs `levels` between 0 and 1"):
        uncertainty.gaussian_mixture_quantile(mean, variance, np.array([0.0, 0.5]))
    with pytest.raises(ValueError, match="variances of zero or more"):
        uncertainty.gaussian_mixture_interval(mean, -variance)
    with pytest.raises(ValueError, match="a `level` between 0 and 1"):
        uncertainty.gaussian_mixture_interval(mean, variance, level=90.0)
