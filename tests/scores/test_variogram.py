import jax
import numpy as np
import pytest

from eqx_ensemble import scores

pytest.importorskip("scoringrules", reason="needs scoringrules")

RNG = np.random.default_rng(0)
SAMPLES, TARGETS = RNG.normal(size=(4, 7, 3)).astype(np.float32), RNG.normal(size=(7, 3)).astype(np.float32)
MEMBERS = np.array([1, 0, 2, 1]) / 4
PAIRS = np.array([[0, 1, 2], [1, 0, 0.5], [2, 0.5, 0]])


def by_hand(members, pairs, order):
    """One pair of outputs after another."""
    total = np.zeros(7)
    for i in range(3):
        for j in range(3):
            predicted = sum(w * abs(x[:, i] - x[:, j]) ** order for w, x in zip(members, SAMPLES, strict=True))
            total += pairs[i, j] * (abs(TARGETS[:, i] - TARGETS[:, j]) ** order - predicted) ** 2
    return total


@pytest.mark.parametrize("order", [0.5, 2])
def test_pairs_by_hand(order):
    got = scores.variogram_score(SAMPLES, TARGETS, order=order, reduction="none")
    want = by_hand(np.full(4, 0.25), np.ones((3, 3)), order)
    np.testing.assert_allclose(got, want, rtol=1e-4)
    got = scores.variogram_score(SAMPLES, TARGETS, order=order, weights=MEMBERS, pair_weights=PAIRS, reduction="none")
    np.testing.assert_allclose(got, by_hand(MEMBERS, PAIRS, order), rtol=1e-4)
    assert not np.allclose(got, want, rtol=1e-2)


def test_scoringrules_agrees_on_the_fair_estimator():
    import scoringrules

    want = scoringrules.vs_ensemble(TARGETS, SAMPLES, m_axis=0, estimator="fair", backend="numpy")
    got = scores.variogram_score(SAMPLES, TARGETS, estimator="fair", reduction="none")
    np.testing.assert_allclose(got, want, rtol=1e-4)
    rows = np.arange(7.0)
    got = scores.variogram_score(SAMPLES, TARGETS, estimator="fair", row_weights=rows)
    np.testing.assert_allclose(got, np.average(want, weights=rows), rtol=1e-4)


def test_an_offset_of_all_outputs_is_not_seen():
    moved = scores.variogram_score(SAMPLES + 8, TARGETS)
    np.testing.assert_allclose(moved, scores.variogram_score(SAMPLES, TARGETS), rtol=1e-4)
    tilted = scores.variogram_score(SAMPLES + 8 * np.arange(3, dtype=np.float32), TARGETS)
    assert tilted > 2 * moved


def test_the_gradient_is_finite_where_outputs_are_equal():
    samples = SAMPLES.copy()
    samples[0, 0, 1] = samples[0, 0, 0]
    assert np.isfinite(jax.grad(lambda x: scores.variogram_score(x, TARGETS))(samples)).all()
