import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import combine, uncertainty

special = pytest.importorskip("scipy.special", reason="the reference sums are scipy's")


def _logits(shape=(5, 7, 3), seed=0):
    return 2 * np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("weights", [None, np.array([0.1, 0.4, 0.2, 0.2, 0.1])])
def test_least_confidence_is_one_minus_the_largest_probability(weights):
    logits = _logits()
    probabilities = special.softmax(logits.astype(np.float64), axis=-1)
    want = 1 - np.average(probabilities, axis=0, weights=weights).max(-1)
    np.testing.assert_allclose(uncertainty.least_confidence(logits, weights=weights), want, rtol=1e-5)
    # The mean over members of their own would not pass.
    assert not np.allclose(1 - np.average(probabilities.max(-1), axis=0, weights=weights), want, rtol=1e-2)


def test_rows_that_are_nearly_certain_keep_their_order():
    gaps = np.linspace(20, 60, 9, dtype=np.float32)
    logits = np.stack([gaps, np.zeros(9, np.float32)], axis=-1)[None]
    np.testing.assert_allclose(uncertainty.least_confidence(logits), np.exp(-gaps.astype(np.float64)), rtol=1e-5)
    assert len(np.unique(1 - np.exp(combine.mixture(logits)).max(-1))) == 1  # what plain subtraction sees
    np.testing.assert_allclose(uncertainty.least_confidence(np.zeros((2, 4), np.float32)), 0.75, rtol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 10.0])
@pytest.mark.parametrize("weights", [None, np.array([0.1, 0.4, 0.2, 0.2, 0.1])])
def test_energy_is_the_formula(weights, temperature):
    logits = _logits()
    each = -temperature * special.logsumexp(logits.astype(np.float64) / temperature, axis=-1)
    want = np.average(each, axis=0, weights=weights)
    np.testing.assert_allclose(
        uncertainty.free_energy(logits, temperature=temperature, weights=weights), want, rtol=1e-5, atol=1e-6
    )
    if temperature != 1:
        assert not np.allclose(uncertainty.free_energy(logits, weights=weights), want, rtol=1e-2)


def test_energy_sees_the_size_of_logits_and_nothing_in_probabilities():
    logits = _logits()
    np.testing.assert_allclose(uncertainty.free_energy(jax.nn.log_softmax(logits)), 0, atol=1e-6)
    np.testing.assert_allclose(uncertainty.free_energy(logits + 100), uncertainty.free_energy(logits) - 100, rtol=1e-5)
    np.testing.assert_allclose(uncertainty.free_energy(np.zeros((1, 8), np.float32)), -np.log(8), rtol=1e-6)


def test_weight_zero_and_transforms():
    logits, weights = _logits((3, 7, 4)), np.array([1, 0, 1])
    broken = jnp.asarray(logits).at[1].set(jnp.nan)
    for function in (uncertainty.least_confidence, uncertainty.free_energy):
        want = function(logits[[0, 2]])
        np.testing.assert_allclose(function(broken, weights=weights), want, rtol=1e-5)
        gradient = jax.grad(lambda x: jnp.sum(function(x, weights=weights)))(broken)  # noqa: B023
        assert np.isfinite(gradient).all()
        assert np.abs(gradient).max() > 0
        assert np.isnan(function(broken)).all()
        np.testing.assert_allclose(jax.jit(jax.vmap(function, in_axes=1))(logits[[0, 2]]), want, rtol=1e-5)


@pytest.mark.usefixtures("unhooked")
def test_messages():
    with pytest.raises(ValueError, match="uncertainty.free_energy` needs a finite `temperature` above zero.\n  got 0"):
        uncertainty.free_energy(_logits(), temperature=0.0)
    with pytest.raises(ValueError, match="`uncertainty.least_confidence` needs at least two classes"):
        uncertainty.least_confidence(np.zeros((4, 1)))
