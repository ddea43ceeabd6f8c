import functools

import jax
import jax.numpy as jnp
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


def test_integral_of_the_weighted_square():
    """The definition, on a grid, of weighted members and a weight that is no indicator."""
    members = np.array([1, 2, 0, 1, 3, 1]) / 8
    grid = np.linspace(-6, 6, 40_001)
    below = np.sum(members[:, None, None] * (SAMPLES[:, :5, None] <= grid), axis=0)
    square = (below - (TARGETS[:5, None] <= grid)) ** 2
    weight = 1 / (1 + np.exp(-2 * grid))
    got = SCORE(chaining=lambda z: jax.nn.softplus(2 * z) / 2, weights=members, reduction="none")[:5]
    np.testing.assert_allclose(got, np.trapezoid(weight * square, grid, axis=-1), atol=1e-3)
    assert not np.allclose(got, np.trapezoid(square, grid, axis=-1), atol=1e-2)


def test_parts_add_up():
    whole = scores.crps(SAMPLES, TARGETS, reduction="none")
    parts = SCORE(upper=0.2, reduction="none") + SCORE(lower=0.2, reduction="none")
    np.testing.assert_allclose(parts, whole, rtol=1e-4, atol=1e-6)


def test_thresholds_of_each_row():
    ends = np.linspace(-1, 1, 40)
    got = SCORE(lower=ends, reduction="none")
    want = [SCORE(lower=end, reduction="none")[i] for i, end in ((0, -1.0), (39, 1.0))]
    np.testing.assert_allclose(got[np.array([0, 39])], want, rtol=1e-6)


def test_rows_that_do_not_count_have_no_part_in_the_gradient():
    targets, mask = np.abs(TARGETS) + 1, np.arange(40) > 3
    samples = np.where(mask, np.abs(SAMPLES) + 1, np.nan)
    score = lambda x: scores.threshold_weighted_crps(x, targets, chaining=jnp.log, row_weights=mask)
    value, slope = jax.jit(jax.value_and_grad(score))(samples)
    assert np.isfinite(slope).all()
    assert np.isfinite(value)
    assert not slope[:, :4].any()
    traced = jax.jit(lambda end: SCORE(lower=end))
    np.testing.assert_allclose(traced(0.3), SCORE(lower=0.3), rtol=1e-6)


@pytest.mark.usefixtures("unhooked")
def test_messages():
    cases = [
        ({}, ValueError, "needs thresholds or `chaining`.\n  got neither(?s:.)*`scores.crps`"),
        ({"lower": 0.0, "chaining": jnp.abs}, ValueError, "thresholds or `chaining`.\n  got both"),
        ({"lower": 1.0, "upper": 0.0}, ValueError, "`lower` at or below `upper`.\n  got `lower` 1.0"),
        ({"lower": np.zeros(3)}, ValueError, r"`lower` as one number, or one per row.\n  expected \(\) or \(40,\)"),
        ({"lower": np.nan}, ValueError, "`lower` without NaN"),
        ({"upper": "high"}, TypeError, "`upper` as an array of numbers"),
        ({"chaining": 3.0}, TypeError, "`chaining` to be a function"),
        ({"chaining": jnp.sum}, ValueError, r"`chaining` that returns a number for each value.\n  got shape \(\)"),
        ({"lower": 0.0, "estimator": "fair", "weights": np.ones(6)}, ValueError, "equally weighted members"),
    ]
    for options, error, message in cases:
        with pytest.raises(error, match=message):
            SCORE(**options)
