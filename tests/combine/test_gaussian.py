import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import combine


def _gradient(loss, argnums=0):
    return jax.jit(jax.grad(loss, argnums))


def _put(array, index, value):
    changed = array.copy()
    changed[index] = value
    return changed


def _moments(shape=(5, 7), seed=0):
    mean, log_variance = np.random.default_rng(seed).normal(size=(2, *shape)).astype(np.float32)
    return mean, np.exp(log_variance)


@pytest.mark.parametrize("weights", [None, np.array([0.1, 0.4, 0.2, 0.2, 0.1])])
def test_matches_the_moments_of_the_mixture(weights):
    mean, variance = _moments()
    matched = combine.gaussian(mean, variance, weights=weights)
    m, v = np.asarray(mean, np.float64), np.asarray(variance, np.float64)
    centre = np.average(m, axis=0, weights=weights)
    want = np.average(v + m**2, axis=0, weights=weights) - centre**2
    np.testing.assert_allclose(matched.mean, centre, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(matched.variance, want, rtol=1e-5)
    # The mean of the variances alone, and other weights, are something else.
    assert not np.allclose(np.average(v, axis=0, weights=weights), want, rtol=1e-2)
    other = combine.gaussian(mean, variance, weights=np.arange(1.0, 6.0))
    assert not np.allclose(other.variance, want, rtol=1e-2)


@pytest.mark.parametrize("weights", [None, np.full(64, 1 / 64, np.float32), np.arange(1, 65)])
def test_a_large_offset_costs_no_precision(weights):
    rng = np.random.default_rng(0)
    mean = (1e4 + rng.normal(size=(64, 50))).astype(np.float32)
    variance = rng.uniform(0.0, 0.01, size=(64, 50)).astype(np.float32)
    exact = mean.astype(np.float64)
    centre = np.average(exact, axis=0, weights=weights)
    want = np.average(variance + (exact - centre) ** 2, axis=0, weights=weights)
    matched = combine.gaussian(mean, variance, weights=weights)
    np.testing.assert_allclose(matched.variance, want, rtol=1e-5)
    np.testing.assert_allclose(matched.mean, centre, rtol=1.2e-7)  # one float32 step
    careless = np.mean(mean**2, axis=0) - np.mean(mean, axis=0) ** 2
    assert np.abs(careless - want).max() > 1


def test_one_member_is_itself():
    mean, variance = _moments((1, 6))
    matched = combine.gaussian(mean, variance)
    np.testing.assert_allclose(matched.mean, mean[0], rtol=1e-6)
    np.testing.assert_allclose(matched.variance, variance[0], rtol=1e-6)


def test_weights_count_members():
    (mean, variance), picked = _moments((2, 6)), np.array([0, 0, 1])
    got = combine.gaussian(mean, variance, weights=np.array([2, 1]))
    for one, other in zip(got, combine.gaussian(mean[picked], variance[picked]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    for one, other in zip(
        combine.gaussian(mean, variance, weights=np.ones(2)), combine.gaussian(mean, variance), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_weight_zero_leaves_a_broken_member_out():
    mean, variance = _moments((3, 6))
    mean, variance, weights = _put(mean, (2), np.nan), _put(variance, (2), np.inf), np.array([1.0, 2.0, 0.0])
    want = combine.gaussian(mean[:2], variance[:2], weights=weights[:2])
    for one, other in zip(combine.gaussian(mean, variance, weights=weights), want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    loss = lambda m, v: jnp.sum(combine.gaussian(m, v, weights=weights).variance)
    for gradient in _gradient(loss, argnums=(0, 1))(mean, variance):
        assert np.isfinite(gradient).all()


def test_jit_and_gradient():
    mean, variance = _moments((3, 6))
    jitted = jax.jit(combine.gaussian)(mean, variance)
    assert isinstance(jitted, combine.Gaussian)
    np.testing.assert_allclose(jitted.variance, combine.gaussian(mean, variance).variance, rtol=1e-6)
    gradient = _gradient(lambda m: jnp.sum(combine.gaussian(m, variance).variance))(mean)
    np.testing.assert_allclose(gradient, 2 * (mean - mean.mean(0, keepdims=True)) / 3, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("unhooked")
def test_messages():
    mean, variance = _moments((3, 6))
    with pytest.raises(ValueError, match=r"`variance` of the rows of `mean`"):
        combine.gaussian(mean, variance[:, :1])
    with pytest.raises(
        ValueError, match=r"zero or more.\n  got -1.0 at index \(1, 2\), the first of 1 such\nA log-vari"
    ):
        combine.gaussian(mean, _put(variance, (1, 2), -1.0))
    with pytest.raises(ValueError, match="one weight per member"):
        combine.gaussian(mean, variance, weights=np.ones(6))
    combine.gaussian(mean, np.zeros_like(mean))


@pytest.mark.parametrize("power", [1.0, 5.0])
@pytest.mark.parametrize("weights", [None, np.array([0.1, 0.4, 0.2, 0.2, 0.1])])
def test_product_is_the_product_of_the_densities(weights, power):
    mean, variance = _moments()
    got = combine.product_gaussian(mean, variance, weights=weights, power=power)
    exponents = power * (np.full(5, 0.2) if weights is None else weights)[:, None]
    precision = np.sum(exponents / np.asarray(variance, np.float64), axis=0)
    np.testing.assert_allclose(got.variance, 1 / precision, rtol=1e-5)
    centre = np.sum(exponents * np.asarray(mean, np.float64) / variance, axis=0) / precision
    np.testing.assert_allclose(got.mean, centre, rtol=1e-5, atol=1e-6)
    # Log-densities: the product and the result differ by a constant in y.
    y = np.linspace(-2, 2, 5)[:, None, None]
    log_density = lambda m, v: -0.5 * (np.log(v) + (y - m) ** 2 / v)
    product = np.sum(exponents * log_density(np.asarray(mean), np.asarray(variance)), axis=1)
    gap = product - log_density(np.asarray(got.mean)[None], np.asarray(got.variance)[None])[:, 0]
    np.testing.assert_allclose(gap - gap[:1], 0, atol=1e-4)
    # The mixture's moments would not pass.
    mixture = combine.gaussian(mean, variance, weights=weights)
    assert not np.allclose(mixture.variance, got.variance, rtol=1e-2)
    assert not np.allclose(mixture.mean, got.mean, rtol=1e-2)


def test_product_with_a_large_offset():
    rng = np.random.default_rng(0)
    mean = (1e4 + rng.normal(size=(16, 40))).astype(np.float32)
    variance = rng.uniform(0.5, 2, size=(16, 40)).astype(np.float32)
    want = np.average(mean.astype(np.float64), axis=0, weights=1 / variance.astype(np.float64))
    np.testing.assert_allclose(combine.product_gaussian(mean, variance).mean, want, rtol=1.2e-7)


def test_product_of_high_and_low_precision():
    mean = np.float32([[0.0, 0.0, 0.0, 0.0, 2.0], [1.0, 1.0, 1.0, 1.0, 4.0]])
    variance = np.float32([[0.0, 1e-36, np.inf, 0.0, np.inf], [1.0, 1e36, 2.0, 0.0, np.inf]])
    got = combine.product_gaussian(mean, variance, power=2.0)
    np.testing.assert_allclose(got.mean, [0, 0, 1, 0.5, 3], atol=1e-6)
    np.testing.assert_allclose(got.variance, [0, 1e-36, 2, 0, np.inf], rtol=1e-5)
    loss = lambda m, v: jnp.sum(combine.product_gaussian(m, v).mean)
    for gradient in _gradient(loss, (0, 1))(mean, variance):
        assert np.isfinite(gradient).all()


def test_product_is_not_changed_by_members_without_precision():
    mean, variance = np.float32([[1.0, 1.0], [1e10, 1e10]]), np.float32([[1.0, 1.0], [np.inf, 1e30]])
    np.testing.assert_allclose(combine.product_gaussian(mean, variance).mean, 1, rtol=1e-6)
    with jax.numpy_dtype_promotion("standard"):
        want = np.average(mean.astype(np.float64), axis=0, weights=1 / variance.astype(np.float64))
    np.testing.assert_allclose(want, 1, rtol=1e-6)


def test_product_gradients_are_those_of_the_formula():
    mean, variance = _moments((3, 4))
    plain = lambda m, v: jnp.sum(1 / jnp.mean(1 / v, axis=0) + jnp.sum(m / v, axis=0) / jnp.sum(1 / v, axis=0))
    ours = lambda m, v: sum(jnp.sum(part) for part in combine.product_gaussian(m, v))
    for got, want in zip(
        _gradient(ours, (0, 1))(mean, variance), _gradient(plain, (0, 1))(mean, variance), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_product_leaves_out_weight_zero():
    mean, variance = _moments((3, 6))
    want = combine.product_gaussian(mean[:2], variance[:2])
    broken = jnp.asarray(mean).at[2].set(jnp.nan), jnp.asarray(variance).at[2].set(jnp.nan)
    got = combine.product_gaussian(*broken, weights=np.array([1, 1, 0]))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("unhooked")
def test_product_messages():
    mean, variance = _moments((3, 6))
    with pytest.raises(ValueError, match="combine.product_gaussian` needs a finite `power` above zero.\n  got 0.0"):
        combine.product_gaussian(mean, variance, power=0.0)


def test_infinite_means_and_variances():
    inf, nan = np.inf, np.nan
    mean, ones = np.float32([[1, inf, inf, 5], [2, 1, -inf, inf]]), np.ones((2, 4), np.float32)
    np.testing.assert_array_equal(combine.gaussian(mean, ones), [[1.5, inf, nan, inf], [1.25, inf, nan, inf]])
    one_unsure = np.float32([[1, 1, 1, 1], [1, 1, 1, inf]])
    np.testing.assert_array_equal(combine.gaussian(mean[:, :1], one_unsure[:, 3:]), [[1.5], [inf]])
    # A member without any precision has no influence, wherever its mean is.
    np.testing.assert_array_equal(combine.product_gaussian(mean, one_unsure), [[1.5, inf, nan, 5], [1, 1, 1, 2]])
