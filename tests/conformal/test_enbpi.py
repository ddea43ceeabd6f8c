"""EnbPI compared with loops over rows, NumPy's quantiles, and series whose noise changes."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble import conformal, resample

RNG = np.random.default_rng(0)
ROWS, NEW, MEMBERS = 40, 12, 6
TARGETS = RNG.normal(size=ROWS + NEW).astype(np.float32)
PREDICTIONS = (TARGETS + RNG.exponential(size=(MEMBERS, ROWS + NEW)) + RNG.normal(size=(MEMBERS, 1))).astype(np.float32)
DRAWN = resample.bootstrap(ROWS, MEMBERS, key=jax.random.key(0))
OLD = slice(0, ROWS)


def _fit(level, weights=None, mask=None, predictions=PREDICTIONS, targets=TARGETS):
    held_out = resample.out_of_bag_mean(predictions[:, OLD], DRAWN, weights=weights).mean
    return conformal.enbpi(held_out, targets[OLD], DRAWN, level=level, weights=weights, row_weights=mask)


def _loop(weights, kept):
    """Residuals of rows that some member held out, and the mean over these rows of the out-of-bag mean."""
    unseen = np.asarray(resample.out_of_bag(DRAWN, ROWS))
    residuals, centres = [], []
    for i in np.flatnonzero(kept):
        members = np.flatnonzero(unseen[:, i] & (weights > 0))
        if members.size:
            own = weights[members] / weights[members].sum()
            residuals.append(TARGETS[i] - own @ np.float64(PREDICTIONS[members, i]))
            centres.append(own @ np.float64(PREDICTIONS[members, ROWS:]))
    return np.array(residuals), np.mean(centres, axis=0)


def _shortest(residuals, level):
    """The shortest of the intervals from the b-quantile to the (1 - a + b)-quantile, over a fine grid of b."""
    n = len(residuals)
    b = np.unique(np.concatenate([np.arange(1, 20 * n) / (20 * n), np.arange(n) / n + 1e-9]))
    b = b[b <= 1 - level]
    low, high = (np.quantile(residuals, q, method="inverted_cdf") for q in (b, np.minimum(level + b, 1)))
    best = np.argmin(high - low)
    return low[best], high[best]


@pytest.mark.parametrize("level", [0.5, 0.77, 0.9])
def test_is_the_loop(level):
    for weights, kept in [(None, None), (np.array([1.0, 2, 0, 1, 1, 3]), np.arange(ROWS) % 5 > 0)]:
        residuals, centre = _loop(
            np.ones(MEMBERS) if weights is None else weights, np.ones(ROWS, bool) if kept is None else kept
        )
        lower, upper = _fit(level, weights, kept)(PREDICTIONS[:, ROWS:])
        below, above = _shortest(residuals, level)
        np.testing.assert_allclose(lower, centre + below, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(upper, centre + above, rtol=1e-4, atol=1e-5)
        # The errors are skewed: a symmetric interval of residuals is wider.
        symmetric = np.quantile(np.abs(residuals), level, method="inverted_cdf")
        assert 2 * symmetric > 1.2 * (above - below)
        assert not np.allclose(lower, PREDICTIONS[:, ROWS:].mean(0) + below, atol=1e-3)


def test_rows_that_every_member_drew_do_not_count():
    drawn = np.asarray(DRAWN).copy()
    drawn[:, :2] = [7, 9]
    held_out = resample.out_of_bag_mean(PREDICTIONS[:, OLD], drawn).mean
    fitted = conformal.enbpi(held_out, TARGETS[OLD], drawn, level=0.8)
    assert not np.asarray(fitted.known)[[7, 9]].any()
    assert np.isfinite(jax.tree.leaves(fitted(PREDICTIONS[:, 0]))).all()
    np.testing.assert_allclose(jnp.sum(fitted.share), 1, rtol=1e-6)
    nothing = "`conformal.enbpi`: no row of the window has a target and an out-of-bag"
    with pytest.warns(UserWarning, match=nothing + ".* Train more"):
        fitted = conformal.enbpi(np.full(5, np.nan, np.float32), TARGETS[:5], np.ones((3, 5)), level=0.8)
    assert fitted(PREDICTIONS[:3, 0]).lower == -np.inf
    assert fitted(PREDICTIONS[:3, 0]).upper == np.inf
    held_out = resample.out_of_bag_mean(PREDICTIONS[:, OLD], DRAWN).mean
    with pytest.warns(UserWarning, match=nothing):  # the latest rows have no target
        conformal.enbpi(held_out, TARGETS[OLD], DRAWN, level=0.8, window=5, row_weights=np.arange(ROWS) < ROWS - 5)


def test_updates_slide_the_window():
    fitted = _fit(0.8)
    centre = np.asarray(fitted.share) @ PREDICTIONS
    want = np.concatenate([fitted.residuals.upper, TARGETS[ROWS:] - centre[ROWS:]])[-ROWS:]
    together = fitted.update(PREDICTIONS[:, ROWS:], TARGETS[ROWS:])
    np.testing.assert_allclose(together.residuals.upper, want, rtol=1e-5, atol=1e-6)

    def step(state, time):
        prediction, target = time
        return state.update(prediction, target), state(prediction)

    state, intervals = jax.lax.scan(step, fitted, (PREDICTIONS[:, ROWS:].T, TARGETS[ROWS:]))
    np.testing.assert_allclose(state.residuals.upper, want, rtol=1e-5, atol=1e-6)
    first = fitted(PREDICTIONS[:, ROWS])
    np.testing.assert_allclose([intervals.lower[0], intervals.upper[0]], first, rtol=1e-6)
    np.testing.assert_allclose(intervals.lower[-1], state(PREDICTIONS[:, -1]).lower, atol=0.5)
    held_out = resample.out_of_bag_mean(PREDICTIONS[:, OLD], DRAWN).mean
    short = conformal.enbpi(held_out, TARGETS[OLD], DRAWN, level=0.8, window=15)
    np.testing.assert_array_equal(short.residuals.upper, fitted.residuals.upper[-15:])
    np.testing.assert_array_equal(short.share, fitted.share)
    short = short.update(PREDICTIONS[:, ROWS:], TARGETS[ROWS:])
    np.testing.assert_array_equal(short.residuals.upper, together.residuals.upper[-15:])
    # More times than the window: the last ones.
    many = fitted.update(np.tile(PREDICTIONS, 2), np.tile(TARGETS, 2))
    np.testing.assert_allclose(many.residuals.upper, (np.tile(TARGETS - centre, 2))[-ROWS:], rtol=1e-4, atol=1e-5)


def test_times_without_a_target():
    fitted = _fit(0.8)
    known = np.arange(NEW) % 3 > 0
    spoilt = np.where(known, TARGETS[ROWS:], np.nan)
    got = fitted.update(np.where(known, PREDICTIONS[:, ROWS:], np.nan), spoilt, row_weights=known)
    np.testing.assert_array_equal(got.known[-NEW:], known)
    lower, upper = got(PREDICTIONS[:, 0])
    centre = np.asarray(fitted.share) @ PREDICTIONS[:, 0]
    ends = _shortest(np.asarray(got.residuals.upper)[np.asarray(got.known)], 0.8)
    np.testing.assert_allclose([lower - centre, upper - centre], ends, rtol=1e-4, atol=1e-5)
    one = fitted.update(PREDICTIONS[:, 0], np.float32(np.nan), row_weights=False)
    assert not one.known[-1]
    traced = jax.jit(lambda y: fitted.update(PREDICTIONS[:, ROWS:], y)(PREDICTIONS[:, 0]))(spoilt)
    assert np.isnan(jax.tree.leaves(traced)).all()
    with pytest.warns(UserWarning, match="`conformal.Enbpi.update`: no time of the window has a target; .* unbounded"):
        nothing = fitted.update(np.zeros((MEMBERS, ROWS), np.float32), np.zeros(ROWS), row_weights=np.zeros(ROWS, bool))
    np.testing.assert_array_equal(jax.tree.leaves(nothing(PREDICTIONS[:, 0])), [-np.inf, np.inf])


def test_coverage_of_a_series_whose_noise_grows(tmp_path):
    # An autoregression whose noise doubles and turns skewed; members know it up to a bias of their own.
    rng = np.random.default_rng(0)
    noise = np.where(np.arange(1600) < 400, rng.normal(size=1600), 2 * (rng.exponential(size=1600) - 1))
    y = np.zeros(1600)
    for t in range(1, 1600):
        y[t] = 0.7 * y[t - 1] + noise[t]
    at_times = (0.7 * np.roll(y, 1) + 0.1 * rng.normal(size=(10, 1))).astype(np.float32)
    y = y.astype(np.float32)
    rows = resample.bootstrap(200, 10, key=jax.random.key(1))
    held_out = resample.out_of_bag_mean(at_times[:, :200], rows).mean
    fitted = conformal.enbpi(held_out, y[:200], rows, level=0.8)

    def step(state, time):
        prediction, target = time
        low, high = state(prediction)
        return state.update(prediction, target), (low <= target) & (target <= high)

    state, covered = jax.jit(lambda *times: jax.lax.scan(step, fitted, times))(at_times[:, 200:].T, y[200:])
    # Asymptotic: the mean of 1200 outcomes, six standard errors, and some for a window of 200 that is fitted.
    limit = 6 * np.sqrt(0.16 / 1200) + 0.03
    assert abs(np.mean(np.asarray(covered)) - 0.8) < limit
    low, high = fitted(at_times[:, 400:])
    assert np.mean(np.asarray((low <= y[400:]) & (y[400:] <= high))) < 0.8 - limit
    ee.save(tmp_path / "state", state)
    assert eqx.tree_equal(
        ee.load(tmp_path / "state", jax.tree.map(lambda x: x & False if x.dtype == bool else 0 * x, state)), state
    )


@pytest.mark.usefixtures("unhooked")
def test_messages():
    fitted = _fit(0.8)
    with pytest.raises(
        ValueError, match="predictions and targets without NaN.\n  got 1 residuals that are NaN\nNo target"
    ):
        fitted.update(PREDICTIONS[:, 0], np.float32(np.nan))
    with pytest.raises(ValueError, match="expected 6 members, got 5"):
        fitted(PREDICTIONS[:5])
    with pytest.raises(
        ValueError, match=r"`predictions` \(members,\) or \(members, times\).\n  got shape \(6, 4, 13\)"
    ):
        fitted.update(PREDICTIONS.reshape(6, 4, 13), TARGETS.reshape(4, 13))
    with pytest.raises(ValueError, match="`row_weights` of zeros and ones.\n  got 2"):
        fitted.update(PREDICTIONS[:, 0], TARGETS[0], row_weights=2)
    with pytest.raises(ValueError, match="`held_out` predictions without NaN"):
        conformal.enbpi(np.full(ROWS, np.nan, np.float32), TARGETS[OLD], DRAWN, level=0.8)
