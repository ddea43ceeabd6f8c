import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import combine, scores

reference = pytest.importorskip("scoringrules", reason="the reference scores are those of scoringrules")

WEIGHTS = np.array([0.1, 0.4, 0.2, 0.2, 0.1])


def _samples(shape=(5, 30), seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape).astype(np.float32), rng.normal(size=shape[1:]).astype(np.float32)


def _gaussians(shape=(5, 30), seed=0):
    mean, targets = _samples(shape, seed)
    return mean, np.random.default_rng(seed + 1).uniform(0.1, 3.0, size=shape).astype(np.float32), targets


def _pairs(samples, targets, weights):
    """The definition: every pair of members, weighted."""
    x, w = np.asarray(samples, np.float64), np.asarray(weights, np.float64) / np.sum(weights)
    outside = np.tensordot(w, np.abs(x - targets), 1)
    between = np.einsum("m,n,mn...->...", w, w, np.abs(x[:, None] - x[None]))
    return outside - between / 2


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


@pytest.mark.parametrize("shape", [(5,), (5, 7), (5, 4, 3)])
def test_weights_are_those_of_the_definition(shape):
    samples, targets = _samples(shape)
    want = _pairs(samples, targets, WEIGHTS)
    rows = scores.crps(samples, targets, weights=WEIGHTS, reduction="none")
    np.testing.assert_allclose(rows, want, rtol=1e-4, atol=1e-6)
    assert not np.allclose(scores.crps(samples, targets, reduction="none"), want, rtol=1e-2)
    uniform = scores.crps(samples, targets, weights=np.ones(5), reduction="none")
    np.testing.assert_allclose(uniform, scores.crps(samples, targets, reduction="none"), rtol=1e-5, atol=1e-6)


def test_weights_count_members_and_zero_leaves_out():
    samples, targets = _samples((3, 30))
    samples[2] = np.nan
    got = scores.crps(samples, targets, weights=np.array([2, 1, 0]), reduction="none")
    np.testing.assert_allclose(got, scores.crps(samples[[0, 0, 1]], targets, reduction="none"), rtol=1e-5, atol=1e-6)
    assert np.isnan(scores.crps(samples, targets, reduction="none")).all()
    slope = jax.jit(jax.grad(lambda x: scores.crps(x, targets, weights=np.array([2, 1, 0]))))(samples)
    assert np.isfinite(slope).all()


def test_one_member_is_the_absolute_error():
    samples, targets = _samples((1, 30))
    np.testing.assert_allclose(scores.crps(samples, targets, reduction="none"), np.abs(samples[0] - targets), rtol=1e-6)


@pytest.mark.parametrize("weights", [None, np.ones(64)])
def test_a_large_offset_costs_no_precision(weights):
    samples, targets = _samples((64, 30))
    samples, targets = samples + np.float32(1e4), targets + np.float32(1e4)
    want = _pairs(samples, np.float64(targets), np.ones(64))
    got = scores.crps(samples, targets, weights=weights, reduction="none")
    np.testing.assert_allclose(got, want, rtol=2e-5)
    careless = np.abs(samples - targets).mean(0) + samples.mean(0)
    careless -= 2 * (np.sort(samples, 0) * np.arange(64, dtype=np.float32)[:, None]).sum(0) / np.float32(64 * 63)
    fair = reference.crps_ensemble(np.float64(targets), np.float64(samples.T), estimator="fair", backend="numpy")
    assert np.abs(careless - fair).max() > 1e-3  # probability-weighted moments in float32
    np.testing.assert_allclose(
        scores.crps(samples, targets, estimator="fair", reduction="none"), fair, rtol=1e-4, atol=1e-5
    )


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
    samples, targets = _samples((3, 6))
    with pytest.raises(ValueError, match="`estimator` to be 'nrg' or 'fair'.\n  got 'pwm'"):
        scores.crps(samples, targets, estimator="pwm")
    with pytest.raises(ValueError, match='at least two members for estimator="fair".\n  got 1\nUse `estimator="nrg"`.'):
        scores.crps(samples[:1], targets, estimator="fair")
    with pytest.raises(ValueError, match='equally weighted members for estimator="fair"'):
        scores.crps(samples, targets, estimator="fair", weights=np.ones(3))
    with pytest.raises(ValueError, match="variances of zero or more"):
        scores.crps_gaussian_mixture(samples, np.full_like(samples, -1), targets)
    with pytest.raises(ValueError, match="one weight per member"):
        scores.crps_gaussian_mixture(samples, np.ones_like(samples), targets, weights=np.ones(2))
