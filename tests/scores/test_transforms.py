"""What every score promises alike: jit, vmap, gradients, weights and dtypes."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import scores

RNG = np.random.default_rng(0)
LABELS = RNG.integers(4, size=20)
LOGITS = (2 * RNG.normal(size=(3, 20, 4))).astype(np.float32)
MEAN, VARIANCE = RNG.normal(size=(3, 20)).astype(np.float32), RNG.uniform(0.1, 3, size=(3, 20)).astype(np.float32)
TARGETS = RNG.normal(size=20).astype(np.float32)

MEMBERS = {
    "nll": (LOGITS, LABELS),
    "brier": (LOGITS, LABELS),
    "accuracy": (LOGITS, LABELS),
    "mean_member_accuracy": (LOGITS, LABELS),
    "ece": (LOGITS, LABELS),
    "nll_gaussian_mixture": (MEAN, VARIANCE, TARGETS),
    "crps": (MEAN, TARGETS),
    "crps_gaussian_mixture": (MEAN, VARIANCE, TARGETS),
    "rmse": (MEAN, TARGETS),
    "mean_member_rmse": (MEAN, TARGETS),
}
SINGLE = {
    "nll_gaussian": (MEAN[0], VARIANCE[0], TARGETS),
    "crps_gaussian": (MEAN[0], VARIANCE[0], TARGETS),
    "coverage": (MEAN[0] - 1, MEAN[0] + 1, TARGETS),
}
ALL = MEMBERS | SINGLE


def test_no_score_is_left_out():
    public = {name for name, value in vars(scores).items() if inspect.isfunction(value)}
    assert public == set(ALL) | {"per_member"}


@pytest.mark.parametrize("name", ALL)
def test_jit_vmap_and_gradient(name):
    score, arguments = getattr(scores, name), ALL[name]
    eager = score(*arguments)
    assert eager.shape == ()
    assert eager.dtype == jnp.float32
    value, slope = jax.jit(jax.value_and_grad(score))(*arguments)
    np.testing.assert_allclose(value, eager, rtol=1e-5)
    assert np.isfinite(slope).all()
    assert name in ("accuracy", "mean_member_accuracy", "coverage") or np.abs(slope).max() > 0
    twice = jax.vmap(score)(*(np.stack([array, array]) for array in arguments))
    np.testing.assert_allclose(twice, [eager, eager], rtol=1e-5)


@pytest.mark.parametrize("name", MEMBERS)
def test_weights(name):
    score, (*predictions, target) = getattr(scores, name), MEMBERS[name]
    plain = score(*predictions, target)
    np.testing.assert_allclose(score(*predictions, target, weights=np.ones(3)), plain, rtol=1e-5)
    doubled = score(*(array[[0, 0, 1, 2]] for array in predictions), target)
    np.testing.assert_allclose(score(*predictions, target, weights=np.array([2, 1, 1])), doubled, rtol=1e-5)
    alone = score(*(array[1:2] for array in predictions), target)
    np.testing.assert_allclose(score(*predictions, target, weights=np.array([0, 1, 0])), alone, rtol=1e-5, atol=1e-6)
    permuted = score(*(array[[2, 0, 1]] for array in predictions), target, weights=np.array([3, 1, 2]))
    np.testing.assert_allclose(permuted, score(*predictions, target, weights=np.array([1, 2, 3])), rtol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_precisions(name):
    score, arguments = getattr(scores, name), ALL[name]
    half = [array if array.dtype.kind == "i" else jnp.asarray(array, jnp.bfloat16) for array in arguments]
    widened = [array if array.dtype.kind == "i" else array.astype(jnp.float32) for array in half]
    got = score(*half)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, score(*widened), rtol=1e-6)
    with jax.enable_x64(True):
        double = [array if array.dtype.kind == "i" else array.astype(np.float64) for array in arguments]
        wide = score(*double)
        assert wide.dtype == jnp.float64
    np.testing.assert_allclose(score(*arguments), wide, rtol=1e-5)
