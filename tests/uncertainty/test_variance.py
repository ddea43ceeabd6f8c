import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import combine, uncertainty


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
def test_is_the_law_of_total_variance(weights):
    mean, variance = _moments()
    parts = uncertainty.decompose_variance(mean, variance, weights=weights)
    centre = np.average(mean, axis=0, weights=weights)[None]
    epistemic = np.average((np.asarray(mean) - centre) ** 2, axis=0, weights=weights)
    np.testing.assert_allclose(parts.aleatoric, np.average(variance, axis=0, weights=weights), rtol=1e-5)
    np.testing.assert_allclose(parts.epistemic, epistemic, rtol=1e-5)
    np.testing.assert_array_equal(parts.total, parts.aleatoric + parts.epistemic)
    np.testing.assert_allclose(parts.total, combine.gaussian(mean, variance, weights=weights).variance, rtol=1e-6)
    shuffled = uncertainty.decompose_variance(_put(mean, (0), mean[0, ::-1]), variance, weights=weights)
    assert not np.allclose(shuffled.epistemic, epistemic, rtol=1e-2)
    assert not np.allclose(np.var(mean, axis=0, ddof=1), epistemic, rtol=1e-2)


def test_variance_of_the_indicators_of_classes():
    p = np.random.default_rng(0).dirichlet(np.ones(4), size=(5, 7)).astype(np.float32)
    parts = uncertainty.decompose_variance(p, p * (1 - p))
    np.testing.assert_allclose(parts.total, p.mean(0) * (1 - p.mean(0)), rtol=1e-5)
    assert not np.allclose(parts.aleatoric, parts.total, rtol=1e-2)


def test_a_large_offset_costs_no_precision():
    mean = (1e4 + np.random.default_rng(0).normal(size=(64, 50))).astype(np.float32)
    parts = uncertainty.decompose_variance(mean, np.zeros_like(mean))
    np.testing.assert_allclose(parts.epistemic, np.var(mean.astype(np.float64), axis=0), rtol=1e-5)
    np.testing.assert_array_equal(parts.aleatoric, 0)


def test_members_that_agree_have_no_epistemic_part():
    mean = np.broadcast_to(np.float32([1e4, 0.1, 12345.678]), (7, 3))
    np.testing.assert_array_equal(uncertainty.decompose_variance(mean, np.ones_like(mean)).epistemic, 0)


def test_weights_count_members_and_zero_leaves_out():
    mean, variance = _moments((3, 6))
    mean, variance = _put(mean, (2), np.nan), _put(variance, (2), np.nan)
    got = uncertainty.decompose_variance(mean, variance, weights=np.array([2, 1, 0]))
    picked = np.array([0, 0, 1])
    for one, other in zip(got, uncertainty.decompose_variance(mean[picked], variance[picked]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    loss = lambda m: jnp.sum(uncertainty.decompose_variance(m, variance, weights=np.array([2, 1, 0])).total)
    assert np.isfinite(_gradient(loss)(mean)).all()


def test_jit():
    mean, variance = _moments()
    jitted = jax.jit(uncertainty.decompose_variance)(mean, variance)
    for one, other in zip(jitted, uncertainty.decompose_variance(mean, variance), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.usefixtures("unhooked")
def test_messages():
    mean, variance = _moments()
    with pytest.raises(ValueError, match="`uncertainty.decompose_variance` needs `variance` of the rows of `mean`"):
        uncertainty.decompose_variance(mean, variance[0])
    with pytest.raises(ValueError, match="variances of zero or more"):
        uncertainty.decompose_variance(mean, -variance)
