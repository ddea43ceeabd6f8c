import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import combine, scores

reference = pytest.importorskip("scoringrules", reason="the reference scores are those of scoringrules")
stats = pytest.importorskip("scipy.stats", reason="the reference densities are scipy's")

WEIGHTS = np.array([0.1, 0.4, 0.2, 0.2, 0.1])


def _data(shape=(5, 30), seed=0):
    rng = np.random.default_rng(seed)
    mean, variance = rng.normal(size=shape), rng.uniform(0.1, 3.0, size=shape)
    targets = rng.normal(size=shape[1:])
    return mean.astype(np.float32), variance.astype(np.float32), targets.astype(np.float32)


def _last(*arrays):
    return [np.moveaxis(np.asarray(array, np.float64), 0, -1) for array in arrays]


def test_one_gaussian_is_scipys_and_scoringrules():
    mean, variance, targets = (array.reshape(-1) for array in _data((1, 30)))
    rows = scores.nll_gaussian(mean, variance, targets, reduction="none")
    want = -stats.norm.logpdf(targets, mean, np.sqrt(variance))
    np.testing.assert_allclose(rows, want, rtol=1e-5)
    logs = reference.logs_normal(targets, mean, np.sqrt(variance), backend="numpy")
    np.testing.assert_allclose(rows, logs, rtol=1e-5)
    np.testing.assert_allclose(scores.nll_gaussian(mean, variance, targets), want.mean(), rtol=1e-5)
    assert not np.allclose(-stats.norm.logpdf(targets, mean, variance), want, rtol=1e-2)
    assert not np.allclose(scores.nll_gaussian(mean, variance, targets[::-1], reduction="none"), want, rtol=1e-2)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_mixture_is_the_log_of_the_mean_density(weights):
    mean, variance, targets = _data()
    rows = scores.nll_gaussian_mixture(mean, variance, targets, weights=weights, reduction="none")
    m, v = (np.asarray(array, np.float64) for array in (mean, variance))
    want = -np.log(np.average(stats.norm.pdf(targets, m, np.sqrt(v)), axis=0, weights=weights))
    np.testing.assert_allclose(rows, want, rtol=1e-5)
    np.testing.assert_allclose(
        scores.nll_gaussian_mixture(mean, variance, targets, weights=weights), want.mean(), rtol=1e-5
    )
    # The moment-matched Gaussian, and other weights, are something else.
    matched = combine.gaussian(mean, variance, weights=weights)
    assert not np.allclose(scores.nll_gaussian(*matched, targets, reduction="none"), want, rtol=1e-2)
    other = scores.nll_gaussian_mixture(mean, variance, targets, weights=np.arange(1, 6), reduction="none")
    assert not np.allclose(other, want, rtol=1e-2)


def test_mixture_is_scoringrules():
    mean, variance, targets = _data()
    logs = reference.logs_mixnorm(
        np.float64(targets), *_last(mean, np.sqrt(variance)), np.tile(WEIGHTS, (30, 1)), backend="numpy"
    )
    rows = scores.nll_gaussian_mixture(mean, variance, targets, weights=WEIGHTS, reduction="none")
    np.testing.assert_allclose(rows, logs, rtol=1e-5)


def test_an_ensemble_of_one_is_one_gaussian():
    mean, variance, targets = _data((1, 30))
    np.testing.assert_allclose(
        scores.nll_gaussian_mixture(mean, variance, targets),
        scores.nll_gaussian(mean[0], variance[0], targets),
        rtol=1e-6,
    )


def test_targets_far_from_every_member():
    mean, variance = np.zeros((2, 1), np.float32), np.ones((2, 1), np.float32)
    want = 0.5 * (np.log(2 * np.pi) + 1e6)
    np.testing.assert_allclose(scores.nll_gaussian_mixture(mean, variance, np.float32([1e3])), want, rtol=1e-6)


def test_a_large_offset_costs_no_precision():
    mean, variance, targets = _data()
    shifted = [np.float32(1e4) + array for array in (mean, targets)]
    exact = [array.astype(np.float64) - 1e4 for array in shifted]  # what float32 kept of the values
    want = scores.nll_gaussian_mixture(exact[0], variance, exact[1], reduction="none")
    got = scores.nll_gaussian_mixture(shifted[0], variance, shifted[1], reduction="none")
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_weight_zero_leaves_a_broken_member_out():
    mean, variance, targets = _data((3, 30))
    want = scores.nll_gaussian_mixture(mean[:2], variance[:2], targets)
    mean[2], variance[2], weights = np.nan, np.nan, np.array([1.0, 1.0, 0.0])
    assert np.isnan(scores.nll_gaussian_mixture(mean, variance, targets))
    score = lambda m, v, y: scores.nll_gaussian_mixture(m, v, y, weights=weights)
    value, slopes = jax.jit(jax.value_and_grad(score, (0, 1, 2)))(mean, variance, targets)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    assert all(np.isfinite(slope).all() for slope in slopes)


def test_several_outputs_are_entries_of_their_own():
    mean, variance, targets = _data((3, 10, 2))
    rows = scores.nll_gaussian_mixture(mean, variance, targets, reduction="none")
    assert rows.shape == (10, 2)
    first = scores.nll_gaussian_mixture(mean[..., 0], variance[..., 0], targets[:, 0], reduction="none")
    np.testing.assert_allclose(rows[:, 0], first, rtol=1e-6)


def test_whole_numbered_targets_and_mixed_precision():
    mean, variance, targets = _data((3, 10))
    counts = np.round(targets).astype(int)
    want = scores.nll_gaussian_mixture(mean, variance, counts.astype(np.float32))
    assert scores.nll_gaussian_mixture(mean, variance, counts) == want
    half = jnp.asarray(mean, jnp.bfloat16)
    got = scores.nll_gaussian_mixture(half, variance, counts)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, scores.nll_gaussian_mixture(half.astype(jnp.float32), variance, counts), rtol=1e-6)


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
