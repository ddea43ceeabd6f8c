import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import combine, uncertainty

stats = pytest.importorskip("scipy.stats", reason="the reference tests are scipy's")

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


def test_moments_of_many_entries_are_those_of_the_mixture():
    rng = np.random.default_rng(0)
    mean, variance = rng.normal(size=(4, 30)).astype(np.float32), rng.uniform(0.1, 1, (4, 30)).astype(np.float32)
    drawn = np.asarray(uncertainty.sample_gaussian_mixture(mean, variance, 5000, key=KEY), np.float64)
    want = combine.gaussian(mean, variance)
    # Six standard errors each.
    np.testing.assert_array_less(np.abs(drawn.mean(0) - want.mean), 6 * np.sqrt(want.variance / 5000))
    np.testing.assert_array_less(np.abs(drawn.var(0) / want.variance - 1), 6 * np.sqrt(3 / 5000))
    correlation = np.corrcoef(drawn.T) - np.eye(30)
    assert np.abs(correlation).max() < 6 / np.sqrt(5000)


def test_weight_zero_keys_and_transforms():
    mean, variance = np.float32([[0.0], [np.nan], [5.0]]), np.ones((3, 1), np.float32)
    sample = lambda m: uncertainty.sample_gaussian_mixture(m, variance, 500, weights=np.array([1, 0, 1]), key=KEY)
    assert np.isfinite(sample(mean)).all()
    np.testing.assert_allclose(jax.jit(sample)(mean), sample(mean), rtol=1e-5, atol=1e-6)
    gradient = jax.grad(lambda m: jnp.sum(sample(m)))(mean)
    np.testing.assert_allclose(np.sum(gradient), 500)
    assert gradient[1] == 0
    logits = np.float32([[9.0, 0.0], [np.nan, 0.0]])
    assert set(np.unique(uncertainty.sample_class_mixture(logits, 99, weights=np.array([1, 0]), key=KEY))) <= {0, 1}
    legacy = uncertainty.sample_gaussian_mixture(
        mean, variance, 500, weights=np.array([1, 0, 1]), key=jax.random.key_data(KEY)
    )
    np.testing.assert_array_equal(legacy, sample(mean))
    other = uncertainty.sample_gaussian_mixture(mean, variance, 500, weights=np.array([1, 0, 1]), key=jax.random.key(1))
    assert not np.array_equal(other, legacy)


@pytest.mark.usefixtures("unhooked")
def test_messages():
    ones = np.ones((2, 3))
    with pytest.raises(TypeError, match="`uncertainty.sample_gaussian_mixture` needs one key from"):
        uncertainty.sample_gaussian_mixture(ones, ones, 3, key=0.5)
    with pytest.raises(ValueError, match="`uncertainty.sample_class_mixture` needs `num_samples` of at"):
        uncertainty.sample_class_mixture(ones, 0, key=KEY)
