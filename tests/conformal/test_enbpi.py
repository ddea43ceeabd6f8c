"""EnbPI compared with loops over rows, NumPy's quantiles, and a series whose noise changes."""

import equinox as eqx
import jax
import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble import conformal, resample

RNG = np.random.default_rng(0)
ROWS, NEW, MEMBERS = 40, 12, 6
TARGETS = RNG.normal(size=ROWS + NEW).astype(np.float32)
PREDICTIONS = (TARGETS + RNG.exponential(size=(MEMBERS, ROWS + NEW)) + RNG.normal(size=(MEMBERS, 1))).astype(np.float32)
UNSEEN = np.asarray(resample.out_of_bag(resample.bootstrap(ROWS, MEMBERS, key=jax.random.key(0)), ROWS))
KNOWN = np.arange(ROWS) % 5 > 0


def _loop(weights):
    """Residuals of rows that some member held out, and the mean over these rows of the out-of-bag mean."""
    held_out, residuals, centres = np.full(ROWS, np.nan, np.float32), [], []
    for i in range(ROWS):
        members = np.flatnonzero(UNSEEN[:, i] & (weights > 0))
        if members.size:
            own = weights[members] / weights[members].sum()
            held_out[i] = own @ np.float64(PREDICTIONS[members, i])
            if KNOWN[i]:
                residuals.append(TARGETS[i] - own @ np.float64(PREDICTIONS[members, i]))
                centres.append(own @ np.float64(PREDICTIONS[members, ROWS:]))
    return held_out, np.array(residuals), np.mean(centres, axis=0)


def _shortest(residuals, level):
    """The shortest of the intervals from the b-quantile to the (1 - a + b)-quantile, over a fine grid of b."""
    n = len(residuals)
    b = np.unique(np.concatenate([np.arange(1, 20 * n) / (20 * n), np.arange(n) / n + 1e-9]))
    b = b[b <= 1 - level]
    low, high = (np.quantile(residuals, q, method="inverted_cdf") for q in (b, np.minimum(level + b, 1)))
    best = np.argmin(high - low)
    return low[best], high[best]


@pytest.mark.parametrize("level", [0.5, 0.77, 0.9])
def test_is_the_loop_and_skips_times_without_a_target(level):
    weights = np.array([1.0, 2, 0, 1, 1, 3])
    held_out, residuals, centre = _loop(weights)
    targets = np.where(KNOWN, TARGETS[:ROWS], np.nan)
    fitted = conformal.enbpi(held_out, targets, UNSEEN, level=level, weights=weights)
    below, above = _shortest(residuals, level)
    np.testing.assert_allclose(fitted(PREDICTIONS[:, ROWS:]), (centre + below, centre + above), rtol=1e-4, atol=1e-5)


def test_updates_slide_the_window(tmp_path):
    held_out, _, _ = _loop(np.ones(MEMBERS))
    fitted = conformal.enbpi(held_out, TARGETS[:ROWS], UNSEEN, level=0.8, window=20)
    new, at = PREDICTIONS[:, ROWS:], TARGETS[ROWS:]
    together = fitted.update(new, at)
    one = fitted
    for i in range(NEW):
        one = one.update(new[:, i], at[i])
    _, scanned = jax.lax.scan(lambda s, xy: (s.update(*xy), s(xy[0])), fitted, (new.T, at))
    np.testing.assert_allclose(one.residuals, together.residuals, rtol=1e-4, atol=1e-5)
    want = np.append(fitted.residuals[NEW:], at - np.asarray(fitted.share) @ new)
    np.testing.assert_allclose(together.residuals, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(scanned.lower[0], fitted(new[:, 0]).lower, rtol=1e-5)
    missing = fitted.update(new[:, 0], np.nan)
    assert np.isnan(missing.residuals[-1])
    assert np.isfinite(missing(new)).all()
    ee.save(tmp_path / "state", together)
    assert eqx.tree_equal(ee.load(tmp_path / "state", fitted), together)


def test_coverage_of_a_series_whose_noise_grows():
    rng = np.random.default_rng(0)
    times, members = 900, 4
    noise = rng.normal(size=times) * np.where(np.arange(times) < 300, 1, 4)
    y, unseen = noise.astype(np.float32), rng.uniform(size=(members, 200)) < 0.4
    predictions = np.zeros((members, times), np.float32)
    start = conformal.enbpi(predictions[0, :200], y[:200], unseen, level=0.9, window=100)
    _, (lower, upper) = jax.lax.scan(lambda s, xy: (s.update(*xy), s(xy[0])), start, (predictions[:, 200:].T, y[200:]))
    late = slice(200, None)  # the window has only new noise
    inside = lambda low, high: np.mean((low <= y[200:][late]) & (y[200:][late] <= high))
    assert 0.85 < inside(lower[late], upper[late]) < 0.95
    assert inside(*start(predictions[:, 200:][:, late])) < 0.6


@pytest.mark.usefixtures("unhooked")
def test_messages():
    held_out = np.zeros(ROWS, np.float32)
    with pytest.warns(UserWarning, match="`conformal.enbpi`: no time of the window has a target"):
        fitted = conformal.enbpi(held_out, TARGETS[:ROWS], UNSEEN & False, level=0.8)
    np.testing.assert_array_equal(np.isinf(fitted(PREDICTIONS)), True)
    with pytest.raises(ValueError, match="the members that it was fitted on.\n  expected 6 members, got 5"):
        fitted(PREDICTIONS[1:])
    with pytest.raises(ValueError, match="`conformal.Enbpi.update` needs `predictions` "):
        fitted.update(PREDICTIONS.reshape(MEMBERS, 4, 13), TARGETS.reshape(4, 13))
