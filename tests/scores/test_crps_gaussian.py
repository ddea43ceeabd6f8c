import jax
import numpy as np
import pytest

from eqx_ensemble import combine, scores

reference = pytest.importorskip("scoringrules", reason="the reference scores are those of scoringrules")

WEIGHTS = np.array([0.1, 0.4, 0.2, 0.2, 0.1])


def _gaussians(shape=(5, 30), seed=0):
    rng = np.random.default_rng(seed)
    mean, variance, targets = rng.normal(size=shape), rng.uniform(0.1, 3.0, size=shape), rng.normal(size=shape[1:])
    return mean.astype(np.float32), variance.astype(np.float32), targets.astype(np.float32)


def test_one_gaussian_is_scoringrules():
    mean, variance, targets = (array.reshape(-1) for array in _gaussians((1, 30)))
    want = reference.crps_normal(targets, mean, np.sqrt(variance), backend="numpy")
    np.testing.assert_allclose(
        scores.crps_gaussian(mean, variance, targets, reduction="none"), want, rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(scores.crps_gaussian(mean, variance, targets), want.mean(), rtol=1e-5)
    assert not np.allclose(reference.crps_normal(targets, mean, variance, backend="numpy"), want, rtol=1e-2)
    assert not np.allclose(scores.crps_gaussian(mean, variance, targets[::-1], reduction="none"), want, rtol=1e-2)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_mixture_is_scoringrules(weights):
    mean, variance, targets = _gaussians()
    w = np.full(5, 0.2) if weights is None else weights
    want = reference.crps_mixnorm(
        np.float64(targets), np.float64(mean.T), np.sqrt(np.float64(variance.T)), np.tile(w, (30, 1)), backend="numpy"
    )
    rows = scores.crps_gaussian_mixture(mean, variance, targets, weights=weights, reduction="none")
    np.testing.assert_allclose(rows, want, rtol=1e-4, atol=1e-6)
    matched = combine.gaussian(mean, variance, weights=weights)
    assert not np.allclose(scores.crps_gaussian(*matched, targets, reduction="none"), want, rtol=1e-2)
    other = scores.crps_gaussian_mixture(mean, variance, targets, weights=np.arange(1, 6), reduction="none")
    assert not np.allclose(other, want, rtol=1e-2)


def test_mixture_weights_count_members_and_zero_leaves_out():
    mean, variance, targets = _gaussians((3, 30))
    mean[2], variance[2], weights, picked = np.nan, np.nan, np.array([2, 1, 0]), [0, 0, 1]
    got = scores.crps_gaussian_mixture(mean, variance, targets, weights=weights, reduction="none")
    want = scores.crps_gaussian_mixture(mean[picked], variance[picked], targets, reduction="none")
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    score = lambda m, v, y: scores.crps_gaussian_mixture(m, v, y, weights=weights)
    assert all(np.isfinite(slope).all() for slope in jax.jit(jax.grad(score, (0, 1, 2)))(mean, variance, targets))


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


def test_gaussians_with_a_large_offset():
    mean, variance, targets = _gaussians()
    shifted = [np.float32(1e4) + array for array in (mean, targets)]
    exact = [array.astype(np.float64) - 1e4 for array in shifted]
    want = scores.crps_gaussian_mixture(exact[0], variance, exact[1], reduction="none")
    got = scores.crps_gaussian_mixture(shifted[0], variance, shifted[1], reduction="none")
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_mixture_takes_the_memory_of_one_member():
    mean, variance, targets = _gaussians((64, 1000))
    loss = lambda m: scores.crps_gaussian_mixture(m, variance, targets)
    for function in (loss, jax.grad(loss)):
        memory = jax.jit(function).lower(mean).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 16 * mean.nbytes  # every pair at once would be 64 times


@pytest.mark.usefixtures("unhooked")
def test_messages():
    mean, variance, targets = _gaussians((3, 6))
    with pytest.raises(ValueError, match="`scores.crps_gaussian_mixture` needs variances of zero or more"):
        scores.crps_gaussian_mixture(mean, -variance, targets)
    with pytest.raises(ValueError, match="one weight per member"):
        scores.crps_gaussian_mixture(mean, variance, targets, weights=np.ones(2))


@pytest.mark.parametrize("score", [scores.crps_gaussian, scores.crps_gaussian_mixture])
def test_infinite_inputs_have_an_infinite_score(score):
    inf, nan = np.inf, np.nan
    mean, variance = np.float32([inf, 0, 0, 0, nan]), np.float32([1, inf, 1, 1, inf])
    targets = np.float32([0, 0, inf, 0, 0])
    mean, variance = (x if score is scores.crps_gaussian else np.stack([x, x]) for x in (mean, variance))
    got = score(mean, variance, targets, reduction="none")
    np.testing.assert_allclose(got, [inf, inf, inf, 0.233695, nan], rtol=1e-5)
