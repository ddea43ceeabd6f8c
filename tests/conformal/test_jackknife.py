"""CV+ and jackknife+-after-bootstrap compared with loops over rows, and their guarantee."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble import conformal, resample

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
ROWS, NEW = 30, 7
TARGETS = RNG.normal(size=ROWS).astype(np.float32)
FOLDS = resample.folds(ROWS, 5, key=KEY)


def _loop(predictions, new, unseen, targets, level, weights=None, counts=None):
    """One row after another: the members that were not trained on it predict it and the new rows."""
    weights = np.ones(len(predictions)) if weights is None else weights
    kept = [i for i in range(len(targets)) if counts is None or counts[i]]
    lower, upper = np.zeros((len(kept), new.shape[1])), np.zeros((len(kept), new.shape[1]))
    for index, i in enumerate(kept):
        members = np.flatnonzero(unseen[:, i] & (weights > 0))
        if members.size == 0:
            lower[index], upper[index] = -np.inf, np.inf
            continue
        own = weights[members] / weights[members].sum()
        residual = abs(targets[i] - own @ np.float64(predictions[members, i]))
        lower[index] = own @ np.float64(new[members]) - residual
        upper[index] = own @ np.float64(new[members]) + residual
    n = len(kept)
    rank = -(-(n + 1) * round(100 * level) // 100)
    if rank > n:
        return np.full(new.shape[1], -np.inf), np.full(new.shape[1], np.inf)
    return np.sort(lower, axis=0)[n - rank], np.sort(upper, axis=0)[rank - 1]


def _predictions(num_members, seed=1):
    rng = np.random.default_rng(seed)
    own = rng.normal(size=(num_members, 1))
    at_rows = own + TARGETS + 0.5 * rng.normal(size=(num_members, ROWS))
    return at_rows.astype(np.float32), (own + rng.normal(size=(num_members, NEW))).astype(np.float32)


@pytest.mark.parametrize("level", [0.5, 0.8, 0.9])
def test_cv_plus_is_the_loop(level):
    at_rows, new = _predictions(5)
    held_out = resample.out_of_fold(at_rows, FOLDS).mean
    fitted = conformal.cv_plus(held_out, TARGETS, FOLDS, level=level)
    want = _loop(at_rows, new, np.asarray(FOLDS.in_test), TARGETS, level)
    np.testing.assert_allclose(fitted(new), want, rtol=1e-5, atol=1e-5)
    moved = _loop(at_rows, new, np.roll(FOLDS.in_test, 1, axis=0), TARGETS, level)
    assert not np.allclose(moved, want, atol=1e-2)
    # Split-conformal intervals of the mean of all members are another thing.
    radius = conformal.split(held_out, TARGETS, level=level).radius
    assert not np.allclose(new.mean(0) + radius, want[1], atol=1e-2)


def test_cv_plus_of_several_members_a_fold():
    at_rows, new = _predictions(10)
    tiled = jax.tree.map(lambda part: jnp.tile(part, (2, 1)), FOLDS)
    held_out = resample.out_of_fold(at_rows, tiled).mean
    fitted = conformal.cv_plus(held_out, TARGETS, FOLDS, level=0.8)
    want = _loop(at_rows, new, np.asarray(tiled.in_test), TARGETS, 0.8)
    np.testing.assert_allclose(fitted(new), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(fitted(new[:, 0]), np.stack(want)[:, 0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(fitted(new[:, :6].reshape(10, 2, 3)).upper.ravel(), want[1][:6], rtol=1e-5, atol=1e-5)
    assert not np.allclose(fitted(np.repeat(new[:5], 2, axis=0)), want, atol=1e-2)


@pytest.mark.parametrize("weights", [None, np.array([1, 2, 0, 1, 3, 1, 1, 2.0, 1, 1, 1, 2])])
@pytest.mark.parametrize("level", [0.5, 0.8])
def test_jackknife_plus_after_bootstrap_is_the_loop(level, weights):
    at_rows, new = _predictions(12)
    if weights is not None:
        at_rows[2], new[2] = np.nan, np.nan
    drawn = resample.bootstrap(ROWS, 12, key=KEY)
    unseen = np.asarray(resample.out_of_bag(drawn, ROWS))
    held_out = resample.out_of_bag_mean(at_rows, drawn, weights=weights).mean
    fitted = conformal.jackknife_plus_after_bootstrap(held_out, TARGETS, drawn, level=level, weights=weights)
    want = _loop(at_rows, new, unseen, TARGETS, level, weights)
    np.testing.assert_allclose(fitted(new), want, rtol=1e-4, atol=1e-5)
    everyone = _loop(np.nan_to_num(at_rows), np.nan_to_num(new), np.ones_like(unseen), TARGETS, level, weights)
    assert not np.allclose(everyone, want, atol=1e-2)
    counts = np.asarray(resample.counts(drawn, ROWS))
    again = conformal.jackknife_plus_after_bootstrap(held_out, TARGETS, counts, level=level, weights=weights)
    np.testing.assert_array_equal(again(new), fitted(new))


def test_rows_that_every_member_drew_count_as_infinite():
    at_rows, new = _predictions(4)
    drawn = resample.bootstrap(ROWS, 4, key=KEY)
    unseen = np.asarray(resample.out_of_bag(drawn, ROWS))
    without = int((~unseen.any(0)).sum())
    assert 0 < without < 9
    held_out = resample.out_of_bag_mean(at_rows, drawn).mean
    fitted = conformal.jackknife_plus_after_bootstrap(held_out, TARGETS, drawn, level=0.6)
    want = _loop(at_rows, new, unseen, TARGETS, 0.6)
    np.testing.assert_allclose(fitted(new), want, rtol=1e-5, atol=1e-5)
    seen = unseen.any(0)
    dropped = _loop(at_rows[:, seen], new, unseen[:, seen], TARGETS[seen], 0.6)
    assert (dropped[1] - dropped[0] < want[1] - want[0]).all()
    with pytest.warns(UserWarning, match=f"{without} of 30 rows were drawn by every member.*Train more members"):
        conformal.jackknife_plus_after_bootstrap(held_out, TARGETS, drawn, level=0.9)


def test_masks():
    at_rows, new = _predictions(5)
    mask = np.arange(ROWS) % 4 > 0
    held_out = np.where(mask, resample.out_of_fold(at_rows, FOLDS).mean, np.nan)
    want = _loop(at_rows, new, np.asarray(FOLDS.in_test), TARGETS, 0.8, counts=mask)
    fitted = conformal.cv_plus(held_out, TARGETS, FOLDS, level=0.8, row_weights=mask)
    np.testing.assert_allclose(fitted(new), want, rtol=1e-5, atol=1e-5)
    traced = jax.jit(lambda mask: conformal.cv_plus(held_out, TARGETS, FOLDS, level=0.8, row_weights=mask)(new))(mask)
    np.testing.assert_allclose(traced, want, rtol=1e-5, atol=1e-5)
    assert not np.allclose(_loop(at_rows, new, np.asarray(FOLDS.in_test), TARGETS, 0.8), want, atol=1e-2)


def test_too_few_rows_have_no_bounds():
    at_rows, new = _predictions(5)
    held_out = resample.out_of_fold(at_rows, FOLDS).mean
    with pytest.warns(UserWarning, match="`conformal.cv_plus`: 30 rows are too few for level 0.99"):
        fitted = conformal.cv_plus(held_out, TARGETS, FOLDS, level=0.99)
    assert (np.asarray(fitted(new).upper) == np.inf).all()
    assert (np.asarray(fitted(new).lower) == -np.inf).all()


def test_a_large_offset_costs_no_precision():
    at_rows, new = (np.round(x, 2) for x in _predictions(12))
    drawn = resample.bootstrap(ROWS, 12, key=KEY)
    offset = np.float32(1e4)
    fits = []
    for shift in (np.float32(0), offset):
        held_out = resample.out_of_bag_mean(at_rows + shift, drawn).mean
        fits.append(
            conformal.jackknife_plus_after_bootstrap(held_out, np.round(TARGETS, 2) + shift, drawn, level=0.8)(
                new + shift
            )
        )
    # Floats near 1e4 are 1e-3 apart: a few of these, where predictions and means are rounded, and the
    # ends outwards, by the rounding that means over members may have.
    np.testing.assert_allclose(np.float64(fits[1]) - offset, np.float64(fits[0]), atol=8e-3)


def _polynomials(x, y, train, powers):
    basis = x[:, None] ** np.arange(powers)
    return [np.linalg.lstsq(basis[rows], y[rows], rcond=None)[0] for rows in train]


def _covered(repeats, fit):
    """How often a new target is in the interval that `fit` makes of models that fit too well."""
    rng, powers, inside = np.random.default_rng(0), 11, 0
    for _ in range(repeats):
        x, y = rng.uniform(-1, 1, size=21), rng.normal(size=21)
        inside += fit(x, y, lambda train, x=x, y=y: _polynomials(x, y, train, powers), powers)
    return inside / repeats


def _by_cv_plus(x, y, fit, powers):
    folds = SMALL_FOLDS
    predicted = [np.polynomial.Polynomial(c)(x) for c in fit(np.asarray(folds.train))]
    at_rows = np.float32(predicted)[:, :20]
    fitted = _small_cv_plus(at_rows, np.float32(y[:20]), np.float32(predicted)[:, 20])
    return float(fitted.lower) <= y[20] <= float(fitted.upper)


def _by_training_errors(x, y, fit, powers):
    predicted = np.polynomial.Polynomial(fit([np.arange(20)])[0])(x)
    radius = np.sort(np.abs(y - predicted)[:20])[16]
    return abs(y[20] - predicted[20]) <= radius


SMALL_FOLDS = resample.folds(20, 5)


@jax.jit
def _small_cv_plus(at_rows, targets, new):
    held_out = resample.out_of_fold(at_rows, SMALL_FOLDS).mean
    return conformal.cv_plus(held_out, targets, SMALL_FOLDS, level=0.8)(new)


def test_cv_plus_keeps_its_promise_where_training_errors_do_not():
    # At level 0.8 the promise is 0.6, less a term of (1 - 5 / 20) / (5 + 1) = 0.125 which is not used up here.
    repeats = 1500
    limit = np.sqrt(np.log(1e6) / (2 * repeats))  # Hoeffding: a false alarm in a million
    covered = _covered(repeats, _by_cv_plus)
    assert covered > 0.6 - limit
    assert _covered(repeats, _by_training_errors) < 0.6 - limit


def test_straight_from_a_run():
    x = jnp.linspace(-1, 1, 60)[:, None]
    y = jnp.asarray(3 * x[:, 0] + 0.3 * np.random.default_rng(0).normal(size=60), jnp.float32)

    def loss(model, batch, key):
        x, y = batch
        return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)

    ensemble = ee.build(lambda key: eqx.nn.Linear(1, 1, key=key), 10, key=KEY)
    folds = resample.folds(60, 5, key=KEY)
    run, held_out = ee.methods.cross_fit(ensemble, loss, optax.adam(0.1), (x, y), folds, x=x, epochs=60, key=KEY)
    fitted = conformal.cv_plus(held_out.mean[:, 0], y, folds, level=0.8)
    predictions = ee.predict(run.ensemble, x)[..., 0]
    lower, upper = fitted(predictions)
    want = _loop(np.asarray(predictions), np.asarray(predictions), np.tile(folds.in_test, (2, 1)), np.asarray(y), 0.8)
    np.testing.assert_allclose((lower, upper), want, atol=1e-4)
    assert 0.6 < ee.scores.coverage(lower, upper, y) <= 1
    assert 0.4 < ee.scores.width(lower, upper) < 1.6

    rows = resample.bootstrap(60, 10, key=KEY)
    bagged = ee.fit(ensemble, loss, optax.adam(0.1), (x, y), rows=rows, epochs=60, key=KEY)
    fitted = conformal.jackknife_plus_after_bootstrap(bagged.out_of_bag(x).mean[:, 0], y, rows, level=0.8)
    lower, upper = fitted(ee.predict(bagged.ensemble, x)[..., 0])
    assert 0.6 < ee.scores.coverage(lower, upper, y) <= 1


def test_saving_and_jit(tmp_path):
    at_rows, new = _predictions(5)
    fitted = conformal.cv_plus(resample.out_of_fold(at_rows, FOLDS).mean, TARGETS, FOLDS, level=0.8)
    ee.save(tmp_path / "fitted", fitted)
    loaded = ee.load(tmp_path / "fitted", jax.tree.map(jnp.zeros_like, fitted))
    np.testing.assert_array_equal(loaded(new), fitted(new))
    np.testing.assert_allclose(jax.jit(lambda fitted, x: fitted(x))(fitted, new), fitted(new), rtol=1e-5, atol=1e-6)
    many = np.tile(new, (1, 100))
    np.testing.assert_array_equal(fitted(many).lower[-NEW:], fitted(many).lower[:NEW])


@pytest.mark.usefixtures("unhooked")
def test_messages():
    at_rows, new = _predictions(5)
    held_out = np.array(resample.out_of_fold(at_rows, FOLDS).mean)
    fitted = conformal.cv_plus(held_out, TARGETS, FOLDS, level=0.8)
    with pytest.raises(ValueError, match="predictions of equally many members for each fold.\n  fitted on 5, got 7"):
        fitted(np.zeros((7, 2), np.float32))
    with pytest.raises(ValueError, match="all rows of the folds.\n  expected 30 rows, got 29"):
        conformal.cv_plus(held_out[:29], TARGETS[:29], FOLDS, level=0.8)
    with pytest.raises(TypeError, match="`folds` to be a `Folds`"):
        conformal.cv_plus(held_out, TARGETS, FOLDS.in_test, level=0.8)
    drawn = resample.bootstrap(ROWS, 5, key=KEY)
    out_of_bag = resample.out_of_bag_mean(at_rows, drawn).mean
    bagged = conformal.jackknife_plus_after_bootstrap(out_of_bag, TARGETS, drawn, level=0.5)
    with pytest.raises(ValueError, match="the members that it was fitted on.\n  expected 5 members, got 10"):
        bagged(np.zeros((10, 2), np.float32))
    held_out[3] = np.nan
    with pytest.raises(ValueError, match="`held_out` predictions without NaN.\n  got nan at index"):
        conformal.cv_plus(held_out, TARGETS, FOLDS, level=0.8)
    part = resample.from_splits([(np.arange(5, 30), np.arange(4)), (np.arange(4), np.arange(5, 30))], 30, uneven="trim")
    with pytest.raises(ValueError, match="every row.\n  got 1 rows that no fold holds out, the first is row 4"):
        conformal.cv_plus(held_out, TARGETS, part, level=0.8)


def test_no_new_rows_have_no_intervals():
    fitted = conformal.cv_plus(np.zeros(6), np.ones(6), resample.folds(6, 3), level=0.5)
    lower, upper = fitted(np.zeros((3, 0), np.float32))
    assert lower.shape == upper.shape == (0,)
