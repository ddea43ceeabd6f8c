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


def _logits(shape=(5, 7, 3), seed=0):
    return 3 * np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _softmax(logits):
    exponentials = np.exp(np.asarray(logits, np.float64))
    return exponentials / exponentials.sum(-1, keepdims=True)


@pytest.mark.parametrize("shape", [(5, 7, 3), (1, 4, 2), (4, 2, 3, 5), (3, 6)])
def test_mixture_is_the_mean_of_the_probabilities(shape):
    logits, weights = _logits(shape), np.arange(1.0, shape[0] + 1)
    np.testing.assert_allclose(np.exp(combine.mixture(logits)), _softmax(logits).mean(0), rtol=1e-5)
    want = np.average(_softmax(logits), axis=0, weights=weights)
    np.testing.assert_allclose(np.exp(combine.mixture(logits, weights=weights)), want, rtol=1e-5)
    if shape[0] > 1:
        # Neither the mean of the logits nor other weights would pass.
        assert not np.allclose(_softmax(np.mean(logits, 0)), _softmax(logits).mean(0), rtol=1e-2)
        assert not np.allclose(np.exp(combine.mixture(logits, weights=weights[::-1])), want, rtol=1e-2)


def test_mixture_of_log_probabilities_and_of_shifted_logits_is_the_same():
    logits = _logits()
    want = combine.mixture(logits)
    np.testing.assert_allclose(combine.mixture(jax.nn.log_softmax(logits)), want, rtol=1e-5, atol=1e-6)
    shifted = logits + jnp.arange(5, dtype=logits.dtype)[:, None, None]
    np.testing.assert_allclose(combine.mixture(shifted), want, rtol=1e-5, atol=1e-5)


def test_mixture_keeps_probabilities_below_the_smallest_float():
    logits = np.array([[[0.0, -200.0]], [[0.0, -201.0]]])
    want = np.logaddexp(-200.0, -201.0) - np.log(2)
    np.testing.assert_allclose(combine.mixture(logits)[0, 1], want, rtol=1e-6)
    assert np.exp(np.float32(want)) == 0  # what averaging the probabilities would see


def test_mixture_of_impossible_classes_has_a_finite_gradient():
    logits = jnp.log(jnp.array([[[0.5, 0.5, 0.0]], [[1.0, 0.0, 0.0]]]))
    np.testing.assert_allclose(np.exp(combine.mixture(logits)), [[0.75, 0.25, 0.0]], rtol=1e-6)
    gradient = _gradient(lambda x: jnp.sum(jnp.exp(combine.mixture(x))[:, 0]))(logits)
    assert np.isfinite(gradient).all()
    assert np.abs(gradient).sum() > 0


