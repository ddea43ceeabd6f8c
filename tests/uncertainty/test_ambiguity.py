import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import combine, scores, uncertainty

WEIGHTS = [None, np.array([0.1, 0.4, 0.2, 0.2, 0.1])]


def _logits(shape=(5, 7, 3), seed=0):
    return 2 * np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _predictions(shape=(5, 7), seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape).astype(np.float32), rng.normal(size=shape[1:]).astype(np.float32)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_squared_error_in_three_independent_ways(weights):
    predictions, targets = _predictions()
    exact = predictions.astype(np.float64)
    mean = np.average(exact, axis=0, weights=weights)
    parts = uncertainty.decompose_squared_error(predictions, targets, weights=weights)
    np.testing.assert_allclose(parts.ensemble, (mean - targets) ** 2, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(parts.members, np.average((exact - targets) ** 2, axis=0, weights=weights), rtol=1e-5)
    want = np.average((exact - mean) ** 2, axis=0, weights=weights)
    np.testing.assert_allclose(parts.ambiguity, want, rtol=1e-5)
    assert (parts.ambiguity > 1e-3).all()
    # ddof 1 would not pass.
    assert not np.allclose(np.var(exact, axis=0, ddof=1), want, rtol=1e-2)
    np.testing.assert_allclose(
        np.sqrt(np.mean(parts.ensemble)), scores.rmse(predictions, targets, weights=weights), rtol=1e-5
    )


def test_squared_error_with_a_large_offset():
    predictions, targets = _predictions((32, 50))
    far, there = (1e4 + predictions).astype(np.float32), (1e4 + targets).astype(np.float32)
    exact = far.astype(np.float64)
    parts = uncertainty.decompose_squared_error(far, there)
    np.testing.assert_allclose(parts.ambiguity, np.var(exact, axis=0), rtol=1e-5)
    np.testing.assert_allclose(parts.ensemble, (exact.mean(0) - there) ** 2, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(parts.members, np.mean((exact - there) ** 2, axis=0), rtol=1e-5)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_nll_in_three_independent_ways(weights):
    logits, labels = _logits(), np.arange(7) % 3
    logs = np.asarray(logits, np.float64)
    logs = logs - np.log(np.exp(logs).sum(-1, keepdims=True))
    pool = np.exp(np.average(logs, axis=0, weights=weights))
    pool = pool / pool.sum(-1, keepdims=True)
    parts = uncertainty.decompose_nll(logits, labels, weights=weights)
    rows = np.arange(7)
    np.testing.assert_allclose(parts.ensemble, -np.log(pool[rows, labels]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(parts.members, np.average(-logs[:, rows, labels], axis=0, weights=weights), rtol=1e-5)
    divergence = np.sum(pool * (np.log(pool) - logs), axis=-1)
    want = np.average(divergence, axis=0, weights=weights)
    np.testing.assert_allclose(parts.ambiguity, want, rtol=1e-4)
    # The divergence the other way round, and the gain of the mean of the probabilities, would not pass.
    other = np.average(np.sum(np.exp(logs) * (logs - np.log(pool)), axis=-1), axis=0, weights=weights)
    assert not np.allclose(other, want, rtol=1e-2)
    gain = parts.members - scores.nll(logits, labels, weights=weights, reduction="none")
    assert not np.allclose(gain, want, rtol=1e-2)
    pooled = combine.mean_logits(logits, weights=weights)
    np.testing.assert_allclose(parts.ensemble, scores.nll(pooled[None], labels, reduction="none"), rtol=1e-5, atol=1e-6)


def test_nll_of_opposed_coins():
    # The pool of p and 1 - p is one half: ambiguity KL(1/2 || p) = -log(4 p (1 - p)) / 2.
    p = np.array([0.6, 0.9, 0.999])
    coins = np.log(np.stack([np.stack([p, 1 - p], -1), np.stack([1 - p, p], -1)])).astype(np.float32)
    parts = uncertainty.decompose_nll(coins, np.array([0, 1, 0]))
    np.testing.assert_allclose(parts.ensemble, np.log(2), rtol=1e-5)
    np.testing.assert_allclose(parts.ambiguity, -np.log(4 * p * (1 - p)) / 2, rtol=1e-5)


def test_small_ambiguities_are_never_negative_and_keep_their_digits():
    base, noise = _logits((1, 500, 10)), 1e-3 * _logits((4, 500, 10), seed=1)
    logits = base + noise
    logs = np.asarray(logits, np.float64)
    logs = logs - np.log(np.exp(logs).sum(-1, keepdims=True))
    want = -np.log(np.exp(logs.mean(0)).sum(-1))
    got = uncertainty.decompose_nll(logits, np.zeros(500, int)).ambiguity
    assert got.min() >= 0
    # float32 logits near 5 are rounded to 5e-7, of differences near 2e-3.
    np.testing.assert_allclose(got, want, rtol=5e-3)


def test_what_members_rule_out():
    logits = jnp.log(jnp.array([[[0.5, 0.5, 0.0]], [[0.2, 0.3, 0.5]]]))
    parts = uncertainty.decompose_nll(logits, jnp.array([0]))
    np.testing.assert_allclose(parts.ambiguity, -np.log(np.sqrt(0.1) + np.sqrt(0.15)), rtol=1e-5)
    for pick in range(3):
        gradient = jax.grad(lambda x: uncertainty.decompose_nll(x, jnp.array([0]))[pick][0])(logits)  # noqa: B023
        assert np.isfinite(gradient).all()


def test_weight_zero_jit_vmap_and_gradient():
    weights, (predictions, targets), logits, labels = (
        np.array([2, 0, 1]),
        _predictions((3, 6)),
        _logits((3, 6, 4)),
        np.arange(6) % 4,
    )
    cases = [
        (uncertainty.decompose_squared_error, predictions, targets),
        (uncertainty.decompose_nll, logits, labels),
    ]
    for function, values, truth in cases:
        want = function(values[[0, 0, 2]], truth)
        broken = jnp.asarray(values).at[1].set(jnp.nan)
        for one, other in zip(function(broken, truth, weights=weights), want, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
        gradient = jax.grad(lambda x: jnp.sum(function(x, truth, weights=weights).members))(broken)  # noqa: B023
        assert np.isfinite(gradient).all()
        assert np.abs(gradient).max() > 0
        mapped = jax.vmap(jax.jit(function), in_axes=(1, 0))(values, truth)
        for one, other in zip(mapped, function(values, truth), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("unhooked")
def test_messages():
    with pytest.raises(ValueError, match="decompose_squared_error` needs `targets` of the rows of"):
        uncertainty.decompose_squared_error(np.ones((2, 3)), np.ones((3, 1)))
    with pytest.raises(ValueError, match="`uncertainty.decompose_nll` needs labels from 0 to 2"):
        uncertainty.decompose_nll(_logits(), np.full(7, 3))
