"""Split-conformal intervals, with a scale, and conformalised quantile regression."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble import conformal, resample, scores

stats = pytest.importorskip("scipy.stats", reason="the exact laws are scipy's")

RNG = np.random.default_rng(0)
CENTRE, TARGETS = RNG.normal(size=49).astype(np.float32), RNG.normal(size=49).astype(np.float32)
SCALE = RNG.uniform(0.5, 2, size=49).astype(np.float32)


def _ranked(values, level):
    return np.sort(values)[-(-(len(values) + 1) * round(100 * level) // 100) - 1]


def test_split_is_the_definition():
    fitted = conformal.split(CENTRE, TARGETS, level=0.9)
    want = _ranked(np.abs(TARGETS - CENTRE), 0.9)
    np.testing.assert_allclose(fitted.radius, want, rtol=1e-6)
    lower, upper = fitted(np.zeros((2, 3), np.float32))
    np.testing.assert_allclose(upper, np.full((2, 3), want), rtol=1e-6)
    np.testing.assert_allclose(lower, -upper)
    assert abs(np.quantile(np.abs(TARGETS - CENTRE), 0.9) / want - 1) > 1e-3


def test_normalised_is_the_definition():
    fitted = conformal.normalised(CENTRE, SCALE, TARGETS, level=0.9)
    want = _ranked(np.abs(TARGETS - CENTRE) / SCALE, 0.9)
    np.testing.assert_allclose(fitted.factor, want, rtol=1e-6)
    lower, upper = fitted(CENTRE, SCALE)
    np.testing.assert_allclose(upper - lower, 2 * want * SCALE, rtol=1e-5)
    plain = conformal.normalised(CENTRE, np.full_like(SCALE, 3), TARGETS, level=0.9)
    radius = conformal.split(CENTRE, TARGETS, level=0.9).radius
    np.testing.assert_allclose(3 * plain.factor, radius, rtol=1e-6)
    assert abs(fitted.factor / radius - 1) > 1e-2


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_cqr_is_the_definition(level):
    low, high = CENTRE - SCALE, CENTRE + 0.5 * SCALE
    fitted = conformal.cqr(low, high, TARGETS, level=level)
    want = _ranked(np.maximum(low - TARGETS, TARGETS - high), level)
    np.testing.assert_allclose([fitted.below, fitted.above], [want, want], rtol=1e-5)
    each = conformal.cqr(low, high, TARGETS, level=level, ends="each")
    np.testing.assert_allclose(each.below, _ranked(low - TARGETS, (1 + level) / 2), rtol=1e-5)
    np.testing.assert_allclose(each.above, _ranked(TARGETS - high, (1 + level) / 2), rtol=1e-5)
    assert abs(each.below - each.above) > 1e-2


def test_ends_that_would_cross_meet():
    # Intervals far too wide are narrowed; one that is narrower than that becomes a point.
    wide = conformal.cqr(CENTRE - 10, CENTRE + 10, CENTRE, level=0.5)
    np.testing.assert_allclose([wide.below, wide.above], [-10, -10], rtol=1e-6)
    lower, upper = wide(np.array([0.0, 0.0]), np.array([4.0, 30.0]))
    np.testing.assert_allclose(lower, [2, 10], rtol=1e-6)
    np.testing.assert_allclose(upper, [2, 20], rtol=1e-6)
    assert scores.coverage(lower, upper, np.array([2.0, 15.0])) == 1


# How intervals are fitted on held-out rows and applied to new ones, of x (2, n) and y (n,).
METHODS = {
    "split": (lambda x, y: conformal.split(x[0], y, level=0.8), lambda fitted, x: fitted(x[0])),
    "normalised": (lambda x, y: conformal.normalised(x[0], x[1], y, level=0.8), lambda fitted, x: fitted(x[0], x[1])),
    "cqr": (lambda x, y: conformal.cqr(x[0] - x[1], x[0], y, level=0.8), lambda fitted, x: fitted(x[0] - x[1], x[0])),
}


@pytest.mark.parametrize("name", METHODS)
def test_coverage_follows_its_beta_binomial_law(name):
    # Of 29 held-out and 20 new rows; the model is bad, the noise skewed and of different sizes.
    fit, apply = METHODS[name]
    held_out, new, repeats = 29, 20, 6000
    rng = np.random.default_rng(0)
    x = np.stack([rng.normal(size=(repeats, 49)), rng.uniform(0.3, 3, size=(repeats, 49))], axis=1).astype(np.float32)
    y = (x[:, 0] ** 2 + rng.gamma(1, x[:, 1])).astype(np.float32)

    def covered(x, y):
        lower, upper = apply(fit(x[:, :held_out], y[:held_out]), x[:, held_out:])
        return (lower <= y[held_out:]) & (y[held_out:] <= upper)

    counts = np.asarray(jax.jit(jax.vmap(covered))(x, y)).sum(-1)
    limit = np.sqrt(np.log(2e6) / (2 * repeats))
    grid = np.arange(new + 1)
    empirical = np.searchsorted(np.sort(counts), grid, side="right") / repeats
    distance = lambda k: np.abs(empirical - stats.betabinom(new, k, held_out + 1 - k).cdf(grid)).max()
    assert distance(24) < limit
    assert min(distance(23), distance(25)) > 2 * limit
    assert np.abs(empirical - stats.binom(new, 0.8).cdf(grid)).max() > 1.5 * limit


ROWS = 60
COUNTS = np.tile(np.arange(4, dtype=np.float32), ROWS // 4)
BAGS = resample.bootstrap(ROWS, 8, key=jax.random.key(1))
FOLDS = resample.folds(ROWS, 5, key=jax.random.key(0))


def _of_bags(x, scale, y):
    """Members predict different constants, and so do their means of each row."""
    members = x + scale * np.linspace(-1, 1, 8, dtype=np.float32)[:, None]
    held_out = resample.out_of_bag_mean(members, BAGS).mean
    return conformal.jackknife_plus_after_bootstrap(held_out, y, BAGS, level=0.7)(members)


# Each with predictions, scales and targets of the rows that it is fitted on and called with.
ON_ITS_ROWS = {
    "split": lambda x, scale, y: conformal.split(x, y, level=0.7)(x),
    "normalised": lambda x, scale, y: jax.jit(conformal.normalised(x, scale, y, level=0.7).__call__)(x, scale),
    "cqr": lambda x, scale, y: conformal.cqr(x - scale, x, y, level=0.7)(x - scale, x),
    "cv_plus": lambda x, scale, y: conformal.cv_plus(x, y, FOLDS, level=0.7)(np.tile(x, (5, 1))),
    "jackknife_plus": _of_bags,
}


@pytest.mark.parametrize("name", ON_ITS_ROWS)
def test_no_end_falls_short_of_the_target_that_set_it(name):
    # A quarter of the rows has that target: an end that is rounded inwards loses all of these.
    rng = np.random.default_rng(0)
    for unit in (1, 0.1, 0.3, 7) * 3:
        y = np.float32(unit) * COUNTS
        x, scale = np.float32(rng.normal() * 10 ** rng.uniform(-1, 4)), np.float32(rng.uniform(0.1, 3))
        lower, upper = ON_ITS_ROWS[name](np.full(ROWS, x), np.full(ROWS, scale), y)
        assert ((lower <= y) & (y <= upper)).mean() >= 0.7, (x, scale, unit)


def test_masks():
    mask = np.abs(TARGETS - CENTRE) < 1.5
    spoilt = np.where(mask, CENTRE, np.nan)
    bad_scale = np.where(mask, SCALE, -1)
    for got, want in (
        (
            conformal.split(spoilt, TARGETS, level=0.8, row_weights=mask),
            conformal.split(CENTRE[mask], TARGETS[mask], level=0.8),
        ),
        (
            conformal.normalised(spoilt, bad_scale, TARGETS, level=0.8, row_weights=mask),
            conformal.normalised(CENTRE[mask], SCALE[mask], TARGETS[mask], level=0.8),
        ),
        (
            conformal.cqr(spoilt, spoilt, TARGETS, level=0.8, row_weights=mask),
            conformal.cqr(CENTRE[mask], CENTRE[mask], TARGETS[mask], level=0.8),
        ),
    ):
        assert eqx.tree_equal(got, want)
    assert conformal.split(CENTRE, TARGETS, level=0.8).radius > 1.5


@pytest.mark.parametrize("fit", [conformal.split, conformal.cqr], ids=["split", "cqr"])
def test_nan_in_rows_that_count(fit):
    spoilt = np.where(np.arange(CENTRE.size) == 3, np.nan, CENTRE)
    predictions = (CENTRE,) if fit is conformal.split else (CENTRE, CENTRE)
    with pytest.raises(ValueError, match=f"`conformal.{fit.__name__}` needs `targets` without NaN.\n  got 1 of them"):
        fit(*predictions, spoilt, level=0.8)
    with pytest.raises(ValueError, match=r"needs `(predictions|upper)` without NaN"):
        fit(*predictions[1:], spoilt, TARGETS, level=0.8)
    assert np.isnan(jax.jit(lambda y: fit(*predictions, y, level=0.8))(spoilt).__dict__.popitem()[1]).all()


def test_a_large_offset_costs_no_precision():
    centre, targets = np.round(CENTRE, 2) + np.float32(1e4), np.round(TARGETS, 2) + np.float32(1e4)
    got = conformal.split(centre, targets, level=0.9).radius
    assert got == np.float32(_ranked(np.abs(np.float64(targets) - np.float64(centre)), 0.9))


def test_outputs_are_fitted_by_vmap():
    centre, targets = np.stack([CENTRE, -CENTRE], axis=-1), np.stack([TARGETS, TARGETS], axis=-1)
    fitted = jax.vmap(lambda x, y: conformal.split(x, y, level=0.9), in_axes=-1)(centre, targets)
    assert fitted.radius[0] == conformal.split(CENTRE, TARGETS, level=0.9).radius
    assert fitted.radius[1] == conformal.split(-CENTRE, TARGETS, level=0.9).radius != fitted.radius[0]
    lower, _ = jax.vmap(lambda fitted, x: fitted(x), in_axes=(0, -1), out_axes=-1)(fitted, centre)
    np.testing.assert_array_equal(lower[:, 1], -CENTRE - fitted.radius[1])


def test_saving_and_jit(tmp_path):
    fitted = conformal.cqr(CENTRE - 1, CENTRE, TARGETS, level=0.9, ends="each")
    ee.save(tmp_path / "fitted", fitted)
    loaded = ee.load(tmp_path / "fitted", jax.tree.map(lambda x: 0 * x, fitted))
    assert isinstance(loaded, eqx.Module)
    assert eqx.tree_equal(loaded, fitted)
    assert all(eqx.is_array(leaf) for leaf in jax.tree.leaves(fitted))
    np.testing.assert_array_equal(loaded(CENTRE, TARGETS), fitted(CENTRE, TARGETS))
    traced = jax.jit(lambda fitted, x, y: fitted(x, y))(fitted, CENTRE, TARGETS)
    np.testing.assert_allclose(traced, fitted(CENTRE, TARGETS), rtol=1e-6)
    filtered = eqx.filter_jit(fitted)(CENTRE, TARGETS)
    np.testing.assert_allclose(filtered, fitted(CENTRE, TARGETS), rtol=1e-6)


@pytest.mark.usefixtures("unhooked")
def test_messages():
    with pytest.raises(ValueError, match=r"`predictions` of shape \(rows,\), at least one row.\n  got shape \(7, 7\)"):
        conformal.split(CENTRE.reshape(7, 7), TARGETS.reshape(7, 7), level=0.9)
    with pytest.raises(ValueError, match="a `scale` above zero.\n  got 0.0 at index .*, the first of 49 such"):
        conformal.normalised(CENTRE, 0 * SCALE, TARGETS, level=0.9)
    with pytest.raises(ValueError, match="`ends` to be one of 'together', 'each'"):
        conformal.cqr(CENTRE, CENTRE, TARGETS, level=0.9, ends="both")
    with pytest.raises(ValueError, match="one target per row of the prediction"):
        conformal.split(CENTRE, TARGETS[:7], level=0.9)
    fitted = conformal.normalised(CENTRE, SCALE, TARGETS, level=0.9)
    with pytest.raises(ValueError, match=r"`predictions` and `scale` of one shape.\n  got `predictions` \(49,\),"):
        fitted(CENTRE, SCALE[:7])
    with pytest.warns(UserWarning, match="`conformal.split`: 49 rows are too few for level 0.99"):
        conformal.split(CENTRE, TARGETS, level=0.99)


def test_half_precision_predictions_get_intervals():
    fitted = conformal.split(np.zeros(9, np.float32), np.arange(1, 10, dtype=np.float32), level=0.8)
    for dtype in (jnp.bfloat16, jnp.float16):
        lower, upper = fitted(jnp.zeros(2, dtype))
        assert lower.dtype == upper.dtype == jnp.float32
        np.testing.assert_array_equal([lower, upper], [[-8, -8], [8, 8]])