def test_weights_count_members():
    logits, picked = _logits((2, 7, 3)), np.array([0, 0, 1])
    for rule in (combine.mixture, combine.vote):
        np.testing.assert_allclose(rule(logits, weights=np.array([2, 1])), rule(logits[picked]), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(rule(logits, weights=np.ones(2)), rule(logits), rtol=1e-5, atol=1e-6)


def test_weight_zero_leaves_a_broken_member_out():
    logits = _put(_logits((3, 4, 3)), (0), np.nan)
    weights = np.array([0, 1, 2])
    for rule in (combine.mixture, combine.vote):
        want = rule(logits[1:], weights=weights[1:])
        np.testing.assert_allclose(rule(logits, weights=weights), want, rtol=1e-6)
        assert np.isnan(rule(logits)).all()
    gradient = _gradient(lambda x: jnp.sum(combine.mixture(x, weights=weights)[:, 0]))(logits)
    assert np.isfinite(gradient).all()


def test_vote_counts():
    logits = np.asarray(_logits((6, 9, 4)))
    want = np.stack([np.bincount(logits[:, row].argmax(-1), minlength=4) / 6 for row in range(9)])
    np.testing.assert_allclose(combine.vote(logits), want, rtol=1e-6)
    assert not np.allclose(combine.vote(logits[:, ::-1]), want)
    np.testing.assert_allclose(combine.vote(jax.nn.softmax(logits)), want, rtol=1e-6)


def test_vote_gives_ties_to_the_lowest_class():
    np.testing.assert_array_equal(combine.vote(np.array([[[1.0, 2.0, 2.0]], [[3.0, 3.0, 3.0]]])), [[0.5, 0.5, 0.0]])


@pytest.mark.parametrize("rule", [combine.mixture, combine.vote])
def test_jit_vmap_and_dtypes(rule):
    logits = _logits((3, 4, 5))
    np.testing.assert_allclose(jax.jit(rule)(logits), rule(logits), rtol=1e-5, atol=1e-6)
    many = jax.vmap(rule)(np.stack([logits, 2 * logits]))
    np.testing.assert_allclose(many[0], rule(logits), rtol=1e-5, atol=1e-6)
    half = logits.astype(jnp.bfloat16)
    assert rule(half).dtype == jnp.float32
    np.testing.assert_allclose(rule(half), rule(half.astype(jnp.float32)), rtol=1e-6)


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize("rule", [combine.mixture, combine.vote])
def test_invalid_logits(rule):
    name = rule.__name__
    with pytest.raises(ValueError, match=rf"`combine.{name}` needs .*\n  got shape \(3,\)\nOne member\?"):
        rule(np.zeros(3))
    with pytest.raises(ValueError, match=r"at least two classes.*\n  got shape \(3, 4, 1\)\nOne logit per row"):
        rule(np.zeros((3, 4, 1)))
    with pytest.raises(ValueError, match="at least one member"):
        rule(np.zeros((0, 4, 2)))
    with pytest.raises(TypeError, match="floating-point `logits`"):
        rule(np.zeros((3, 4, 2), int))


@pytest.mark.parametrize("weights", [None, np.array([0.1, 0.4, 0.2, 0.2, 0.1])])
def test_mean_logits_is_the_normalised_geometric_mean(weights):
    logits = _logits()
    pooled = np.exp(np.average(np.log(_softmax(logits)), axis=0, weights=weights))
    want = pooled / pooled.sum(-1, keepdims=True)
    np.testing.assert_allclose(np.exp(combine.mean_logits(logits, weights=weights)), want, rtol=1e-5)
    np.testing.assert_allclose(
        np.exp(combine.mean_logits(jax.nn.log_softmax(logits), weights=weights)), want, rtol=1e-5
    )
    # The mean of the probabilities would not pass.
    assert not np.allclose(np.average(_softmax(logits), axis=0, weights=weights), want, rtol=1e-2)


def test_mean_logits_of_two_odds_has_their_geometric_mean():
    odds = np.array([9.0, 1 / 4])
    logits = np.log(np.stack([odds / (1 + odds), 1 / (1 + odds)], axis=-1)).astype(np.float32)
    got = combine.mean_logits(logits)
    np.testing.assert_allclose(np.exp(got[0] - got[1]), np.sqrt(9 / 4), rtol=1e-5)


def test_mean_logits_a_class_that_one_member_rules_out():
    logits = jnp.log(jnp.array([[[0.5, 0.5, 0.0]], [[0.2, 0.3, 0.5]]]))
    want = np.array([np.sqrt(0.1), np.sqrt(0.15), 0])
    np.testing.assert_allclose(np.exp(combine.mean_logits(logits))[0], want / want.sum(), rtol=1e-5)
    loss = lambda x, w: combine.mean_logits(x, weights=w)[0, 0]
    for gradient in _gradient(loss, (0, 1))(logits, jnp.array([0.5, 0.5])):
        assert np.isfinite(gradient).all()
    np.testing.assert_allclose(
        combine.mean_logits(logits, weights=np.array([0, 1])), jax.nn.log_softmax(logits[1]), rtol=1e-5
    )
    disjoint = jnp.log(jnp.array([[1.0, 0.0], [0.0, 1.0]]))
    assert np.isnan(combine.mean_logits(disjoint)).all()
