"""Averages of probabilities over Gaussian logits, against quadrature and draws of NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats

from eqx_ensemble.methods.laplace._laplace import monte_carlo, probit

KEY = jax.random.key(0)
MEAN = jnp.array([2.0, 0.5, -1.0])
COVARIANCE = jnp.array([[2.0, 0.5, 0.1], [0.5, 1.0, 0.3], [0.1, 0.3, 3.0]])


@pytest.mark.parametrize(
    ("mean", "variance", "exact", "found"), [(1.0, 1.0, 0.6967, 0.7000), (4.0, 25.0, 0.7743, 0.7714)]
)
def test_two_classes(mean, variance, exact, found):
    """The integral by quadrature, and MacKay's approximation to it, as MacKay gives it."""
    density = lambda z: scipy.special.expit(mean + np.sqrt(variance) * z) * scipy.stats.norm.pdf(z)
    assert scipy.integrate.quad(density, -9, 9)[0] == pytest.approx(exact, abs=1e-4)
    two = both_classes(jnp.array([mean]), jnp.array([[variance]]))
    assert jnp.exp(probit(*two))[1] == pytest.approx(found, abs=1e-4)
    # The same difference of two logits that both vary.
    both = jnp.array([0.0, mean]), 3 + jnp.array([[variance, 0.0], [0.0, variance]]) / 2
    assert jnp.exp(probit(*both))[1] == pytest.approx(found, abs=1e-4)
    draws = jnp.exp(monte_carlo(*two, 20_000, KEY))[1]
    assert draws == pytest.approx(exact, abs=5 * 0.5 / np.sqrt(20_000))


@pytest.mark.slow
def test_monte_carlo_of_three_classes():
    """20,000 draws against 200,000 of NumPy's: five standard errors of probabilities."""
    draws = np.random.default_rng(0).multivariate_normal(MEAN, COVARIANCE, 200_000)
    expected = scipy.special.softmax(draws, axis=1)
    error = expected.std(0) * np.sqrt(1 / 20_000 + 1 / 200_000)
    found = jnp.exp(monte_carlo(MEAN, COVARIANCE, 20_000, KEY))
    assert (np.abs(found - expected.mean(0)) < 5 * error).all()
    assert (np.abs(jnp.exp(jax.nn.log_softmax(MEAN)) - expected.mean(0)) > 20 * error).any()  # without the variance


@pytest.mark.slow
def test_variance_that_all_logits_share():
    """No probability depends on it, by draws or the probit link."""
    shifted = COVARIANCE + 10
    same = monte_carlo(MEAN, shifted, 20_000, KEY) - monte_carlo(MEAN, COVARIANCE, 20_000, KEY)
    assert np.abs(same).max() < 0.05
    np.testing.assert_allclose(probit(MEAN, shifted), probit(MEAN, COVARIANCE), rtol=1e-5)


@pytest.mark.slow
def test_scale_of_the_covariance():
    """Averages tend to be uniform with it."""
    for link in (probit, lambda mean, covariance: monte_carlo(mean, covariance, 2_000, KEY)):
        assert link(MEAN, 16 * COVARIANCE)[0] < link(MEAN, COVARIANCE)[0] - 0.1


@pytest.mark.slow
def test_confident_logits():
    """Logits of 300 in single precision, whose exponential overflows: finite, with finite gradients."""
    mean = jnp.array([300.0, 0.0, -300.0])
    found, grad = jax.value_and_grad(lambda mean: probit(mean, COVARIANCE)[0])(mean)
    assert found == pytest.approx(0, abs=1e-6)
    assert np.isfinite(grad).all()
    assert np.isfinite(probit(mean, COVARIANCE)).all()


@pytest.mark.slow
def test_singular_covariances():
    """Of logits that always sum to zero, or do not vary at all."""
    centred = jnp.eye(3) - 1 / 3
    assert np.isfinite(monte_carlo(MEAN, centred, 10, KEY)).all()
    assert np.isfinite(probit(MEAN, centred)).all()
    np.testing.assert_allclose(monte_carlo(MEAN, 0 * COVARIANCE, 10, KEY), jax.nn.log_softmax(MEAN), rtol=1e-5)
    np.testing.assert_allclose(probit(MEAN, 0 * COVARIANCE), jax.nn.log_softmax(MEAN), rtol=1e-6)
