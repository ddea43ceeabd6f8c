import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import uncertainty

stats = pytest.importorskip("scipy.stats", reason="the reference entropies are scipy's")


def _gradient(loss, argnums=0):
    return jax.jit(jax.grad(loss, argnums))


def _put(array, index, value):
    changed = array.copy()
    changed[index] = value
    return changed


def _logits(shape=(5, 7, 3), seed=0):
    return 3 * np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _softmax(logits):
    exponentials = np.exp(np.asarray(logits, np.float64))
    return exponentials / exponentials.sum(-1, keepdims=True)


@pytest.mark.parametrize("shape", [(3,), (7, 3), (5, 7, 4)])
def test_entropy_is_scipys(shape):
    logits = _logits(shape)
    want = stats.entropy(_softmax(logits), axis=-1)
    np.testing.assert_allclose(uncertainty.entropy(logits), want, rtol=1e-5, atol=1e-6)
    assert not np.allclose(uncertainty.entropy(-logits), want, rtol=1e-2)
    assert not np.allclose(stats.entropy(_softmax(logits), axis=-1, base=2), want, atol=1e-2)  # nats, not bits


def test_entropy_of_impossible_classes():
    logits = jnp.log(jnp.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]]))
    np.testing.assert_allclose(uncertainty.entropy(logits), [np.log(2), 0, np.log(3)], rtol=1e-6)
    assert np.isfinite(_gradient(lambda x: jnp.sum(uncertainty.entropy(x)))(logits)).all()


@pytest.mark.parametrize("weights", [None, np.array([0.1, 0.4, 0.2, 0.2, 0.1])])
def test_decomposition_is_the_mutual_information(weights):
    logits = _logits()
    p = _softmax(logits)
    total = stats.entropy(np.average(p, axis=0, weights=weights), axis=-1)
    aleatoric = np.average(stats.entropy(p, axis=-1), axis=0, weights=weights)
    parts = uncertainty.decompose_entropy(logits, weights=weights)
    np.testing.assert_allclose(parts.total, total, rtol=1e-5)
    np.testing.assert_allclose(parts.aleatoric, aleatoric, rtol=1e-5)
    np.testing.assert_allclose(parts.epistemic, total - aleatoric, rtol=1e-4)
    np.testing.assert_array_equal(parts.total, parts.aleatoric + parts.epistemic)
    shuffled = uncertainty.decompose_entropy(_put(logits, (0), logits[0, ::-1]), weights=weights)
    assert not np.allclose(shuffled.epistemic, total - aleatoric, rtol=1e-2)


def test_closed_forms():
    opposed = uncertainty.decompose_entropy(jnp.log(jnp.array([[1.0, 0.0], [0.0, 1.0]])))
    np.testing.assert_allclose(list(opposed), [np.log(2), 0, np.log(2)], rtol=1e-6)
    weighted = uncertainty.decompose_entropy(jnp.log(jnp.array([[1.0, 0.0], [0.0, 1.0]])), weights=np.array([3, 1]))
    np.testing.assert_allclose(weighted.epistemic, stats.entropy([0.75, 0.25]), rtol=1e-6)
    agreed = uncertainty.decompose_entropy(np.broadcast_to(_logits((1, 50, 4)), (7, 50, 4)))
    assert agreed.epistemic.max() < 1e-10


def test_small_epistemic_parts_are_never_negative_and_keep_their_digits():
    base, noise = _logits((1, 2000, 10)), 1e-3 * _logits((4, 2000, 10), seed=1)
    logits = base + noise
    p = _softmax(logits)
    mixed = p.mean(0, keepdims=True)
    want = np.sum(p * np.log(p / mixed), axis=-1).mean(0)
    epistemic = uncertainty.decompose_entropy(logits).epistemic
    assert epistemic.min() >= 0
    np.testing.assert_allclose(epistemic, want, rtol=5e-3)
    difference = uncertainty.entropy(jnp.log(p.mean(0))) - jnp.mean(uncertainty.entropy(logits), axis=0)
    assert difference.min() < 0  # what the plain difference would report


