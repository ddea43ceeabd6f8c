import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import uncertainty

distance = pytest.importorskip("scipy.spatial.distance", reason="the reference Jensen-Shannon distance is scipy's")


def _gradient(loss, argnums=0):
    return jax.jit(jax.grad(loss, argnums))


def _logits(shape=(5, 7, 3), seed=0):
    return 2 * np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _softmax(logits):
    exponentials = np.exp(np.asarray(logits, np.float64))
    return exponentials / exponentials.sum(-1, keepdims=True)


def _pairwise(p, weights):
    """KL of every pair of members, one pair after another."""
    total = 0
    for a, w in zip(p, weights, strict=True):
        for b, v in zip(p, weights, strict=True):
            total = total + w * v * np.sum(a * np.log(a / b), axis=-1)
    return total / np.sum(weights) ** 2


def test_jensen_shannon_of_two_is_scipys_distance_squared():
    logits = _logits((2, 7, 4))
    want = distance.jensenshannon(*_softmax(logits), axis=-1) ** 2
    np.testing.assert_allclose(uncertainty.jensen_shannon(logits), want, rtol=1e-4)
    assert not np.allclose(distance.jensenshannon(*_softmax(logits), axis=-1, base=2) ** 2, want, rtol=1e-2)
    with jax.enable_x64(True):
        np.testing.assert_allclose(uncertainty.jensen_shannon(logits.astype(np.float64)), want, rtol=1e-12)


def test_jensen_shannon_is_at_most_the_entropy_of_the_weights():
    opposed = jnp.log(jnp.array([[1.0, 0.0], [0.0, 1.0]]))
    np.testing.assert_allclose(uncertainty.jensen_shannon(opposed), np.log(2), rtol=1e-6)
    got = uncertainty.jensen_shannon(opposed, weights=np.array([3, 1]))
    np.testing.assert_allclose(got, -0.75 * np.log(0.75) - 0.25 * np.log(0.25), rtol=1e-6)


@pytest.mark.parametrize("weights", [None, np.array([0.1, 0.4, 0.2, 0.2, 0.1])])
def test_pairwise_kl_is_the_mean_over_pairs(weights):
    logits = _logits()
    want = _pairwise(_softmax(logits), np.ones(5) if weights is None else weights)
    np.testing.assert_allclose(uncertainty.pairwise_kl(logits, weights=weights), want, rtol=1e-4)
    # The mean over pairs of different members, and the divergence from the mixture, would not pass.
    assert not np.allclose(want * 5 / 4, want, rtol=1e-2)
    assert not np.allclose(uncertainty.jensen_shannon(logits, weights=weights), want, rtol=1e-2)
    with jax.enable_x64(True):
        got = uncertainty.pairwise_kl(logits.astype(np.float64), weights=weights)
        np.testing.assert_allclose(got, want, rtol=1e-11)


def test_pairwise_kl_of_two_coins():
    # 2 KL(p || 1 - p) / 4 = (2 p - 1) log(p / (1 - p)) / 2
    p = np.array([0.6, 0.9, 0.999])
    coins = np.log(np.stack([np.stack([p, 1 - p], -1), np.stack([1 - p, p], -1)])).astype(np.float32)
    want = (2 * p - 1) * np.log(p / (1 - p)) / 2
    np.testing.assert_allclose(uncertainty.pairwise_kl(coins), want, rtol=1e-5)


def test_with_the_mean_entropy_it_is_the_mean_cross_entropy():
    logits = _logits()
    p = _softmax(logits)
    cross = -np.mean([np.sum(a * np.log(b), axis=-1) for a in p for b in p], axis=0)
    parts = uncertainty.decompose_entropy(logits)
    np.testing.assert_allclose(parts.aleatoric + uncertainty.pairwise_kl(logits), cross, rtol=1e-5)
    assert (uncertainty.pairwise_kl(logits) > parts.epistemic).all()
    assert not np.allclose(parts.total, cross, rtol=1e-2)


def test_small_divergences_are_never_negative_and_keep_their_digits():
    base, noise = _logits((1, 500, 10)), 1e-3 * _logits((4, 500, 10), seed=1)
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


def test_weight_zero_leaves_a_broken_member_out():
    logits, weights = _logits((3, 7, 3)), np.array([1, 0, 1])
    for divergence in (uncertainty.jensen_shannon, uncertainty.pairwise_kl):
        want = divergence(logits[np.array([0, 2])])
        broken = jnp.asarray(logits).at[1].set(jnp.nan)
        np.testing.assert_allclose(divergence(broken, weights=weights), want, rtol=1e-4, atol=1e-6)
        gradient = _gradient(lambda x: jnp.sum(divergence(x, weights=weights)))(broken)  # noqa: B023
        assert np.isfinite(gradient).all()
        assert np.isnan(divergence(broken)).all()


@pytest.mark.usefixtures("unhooked")
def test_messages():
    with pytest.raises(ValueError, match="`uncertainty.pairwise_kl` needs at least two classes"):
        uncertainty.pairwise_kl(np.zeros((4, 1)))
    with pytest.raises(ValueError, match="`uncertainty.jensen_shannon` needs one weight per member"):
        uncertainty.jensen_shannon(np.zeros((4, 3)), weights=np.ones(3))
