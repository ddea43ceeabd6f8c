"""Quantiles and intervals: loops over rows, exact laws of coverage, rows that do not count, and messages."""

import equinox as eqx
import jax
import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble import conformal, resample, uncertainty

RNG = np.random.default_rng(0)
MASK = np.arange(99) % 4 > 0
SCORES = RNG.normal(size=99).astype(np.float32)
FEW = pytest.mark.filterwarnings("ignore:.*too few rows", "ignore:.*the share of rows")


def rank_of(level, count):
    return -(-(count + 1) * round(100 * level) // 100)


def at_rank(values, level):
    rank = rank_of(level, len(values))
    return np.sort(values)[rank - 1] if rank <= len(values) else np.inf


@FEW
@pytest.mark.parametrize("ties", [False, True])
def test_quantile_is_the_score_of_the_rank(ties):
    scores = np.round(SCORES, 1) if ties else SCORES
    groups = RNG.integers(0, 3, 99)
    spoilt = np.where(MASK, scores, np.nan)
    for level in (0.07, 0.29, 0.57, 0.9, 0.99):  # (n + 1) level is whole: floats round some of them up
        assert conformal.quantile(scores, level=level) == at_rank(scores, level)
        assert conformal.quantile(spoilt, level=level, row_weights=MASK) == at_rank(scores[MASK], level)
        got = conformal.quantile(spoilt, level=level, groups=np.where(MASK, groups, -1), num_groups=4, row_weights=MASK)
        want = [at_rank(scores[MASK & (groups == g)], level) for g in range(4)]
        np.testing.assert_array_equal(got, want)
        traced = jax.jit(lambda x, m, level=level: conformal.quantile(x, level=level, row_weights=m))
        assert traced(spoilt, MASK) == at_rank(scores[MASK], level)
    assert np.isnan(traced(spoilt, np.ones(99, bool)))


def test_coverage_of_split_follows_its_beta_binomial_law():
    stats = pytest.importorskip("scipy.stats")
    held_out, new, repeats = 29, 20, 4000
    y = RNG.normal(size=(repeats, held_out + new)).astype(np.float32)

    def covered(y):
        lower, upper = conformal.split(0 * y[:held_out], y[:held_out], level=0.8)(0 * y[held_out:])
        return ((lower <= y[held_out:]) & (y[held_out:] <= upper)).sum()

    counts, grid = np.asarray(jax.jit(jax.vmap(covered))(y)), np.arange(new + 1)
    limit = np.sqrt(np.log(2e6) / (2 * repeats))  # Dvoretzky, Kiefer, Wolfowitz: a false alarm in a million
    empirical = np.searchsorted(np.sort(counts), grid, side="right") / repeats
    distance = lambda k: np.abs(empirical - stats.betabinom(new, k, held_out + 1 - k).cdf(grid)).max()
    assert distance(24) < limit < min(distance(22), distance(26)) / 2


@FEW
@pytest.mark.parametrize("level", [0.5, 0.8, 0.99])
def test_intervals_are_those_of_the_definition(level):
    centre, scale = RNG.normal(size=99).astype(np.float32), np.exp(RNG.normal(size=99)).astype(np.float32)
    targets = centre + np.round(RNG.normal(size=99), 1)
    spoil = lambda x, value=np.nan: np.where(MASK, x, np.float32(value))
    fit = dict(level=level, row_weights=MASK)
    errors = abs(targets - centre)[MASK]
    radius = at_rank(errors, level)
    got = conformal.split(spoil(centre), spoil(targets), **fit)(centre)
    np.testing.assert_allclose(got, (centre - radius, centre + radius), rtol=1e-5, atol=1e-5)
    factor = at_rank(errors / scale[MASK], level)
    got = conformal.split(spoil(centre), targets, scale=spoil(scale, -1), **fit)(centre, scale)
    np.testing.assert_allclose(got, (centre - factor * scale, centre + factor * scale), rtol=1e-5, atol=1e-5)
    low, high = centre - np.float32(0.3), centre + np.float32(0.1)
    below, above = (low - targets)[MASK], (targets - high)[MASK]
    margin = at_rank(np.maximum(below, above), level)
    got = conformal.cqr(spoil(low), spoil(high), targets, **fit)(low, high)
    np.testing.assert_allclose(got, (low - margin, high + margin), rtol=1e-5, atol=1e-5)
    each = [at_rank(x, (1 + level) / 2) if level < 0.9 else np.inf for x in (below, above)]
    got = conformal.cqr(low, high, targets, ends="each", **fit)(low, high)
    np.testing.assert_allclose(got, (low - each[0], high + each[1]), rtol=1e-5, atol=1e-5)


def test_ends_that_cross_meet():
    narrow = conformal.cqr(np.full(9, -5.0), np.full(9, 5.0), np.zeros(9), level=0.8)
    np.testing.assert_allclose(narrow(np.float32([0, 1]), np.float32([1, 0])), [[0.5, 0.5], [0.5, 0.5]])


def test_an_offset_of_targets_in_float64_is_not_lost():
    targets = 1e8 + np.arange(1.0, 10)
    assert conformal.split(np.full(9, 1e8), targets, level=0.8).radius == 8


def _loop(predictions, new, unseen, targets, level, weights, kept):
    """One row after another: the members that were not trained on it predict it and the new rows."""
    lower, upper = [], []
    for i in np.flatnonzero(kept):
        members = np.flatnonzero(unseen[:, i] & (weights > 0))
        if members.size == 0:
            lower, upper = [*lower, np.full(new.shape[1], -np.inf)], [*upper, np.full(new.shape[1], np.inf)]
            continue
        own = weights[members] / weights[members].sum()
        residual = abs(targets[i] - own @ np.float64(predictions[members, i]))
        centre = own @ np.float64(new[members])
        lower, upper = [*lower, centre - residual], [*upper, centre + residual]
    n, rank = len(lower), rank_of(level, len(lower))
    return np.sort(lower, axis=0)[n - rank], np.sort(upper, axis=0)[rank - 1]


@pytest.mark.parametrize("level", [0.5, 0.8])
def test_jackknife_plus_is_the_loop(level):
    rows, num_new = 30, 8
    targets, kept = RNG.normal(size=rows).astype(np.float32), np.arange(rows) % 5 > 0
    draw = lambda m: ((targets + RNG.normal(size=(m, rows))).astype(np.float32), RNG.normal(size=(m, num_new)))
    folds = resample.folds(rows, 5, key=jax.random.key(0))
    at_rows, new = draw(5)
    new = new.astype(np.float32)
    held_out = resample.held_out_mean(at_rows, folds.in_test).mean
    fitted = conformal.jackknife_plus(held_out, targets, folds.in_test, level=level)
    want = _loop(at_rows, new, np.asarray(folds.in_test), targets, level, np.ones(5), kept | True)
    np.testing.assert_allclose(fitted(new), want, rtol=1e-5, atol=1e-5)
    twice = fitted(np.concatenate([new, new]).reshape(10, 2, 4))  # two members of each fold
    np.testing.assert_allclose(np.reshape(twice, (2, -1)), want, rtol=1e-5, atol=1e-5)
    drawn = resample.bootstrap(rows, 12, key=jax.random.key(1))
    weights = RNG.uniform(size=12) * (np.arange(12) != 3)
    at_rows, new = draw(12)
    at_rows[3] = new[3] = np.nan
    unseen = np.asarray(resample.out_of_bag(drawn, rows))
    held_out = resample.held_out_mean(at_rows, unseen, weights=weights).mean
    fitted = conformal.jackknife_plus(
        np.where(kept, held_out, np.nan), targets, unseen, level=level, weights=weights, row_weights=kept
    )
    want = _loop(at_rows, new, unseen, targets, level, weights, kept)
    np.testing.assert_allclose(fitted(new.astype(np.float32)), want, rtol=1e-4, atol=1e-5)
    offset = conformal.jackknife_plus(held_out + 1e4, targets + 1e4, unseen, level=level, weights=weights)
    want = _loop(at_rows, new, unseen, targets, level, weights, kept | True)
    np.testing.assert_allclose(np.subtract(offset(np.float32(new + 1e4)), 1e4), want, atol=5e-3)


def test_weighted_quantile_is_the_loop():
    ratios, new = RNG.gamma(1, size=99), 10 * RNG.gamma(1, size=(2, 5))
    order = np.argsort(SCORES[MASK])
    reached = np.cumsum(ratios[MASK][order])
    for level in (0.5, 0.8, 0.95):
        index = np.searchsorted(reached, level * (1 - 1e-9) * (reached[-1] + new))
        want = np.append(SCORES[MASK][order], np.inf)[index]
        spoilt = np.where(MASK, SCORES, np.inf)
        got = conformal.weighted_quantile(spoilt, np.where(MASK, ratios, 0), new, level=level)
        np.testing.assert_array_equal(got, want)
        same = conformal.weighted_quantile(SCORES, np.full(99, 0.3), np.full(2, 0.3), level=level)
        np.testing.assert_array_equal(same, [conformal.quantile(SCORES, level=level)] * 2)


def test_the_expected_loss_is_controlled():
    repeats, n, risk = 2000, 19, 0.2
    scores, grid = RNG.uniform(size=(repeats, n, 4)), np.linspace(0, 1, 101)
    losses = lambda scores: (scores[..., None] > grid[None, None]).mean(1).astype(np.float32)
    control = jax.jit(jax.vmap(lambda scores: conformal.risk_control(losses(scores), grid, risk=risk)))
    expected = 1 - np.asarray(control(scores.astype(np.float32)))  # the risk at a threshold
    assert risk - 0.05 < expected.mean() < risk + 6 * expected.std() / np.sqrt(repeats)


def test_risk_control_is_the_definition():
    losses = np.sort(RNG.uniform(size=(99, 8)), axis=1)[:, ::-1].astype(np.float32)
    grid, spoilt = np.arange(8, dtype=np.float32), np.where(MASK[:, None], losses, np.nan)
    for risk in (0.3, 0.5, 0.7):
        fits = (losses[MASK].sum(0) + 1) / (MASK.sum() + 1) <= risk
        want = grid[fits].min()
        assert conformal.risk_control(spoilt, grid, risk=risk, row_weights=MASK) == want
        assert conformal.risk_control(spoilt[:, ::-1], grid[::-1], risk=risk, row_weights=MASK) == want
    with pytest.warns(UserWarning, match="no threshold has a risk of 0.01 or less; the result is infinite"):
        assert conformal.risk_control(losses, grid, risk=0.01) == np.inf
    steps = (SCORES[:, None] > np.sort(SCORES)).astype(np.float32)  # missed below the score
    assert conformal.risk_control(steps, np.sort(SCORES), risk=0.2) == conformal.quantile(SCORES, level=0.8)
    with pytest.raises(ValueError, match="`losses` of at most `bound`, 0.5, without NaN"):
        conformal.risk_control(losses, grid, risk=0.3, bound=0.5)
    with pytest.raises(ValueError, match="a `risk` between 0 and `bound`"):
        conformal.risk_control(losses, grid, risk=1.3)


def test_fitted_ones_are_saved_and_called_inside_jit(tmp_path):
    fitted = conformal.split(SCORES, SCORES + 1, level=0.9)
    np.testing.assert_array_equal(jax.jit(lambda f, x: f(x))(fitted, SCORES), fitted(SCORES))
    ee.save(tmp_path / "fitted", fitted)
    assert eqx.tree_equal(ee.load(tmp_path / "fitted", conformal.split(SCORES, SCORES, level=0.9)), fitted)
    assert isinstance(fitted(SCORES.reshape(9, 11)), uncertainty.Interval)


@pytest.mark.usefixtures("unhooked")
def test_messages():
    few = r"`conformal.split`: there are too few rows for level 0.95; .*\nHold out 19 rows or more"
    with pytest.warns(UserWarning, match=few):
        assert conformal.split(SCORES[:18], SCORES[:18], level=0.95).radius == np.inf
    with pytest.warns(UserWarning, match="1 of 2 groups, the first is 1, have too few rows for level 0.9"):
        conformal.quantile(SCORES, level=0.9, groups=(np.arange(99) < 5).astype(int), num_groups=2)
    with pytest.warns(UserWarning, match="`level=0.1`, the share of rows to cover(.|\n)*pass `level=0.9`"):
        conformal.split(np.zeros(30), np.arange(30.0), level=0.1)
    with pytest.warns(UserWarning, match="train more members"):
        conformal.jackknife_plus(SCORES, SCORES, np.zeros((2, 99), bool), level=0.9)
    with pytest.raises(ValueError, match="`conformal.split` needs `targets` without NaN.*\n  got nan at index"):
        conformal.split(SCORES, np.where(MASK, SCORES, np.nan), level=0.9)
    with pytest.raises(ValueError, match="a `level` between 0 and 1"):
        conformal.quantile(SCORES, level=90)
    with pytest.raises(ValueError, match="a `scale` above zero"):
        conformal.split(SCORES, SCORES, scale=0 * SCORES, level=0.9)
    with pytest.raises(ValueError, match="`held_out` predictions without NaN in rows that a member held out"):
        conformal.jackknife_plus(np.where(MASK, SCORES, np.nan), SCORES, np.ones((2, 99), bool), level=0.9)
    fitted = conformal.jackknife_plus(SCORES, SCORES, np.ones((2, 99), bool), level=0.9)
    with pytest.raises(ValueError, match="equally many members for each fold.\n  fitted on 2, got 3"):
        fitted(np.zeros((3, 4), np.float32))