def test_weights_count_members():
    logits, picked = _logits((2, 7, 3)), np.array([0, 0, 1])
    got = uncertainty.decompose_entropy(logits, weights=np.array([2, 1]))
    for one, other in zip(got, uncertainty.decompose_entropy(logits[picked]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    got = uncertainty.decompose_entropy(logits, weights=np.ones(2))
    for one, other in zip(got, uncertainty.decompose_entropy(logits), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_weight_zero_leaves_a_broken_member_out():
    logits, weights = _put(_logits((3, 7, 3)), (1), np.nan), np.array([1, 0, 1])
    want = uncertainty.decompose_entropy(logits[np.array([0, 2])])
    for one, other in zip(uncertainty.decompose_entropy(logits, weights=weights), want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    gradient = _gradient(lambda x: jnp.sum(uncertainty.decompose_entropy(x, weights=weights).total))(logits)
    assert np.isfinite(gradient).all()
    assert np.isnan(uncertainty.decompose_entropy(logits).total).all()


def test_extreme_logits_stay_finite():
    logits = np.array([[[0.0, -1e30, -np.inf]], [[-1e4, 0.0, -np.inf]], [[88.0, -88.0, 0.0]]])
    for part in uncertainty.decompose_entropy(logits):
        assert np.isfinite(part).all()
    for pick in range(3):
        gradient = _gradient(lambda x: jnp.sum(uncertainty.decompose_entropy(x)[pick]))(logits)  # noqa: B023
        assert np.isfinite(gradient).all()


def test_jit_vmap_gradient_and_dtypes():
    logits = _logits()
    eager, jitted = uncertainty.decompose_entropy(logits), jax.jit(uncertainty.decompose_entropy)(logits)
    assert isinstance(jitted, uncertainty.Decomposition)
    for one, other in zip(eager, jitted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    rows = jax.vmap(uncertainty.decompose_entropy, in_axes=1)(logits)
    np.testing.assert_allclose(rows.epistemic, eager.epistemic, rtol=1e-5, atol=1e-6)
    assert uncertainty.decompose_entropy(logits.astype(jnp.bfloat16)).total.dtype == jnp.float32
    with jax.enable_x64(True):
        p = _softmax(logits)
        got = uncertainty.decompose_entropy(jnp.log(jnp.asarray(p)))
        assert got.total.dtype == jnp.float64
        np.testing.assert_allclose(got.total, stats.entropy(p.mean(0), axis=-1), rtol=1e-12)
        # The derivative of each part against central differences.
        for pick in range(3):
            loss = lambda x: jnp.sum(uncertainty.decompose_entropy(x)[pick] * jnp.arange(1.0, 8.0))  # noqa: B023
            point, step = jnp.log(jnp.asarray(p)), 1e-6
            direction = jnp.asarray(np.random.default_rng(2).normal(size=p.shape))
            numeric = (loss(point + step * direction) - loss(point - step * direction)) / (2 * step)
            np.testing.assert_allclose(jnp.sum(_gradient(loss)(point) * direction), numeric, rtol=1e-6)


@pytest.mark.usefixtures("unhooked")
def test_messages():
    with pytest.raises(ValueError, match=r"`uncertainty.entropy` needs `logits` of shape \(\*batch, class"):
        uncertainty.entropy(jnp.float32(1.0))
    with pytest.raises(ValueError, match="at least two classes"):
        uncertainty.entropy(np.zeros((4, 1)))
    with pytest.raises(ValueError, match=r"One member\? Add a leading axis: `logits\[None\]`."):
        uncertainty.decompose_entropy(np.zeros(4))
    with pytest.raises(ValueError, match="one weight per member"):
        uncertainty.decompose_entropy(np.zeros((4, 3)), weights=np.ones(3))


@pytest.mark.parametrize("low", [-np.inf, -200.0])
@pytest.mark.parametrize(
    "divergence", [uncertainty.jensen_shannon, lambda *x, **y: uncertainty.decompose_entropy(*x, **y).total]
)
def test_a_member_of_weight_zero_may_be_infinitely_far_off(divergence, low):
    logits, weights = np.float32([[0.0, low], [0.0, 0.0]]), np.array([1.0, 0.0])
    np.testing.assert_allclose(divergence(logits, weights=weights), 0, atol=1e-6)
    assert divergence(logits) > 0.1
    gradient = _gradient(lambda x: jnp.sum(divergence(x, weights=weights)))(logits)
    assert np.isfinite(gradient).all()
    assert (gradient[1] == 0).all()
