import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import conformal, scores

WEIGHTS = np.array([0.1, 0.4, 0.0, 0.2, 0.3])


def _vectors(shape=(5, 7, 2), seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape).astype(np.float32), rng.normal(size=shape[1:]).astype(np.float32)


@pytest.mark.parametrize("shape", [(5, 7, 2), (5, 2), (5, 3, 4, 2)])
def test_energy_is_that_of_all_pairs(shape):
    samples, targets = _vectors(shape)
    for weights in (None, WEIGHTS):
        w = np.full(5, 0.2) if weights is None else weights
        outside = np.tensordot(w, np.linalg.norm(samples - targets, axis=-1), 1)
        between = np.einsum("m,n,mn...->...", w, w, np.linalg.norm(samples[:, None] - samples[None], axis=-1))
        got = scores.energy_score(samples, targets, weights=weights, reduction="none")
        np.testing.assert_allclose(got, outside - between / 2, rtol=1e-5)
    fair = scores.energy_score(samples, targets, estimator="fair", reduction="none")
    between = np.linalg.norm(samples[:, None] - samples[None], axis=-1).sum((0, 1)) / 20
    np.testing.assert_allclose(fair, np.linalg.norm(samples - targets, axis=-1).mean(0) - between / 2, rtol=1e-4)
    assert not np.allclose(fair, got, rtol=1e-2)


def test_energy_of_one_output_is_crps():
    samples, targets = _vectors((5, 7))
    got = scores.energy_score(samples[..., None], targets[..., None], reduction="none")
    np.testing.assert_allclose(got, scores.crps(samples, targets, reduction="none"), rtol=1e-4, atol=1e-6)
    fair = scores.crps(samples, targets, estimator="fair", reduction="none")
    assert not np.allclose(got, fair, rtol=1e-2)


def test_a_member_of_weight_zero_is_left_out_of_energy():
    samples, targets = _vectors()
    samples[2] = np.nan
    got = scores.energy_score(samples, targets, weights=WEIGHTS)
    np.testing.assert_allclose(
        got, scores.energy_score(samples[[0, 1, 3, 4]], targets, weights=WEIGHTS[[0, 1, 3, 4]]), rtol=1e-5
    )
    assert np.isnan(scores.energy_score(samples, targets))


def test_energy_has_a_finite_gradient_where_members_coincide():
    samples, targets = _vectors()
    samples[1] = samples[0]
    slope = jax.grad(lambda x: scores.energy_score(x, targets))(samples)
    assert np.isfinite(slope).all()
    step = np.zeros_like(samples)
    step[3, 2, 1] = 1e-2
    change = scores.energy_score(samples + step, targets) - scores.energy_score(samples - step, targets)
    np.testing.assert_allclose(slope[3, 2, 1], change / 2e-2, rtol=1e-2)


def test_interval_score_by_hand():
    got = scores.interval_score(np.zeros(4), np.full(4, 2.0), np.array([1, 3, -1, 2.0]), level=0.8, reduction="none")
    np.testing.assert_allclose(got, [2, 2 + 10, 2 + 10, 2], rtol=1e-5)
    wider = scores.interval_score(np.zeros(1), np.full(1, 2.0), np.array([3.0]), level=0.9)
    np.testing.assert_allclose(wider, 2 + 20, rtol=1e-5)
    assert (
        scores.interval_score(np.zeros((1, 1)), np.ones((1, 1)), np.ones((1, 1)), level=0.5, reduction="none").ndim == 2
    )


