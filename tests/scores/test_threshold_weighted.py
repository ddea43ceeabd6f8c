import functools

import numpy as np
import pytest

from eqx_ensemble import scores

RNG = np.random.default_rng(0)
SAMPLES, TARGETS = RNG.normal(size=(6, 40)).astype(np.float32), RNG.normal(size=40).astype(np.float32)
SCORE = functools.partial(scores.threshold_weighted_crps, SAMPLES, TARGETS)


@pytest.mark.parametrize("estimator", ["nrg", "fair"])
@pytest.mark.parametrize("ends", [(0.3, None), (None, -0.2), (-0.5, 0.8)])
def test_scoringrules_agrees(ends, estimator):
    rules = pytest.importorskip("scoringrules")
    low, high = (-np.inf if ends[0] is None else ends[0]), (np.inf if ends[1] is None else ends[1])
    options = {"m_axis": 0, "estimator": estimator, "backend": "numpy"}
    want = rules.twcrps_ensemble(TARGETS, SAMPLES, low, high, **options)
    got = SCORE(lower=ends[0], upper=ends[1], estimator=estimator, reduction="none")
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)
    assert not np.allclose(got, scores.crps(SAMPLES, TARGETS, estimator=estimator, reduction="none"), atol=1e-2)


def test_parts_add_up():
    whole = scores.crps(SAMPLES, TARGETS, reduction="none")
    parts = SCORE(upper=0.2, reduction="none") + SCORE(lower=0.2, reduction="none")
    np.testing.assert_allclose(parts, whole, rtol=1e-4, atol=1e-6)


def test_integral_of_the_square_above_a_threshold():
    """The definition, on a grid, of weighted members."""
    members = np.array([1, 2, 0, 1, 3, 1]) / 8
    grid = np.linspace(0.3, 6, 40_001)
    below = np.sum(members[:, None, None] * (SAMPLES[:, :5, None] <= grid), axis=0)
    square = (below - (TARGETS[:5, None] <= grid)) ** 2
    got = SCORE(lower=0.3, weights=members, reduction="none")[:5]
    np.testing.assert_allclose(got, np.trapezoid(square, grid, axis=-1), atol=1e-3)
