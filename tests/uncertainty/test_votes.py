import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import uncertainty


def _logits(shape=(5, 40, 3), seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("weights", [None, np.array([1, 4, 2, 2, 1])])
def test_votes_that_differ_are_counted(weights):
    logits = _logits()
    counts = np.ones(5) if weights is None else weights
    labels = logits.argmax(-1)
    ratio, pairs = [], []
    for row in labels.T:
        shares = [counts[row == c].sum() / counts.sum() for c in range(3)]
        ratio.append(1 - max(shares))
        pairs.append(sum(counts[i] * counts[j] for i in range(5) for j in range(5) if row[i] != row[j]))
    np.testing.assert_allclose(uncertainty.variation_ratio(logits, weights=weights), ratio, rtol=1e-5, atol=1e-6)
    want = np.array(pairs) / counts.sum() ** 2
    np.testing.assert_allclose(uncertainty.disagreement(logits, weights=weights), want, rtol=1e-5, atol=1e-6)
    # Pairs of different members only, and the ratio itself, would not pass.
    assert not np.allclose(want * 5 / 4, want, rtol=1e-2)
    assert not np.allclose(ratio, want, rtol=1e-2)


def test_votes_in_closed_form():
    classes = 4
    opposed = 5 * jnp.eye(classes)  # every member votes for a class of its own
    np.testing.assert_allclose(uncertainty.variation_ratio(opposed), 1 - 1 / classes, rtol=1e-6)
    np.testing.assert_allclose(uncertainty.disagreement(opposed), 1 - 1 / classes, rtol=1e-6)
    agreed = np.broadcast_to(opposed[:1], (7, classes))
    assert uncertainty.variation_ratio(agreed) == 0
    assert uncertainty.disagreement(agreed) == 0


def test_members_that_agree_do_so_exactly_whatever_their_weights():
    agreed = np.broadcast_to(_logits((1, 40, 3)), (7, 40, 3))
    weights = np.random.default_rng(1).uniform(size=7)
    np.testing.assert_array_equal(uncertainty.variation_ratio(agreed, weights=weights), 0)
    np.testing.assert_array_equal(uncertainty.disagreement(agreed, weights=weights), 0)


def test_transforms_of_votes():
    logits = _logits()
    for function in (uncertainty.variation_ratio, uncertainty.disagreement):
        want = function(logits)
        np.testing.assert_allclose(jax.jit(function)(logits), want, rtol=1e-6)
        np.testing.assert_allclose(jax.vmap(function)(logits[None])[0], want, rtol=1e-6)
    broken = jnp.asarray(logits).at[1].set(jnp.nan)
    for function in (uncertainty.variation_ratio, uncertainty.disagreement):
        weights = np.array([1, 0, 1, 1, 1])
        np.testing.assert_allclose(function(broken, weights=weights), function(logits[weights > 0]), atol=1e-6)
        assert np.isnan(function(broken)).all()


@pytest.mark.usefixtures("unhooked")
def test_messages():
    with pytest.raises(ValueError, match="`uncertainty.variation_ratio` needs at least two classes"):
        uncertainty.variation_ratio(np.zeros((4, 1)))
    with pytest.raises(ValueError, match="`uncertainty.disagreement` needs one weight per member"):
        uncertainty.disagreement(_logits(), weights=np.ones(3))