def test_pinball_by_hand_and_its_minimum():
    got = scores.pinball(np.zeros(3), np.array([1.0, -1.0, 0.0]), level=0.9, reduction="none")
    np.testing.assert_allclose(got, [0.9, 0.1, 0], rtol=1e-5)
    targets = np.random.default_rng(0).normal(size=2001).astype(np.float32)
    mean_at = lambda q: scores.pinball(np.full(2001, q, np.float32), targets, level=0.3)
    at = np.quantile(targets, 0.3)
    assert mean_at(at) < min(mean_at(at - 0.05), mean_at(at + 0.05))
    slope = jax.jit(jax.grad(lambda q: scores.pinball(q, targets[:2], level=0.3)))(jnp.array([-9.0, 9.0]))
    np.testing.assert_allclose(slope, [-0.15, 0.35], rtol=1e-5)


def test_dawid_sebastiani_by_hand():
    samples, targets = _vectors((5, 7))
    mean, variance = np.float64(samples).mean(0), np.float64(samples).var(0, ddof=1)
    want = (targets - mean) ** 2 / variance + np.log(variance)
    np.testing.assert_allclose(scores.dawid_sebastiani(samples, targets, reduction="none"), want, rtol=1e-4)
    biased = (targets - mean) ** 2 / samples.var(0) + np.log(samples.var(0))
    assert not np.allclose(biased, want, rtol=1e-2)
    gaussian = scores.nll_gaussian(mean.astype(np.float32), variance.astype(np.float32), targets, reduction="none")
    np.testing.assert_allclose(2 * gaussian - np.log(2 * np.pi), want, rtol=1e-4, atol=1e-5)


def test_a_large_offset_costs_no_precision():
    samples, targets = _vectors((64, 7))
    samples, targets = samples + np.float32(1e4), targets + np.float32(1e4)
    mean, variance = np.float64(samples).mean(0), np.float64(samples).var(0, ddof=1)
    want = (targets - mean) ** 2 / variance + np.log(variance)
    np.testing.assert_allclose(scores.dawid_sebastiani(samples, targets, reduction="none"), want, rtol=1e-5, atol=1e-5)
    rounded = (targets - samples.mean(0)) ** 2 / variance + np.log(variance)
    assert not np.allclose(rounded, want, rtol=1e-5, atol=1e-5)
    careless = (samples**2).mean(0) - samples.mean(0) ** 2
    assert np.abs(careless / variance - 1).max() > 0.5


def test_ranked_probability_by_hand():
    logits = np.log(np.array([[[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]], np.float32))
    rows = scores.ranked_probability(logits, np.array([0, 2]), reduction="none")
    np.testing.assert_allclose(rows, [0.5**2 + 0.2**2, 0.5**2 + 0.8**2], rtol=1e-5)
    swapped = scores.ranked_probability(logits[..., ::-1], np.array([0, 2]), reduction="none")
    assert not np.allclose(swapped, rows, rtol=1e-2)
    traced = jax.jit(lambda y: scores.ranked_probability(logits, y, reduction="none"))(np.array([0, 5]))
    np.testing.assert_allclose(traced, [rows[0], np.nan], rtol=1e-5)


def test_intervals_without_an_end_have_an_infinite_score():
    inf = np.inf
    ends = np.array([(-inf, 1), (0, inf), (-inf, inf), (inf, inf), (0, 1), (0, 1), (-inf, np.nan), (0, inf), (0, 1)])
    targets = np.array([0, 3, 5, 0, inf, -inf, 1, np.nan, 0.5])
    got = scores.interval_score(*ends.T, targets, level=0.8, reduction="none")
    np.testing.assert_array_equal(got, [inf] * 6 + [np.nan] * 2 + [1])
    assert scores.interval_score(*ends[:3].T, targets[:3], level=0.8) == inf
    # What few held-out rows give.
    with pytest.warns(UserWarning, match="too few rows"):
        fitted = conformal.split(np.zeros(3), np.ones(3), level=0.9)
    assert scores.interval_score(*fitted(np.zeros(2)), np.zeros(2), level=0.9) == inf
    gradient = jax.grad(lambda low: scores.interval_score(low, np.ones(2), np.full(2, 0.5), level=0.8))
    np.testing.assert_array_equal(gradient(np.array([-inf, 0.0])), [0, -0.5])
