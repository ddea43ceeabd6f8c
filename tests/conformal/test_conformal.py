"""Conformal prediction: loops over rows, MAPIE, exact laws of coverage, ties and messages."""

import json
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble import conformal, resample

RNG, EPS = np.random.default_rng(0), np.finfo(np.float32).eps
MASK = np.arange(99) % 4 > 0
SCORES = RNG.normal(size=99).astype(np.float32)
FEW = pytest.mark.filterwarnings("ignore:.*too few rows", "ignore:.*the share of rows")


def at_rank(values, level):
    rank = -(-(len(values) + 1) * round(100 * level) // 100)
    return np.sort(values)[rank - 1] if rank <= len(values) else np.inf


@FEW
def test_quantile_is_the_score_of_the_rank():
    groups, spoilt = RNG.integers(0, 3, 99), np.where(MASK, SCORES, np.nan)
    for level in (0.07, 0.29, 0.57, 0.9, 0.99):  # (n + 1) level is whole: floats round some of them up
        assert conformal.quantile(SCORES, level=level) == at_rank(SCORES, level)
        assert conformal.quantile(spoilt, level=level, row_weights=MASK) == at_rank(SCORES[MASK], level)
        got = conformal.quantile(spoilt, level=level, groups=np.where(MASK, groups, -1), num_groups=4, row_weights=MASK)
        np.testing.assert_array_equal(got, [at_rank(SCORES[MASK & (groups == g)], level) for g in range(4)])
    traced = jax.jit(lambda x, m: conformal.quantile(x, level=0.9, row_weights=m))
    assert traced(spoilt, MASK) == at_rank(SCORES[MASK], 0.9)
    assert np.isnan(traced(spoilt, np.ones(99, bool)))


def test_ends_that_cross_meet():
    narrow = conformal.cqr(np.full(9, -5.0), np.full(9, 5.0), np.zeros(9), level=0.8)
    np.testing.assert_allclose(narrow(np.float32([0, 1]), np.float32([1, 0])), [[0.5, 0.5], [0.5, 0.5]])


def test_an_offset_of_targets_in_float64_is_not_lost():
    targets = 1e8 + np.arange(1.0, 10)
    assert conformal.split(np.full(9, 1e8), targets, level=0.8).radius == 8 * (1 + 4 * EPS)


@pytest.mark.parametrize("prediction", [-0.6, -1.35, -2.7, -1000.3])
def test_ends_reach_the_targets_that_determine_them(prediction):
    """Repeated targets: an end that rounding leaves just below one of them loses a quarter of the rows."""
    targets = np.tile(np.arange(4, dtype=np.float32), 500)
    at = np.full(targets.shape, prediction, np.float32)
    for lower, upper in (
        conformal.split(at, targets, level=0.7)(at),
        conformal.split(at, targets, level=0.7, scale=at**2)(at, at**2),
        conformal.cqr(at - 0.1, at + 0.1, targets, level=0.7)(at - 0.1, at + 0.1),
    ):
        assert np.mean((lower <= targets) & (targets <= upper)) >= 0.7


@pytest.mark.parametrize("level", [0.5, 0.8])
def test_jackknife_plus_is_the_loop(level):
    """One row after another: the members that were not trained on it predict it and the new rows."""
    rows, members = 30, 12
    targets, kept = RNG.normal(size=rows).astype(np.float32), np.arange(rows) % 5 > 0
    at_rows, new = (targets + RNG.normal(size=(members, rows))).astype(np.float32), np.float32(RNG.normal(size=(12, 8)))
    weights = RNG.uniform(size=members) * (np.arange(members) != 3)
    at_rows[3] = new[3] = np.nan
    unseen = np.asarray(resample.out_of_bag(resample.bootstrap(rows, members, key=jax.random.key(1)), rows))
    lower, upper = [], []
    for i in np.flatnonzero(kept):
        own = weights * unseen[:, i]
        known = own > 0
        residual = abs(targets[i] - np.average(at_rows[known, i], weights=own[known])) if known.any() else np.inf
        centre = np.average(new[known], axis=0, weights=own[known]) if known.any() else np.zeros(8)
        lower, upper = [*lower, centre - residual], [*upper, centre + residual]
    want = (
        [-at_rank(-np.array(lower)[:, i], level) for i in range(8)],
        [at_rank(np.array(upper)[:, i], level) for i in range(8)],
    )
    for offset, atol in ((0, 1e-5), (1e4, 5e-3)):
        held_out = resample.held_out_mean(at_rows + np.float32(offset), unseen, weights=weights).mean
        fitted = conformal.jackknife_plus(
            np.where(kept, held_out, np.nan), targets + offset, unseen, level=level, weights=weights, row_weights=kept
        )
        got = np.subtract(fitted(new + np.float32(offset)), offset)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=atol)
    fitted = conformal.jackknife_plus(at_rows[0], targets, np.arange(rows) % 5 == np.arange(5)[:, None], level=level)
    twice = fitted(np.concatenate([new[4:9], new[4:9]]).reshape(10, 2, 4))  # two members of each fold
    np.testing.assert_allclose(np.reshape(twice, (2, -1)), fitted(new[4:9]), rtol=1e-5, atol=1e-5)


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


@pytest.mark.usefixtures("unhooked")
def test_messages():
    losses = np.ones((99, 2), np.float32)
    unseen, spoilt, groups = np.ones((2, 99), bool), np.where(MASK, SCORES, np.nan), (np.arange(99) < 5).astype(int)
    for call, message in [
        (lambda: conformal.split(SCORES[:18], SCORES[:18], level=0.95), "there are too few rows for level 0.95"),
        (lambda: conformal.quantile(SCORES, level=0.9, groups=groups, num_groups=2), "1 of 2 groups, the first is 1"),
        (lambda: conformal.split(np.zeros(30), np.arange(30.0), level=0.1), "`level=0.1`, the share of rows to cover"),
        (lambda: conformal.jackknife_plus(SCORES, SCORES, ~unseen, level=0.9), "Train more members"),
    ]:
        with pytest.warns(UserWarning, match=message):
            call()
    for call, message in [
        (lambda: conformal.split(SCORES, spoilt, level=0.9), "`conformal.split` needs `targets` without NaN"),
        (lambda: conformal.split(SCORES, SCORES, scale=0 * SCORES, level=0.9), "a `scale` above zero"),
        (lambda: conformal.jackknife_plus(spoilt, SCORES, unseen, level=0.9), "`held_out` predictions without NaN"),
        (
            lambda: conformal.jackknife_plus(SCORES, SCORES, unseen, level=0.9)(np.zeros((3, 4), np.float32)),
            "equally many members for each fold",
        ),
        (
            lambda: conformal.risk_control(losses, np.float32([0, 1]), risk=0.3, bound=0.5),
            "`losses` of at most `bound`, 0.5",
        ),
        (lambda: conformal.risk_control(losses, np.float32([0, 1]), risk=1.3), "a `risk` between 0 and `bound`"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


STORED = json.loads((pathlib.Path(__file__).parent / "figures.json").read_text())
LOGITS, LABELS = np.asarray(STORED["data"]["logits"], np.float32), np.asarray(STORED["data"]["labels"])
FOLD = np.asarray(STORED["data"]["fold"])[:99]
IN_TEST = FOLD == np.arange(3)[:, None]
OLD, NEW = slice(0, 99), slice(99, None)
X, Y = LOGITS[0, OLD], LABELS[OLD]
HELD_OUT = LOGITS[:, OLD][FOLD, np.arange(99)]
KINDS = ["lac", "aps", "top_k"]


def _scores(kind, logits, penalty=0.0, num_free=0):
    """The definition, class by class."""
    p = np.exp(np.float64(logits))
    p /= p.sum(-1, keepdims=True)
    place = (p[..., None, :] >= p[..., :, None]).sum(-1)
    more = np.where(p[..., None, :] > p[..., :, None], p[..., None, :], 0).sum(-1)
    aps = more + p + penalty * np.maximum(place - num_free, 0)
    return {"lac": 1 - p, "aps": aps, "top_k": place}[kind]


@pytest.mark.parametrize("level", [0.5, 0.9])
@pytest.mark.parametrize(("kind", "options"), [(k, {}) for k in KINDS] + [("aps", {"penalty": 0.05, "num_free": 2})])
def test_sets_are_those_of_the_definition(kind, options, level):
    own = _scores(kind, X, **options)[np.arange(99), Y]
    new = _scores(kind, LOGITS[0, NEW], **options)
    mask, groups = MASK, np.arange(99) % 2
    spoilt, labels = np.where(mask[:, None], X, np.nan), np.where(mask, Y, -7)
    fit = {"level": level, "score": kind, "row_weights": mask} | options
    got = conformal.sets(spoilt, labels, **fit)
    np.testing.assert_array_equal(got(LOGITS[0, NEW]), new <= at_rank(own[mask], level))
    each = [at_rank(own[mask & (Y == c)], level) for c in range(4)]
    got = conformal.sets(spoilt, labels, by_class=True, **fit)
    np.testing.assert_array_equal(got(LOGITS[0, NEW].reshape(4, 5, 4)).reshape(20, 4), new <= each)
    each = np.array([at_rank(own[mask & (groups == g)], level) for g in range(2)])
    got = conformal.sets(spoilt, labels, groups=groups, num_groups=2, **fit)
    np.testing.assert_array_equal(got(LOGITS[0, NEW], groups[:20]), new <= each[groups[:20], None])
    assert got(LOGITS[0, NEW], groups[:20] + 2).all()  # of no group that is known


@pytest.mark.parametrize("level", ["0.7", "0.9"])
@pytest.mark.parametrize("kind", ["lac", "top_k"])
def test_sets_are_mapies(kind, level):
    want = np.array(STORED["figures"][kind][level], bool)
    got = conformal.sets(X, Y, level=float(level), score=kind)(LOGITS[0, NEW])
    np.testing.assert_array_equal(got, want)
    if kind == "lac":
        fitted = conformal.cross_conformal(HELD_OUT, Y, IN_TEST, level=float(level), score="lac")
        want = np.array(STORED["figures"]["cross: lac"][level], bool)
        np.testing.assert_array_equal(fitted(LOGITS[:, NEW]), want)


@pytest.mark.parametrize("kind", KINDS)
def test_cross_conformal_counts_p_values(kind):
    kept = np.arange(99) % 7 > 0
    own = _scores(kind, HELD_OUT)[np.arange(99), Y]
    of_fold = _scores(kind, LOGITS[:, NEW])
    at_least = sum(np.float64(own[i] >= of_fold[FOLD[i]] - 1e-9) for i in np.flatnonzero(kept))
    spoilt = np.where(kept[:, None], HELD_OUT, np.nan)
    for level in (0.5, 0.77, 0.9):
        fitted = conformal.cross_conformal(spoilt, Y, IN_TEST, level=level, score=kind, row_weights=kept)
        want = (1 + at_least) / (kept.sum() + 1) > 1 - level + 1e-12
        np.testing.assert_array_equal(fitted(LOGITS[:, NEW]), want)
    again = fitted(np.concatenate([LOGITS, LOGITS])[:, NEW].reshape(6, 4, 5, 4))  # two members of each fold
    np.testing.assert_array_equal(again.reshape(20, 4), want)
    same = conformal.cross_conformal(X, Y, IN_TEST, level=0.8, score=kind)(np.stack([LOGITS[0, NEW]] * 3))
    np.testing.assert_array_equal(same, conformal.sets(X, Y, level=0.8, score=kind)(LOGITS[0, NEW]))


def test_ties_and_classes_of_tiny_probability():
    logits = np.log(np.float32([[0.2, 0.3, 0.2, 0.3]]))
    for kind in ("aps", "top_k"):  # classes of equal probability are in the set together, or not
        fitted = conformal.sets(np.tile(logits, (9, 1)), np.full(9, 1), level=0.8, score=kind)
        np.testing.assert_array_equal(fitted(logits), [[False, True, False, True]])
    # Scores of these classes round to one, or to zero; that of probability zero comes last.
    logits = np.float32([200.0, 0.0, -np.inf, -300.0])
    for kind in ("lac", "aps"):
        for label, want in [(0, [1, 0, 0, 0]), (1, [1, 1, 0, 0]), (3, [1, 1, 0, 1]), (2, [1, 1, 1, 1])]:
            fitted = conformal.sets(np.tile(logits, (9, 1)), np.full(9, label), level=0.8, score=kind)
            np.testing.assert_array_equal(fitted(logits), want)


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize("kind", KINDS)
def test_nan_few_rows_and_files(kind, tmp_path):
    fitted = conformal.sets(X, Y, level=0.5, score=kind)
    spoilt = np.where(np.arange(20)[:, None] == 3, np.nan, LOGITS[0, NEW])
    sets = np.asarray(fitted(spoilt))
    assert sets[3].all()  # what cannot be scored is in the set
    np.testing.assert_array_equal(np.delete(sets, 3, 0), np.delete(fitted(LOGITS[0, NEW]), 3, 0))
    every = jax.jit(lambda x: conformal.sets(x, Y, level=0.5, score=kind)(LOGITS[0, NEW]))(X * np.nan)
    assert np.asarray(every).all()
    with pytest.raises(ValueError, match="`conformal.sets` needs `logits` without NaN"):
        conformal.sets(X * np.nan, Y, level=0.5, score=kind)
    with pytest.warns(UserWarning, match="`conformal.sets`: there are too few rows for level 0.95"):
        assert np.asarray(conformal.sets(X[:9], Y[:9], level=0.95, score=kind)(X)).all()
    ee.save(tmp_path / "fitted", fitted)
    like = conformal.sets(X, Y[::-1], level=0.5, score=kind)
    assert eqx.tree_equal(ee.load(tmp_path / "fitted", like), fitted)


@pytest.mark.usefixtures("unhooked")
def test_messages_of_sets():
    for call, message in [
        (lambda: conformal.sets(X, Y, level=0.8)(X, Y), "`conformal.Sets` needs no `groups` for the rows"),
        (lambda: conformal.sets(X, Y, level=0.8, score="lac", penalty=0.1), 'a `penalty` with `score="aps"`'),
        (lambda: conformal.cross_conformal(X, Y, IN_TEST | True, level=0.8), "folds that hold out every row once"),
        (lambda: conformal.sets(X, Y, level=0.8, groups=Y, num_groups=2), "`groups` from 0 to 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


ROWS, ENBPI_NEW, MEMBERS = 40, 12, 6
TARGETS = RNG.normal(size=ROWS + ENBPI_NEW).astype(np.float32)
PREDICTIONS = (TARGETS + RNG.exponential(size=(MEMBERS, ROWS + ENBPI_NEW))).astype(np.float32)
UNSEEN = np.asarray(resample.out_of_bag(resample.bootstrap(ROWS, MEMBERS, key=jax.random.key(0)), ROWS))


def test_updates_slide_the_window(tmp_path):
    held_out = resample.held_out_mean(PREDICTIONS[:, :ROWS], UNSEEN).mean
    fitted = conformal.enbpi(held_out, TARGETS[:ROWS], UNSEEN, level=0.8, window=20)
    new, at = PREDICTIONS[:, ROWS:], TARGETS[ROWS:]
    together = fitted.update(new, at)
    one = fitted
    for i in range(ENBPI_NEW):
        one = one.update(new[:, i], at[i])
    _, scanned = jax.lax.scan(lambda s, xy: (s.update(*xy), s(xy[0])), fitted, (new.T, at))
    np.testing.assert_allclose(one.residuals, together.residuals, rtol=1e-4, atol=1e-5)
    want = np.append(fitted.residuals[ENBPI_NEW:], at - np.asarray(fitted.share) @ new)
    np.testing.assert_allclose(together.residuals, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(scanned.lower[0], fitted(new[:, 0]).lower, rtol=1e-5)
    missing = fitted.update(new[:, 0], np.nan)
    assert np.isnan(missing.residuals[-1])
    assert np.isfinite(missing(new)).all()
    ee.save(tmp_path / "state", together)
    assert eqx.tree_equal(ee.load(tmp_path / "state", fitted), together)


@pytest.mark.usefixtures("unhooked")
def test_messages_of_enbpi():
    held_out = np.zeros(ROWS, np.float32)
    with pytest.warns(UserWarning, match="`conformal.enbpi`: no time of the window has a target"):
        fitted = conformal.enbpi(held_out, TARGETS[:ROWS], UNSEEN & False, level=0.8)
    np.testing.assert_array_equal(np.isinf(fitted(PREDICTIONS)), True)
    with pytest.raises(ValueError, match="the members that it was fitted on"):
        fitted(PREDICTIONS[1:])
    with pytest.raises(ValueError, match="`conformal.Enbpi.update` needs `predictions` "):
        fitted.update(PREDICTIONS.reshape(MEMBERS, 4, 13), TARGETS.reshape(4, 13))


STEPS = 2000


@pytest.mark.parametrize(("level", "rate"), [(0.6, 0.3), (0.9, 0.005)])
def test_coverage_of_any_sequence_is_within_the_bound(level, rate):
    # What an adversary would like: misses always, never, at times, and in blocks.
    random = [RNG.uniform(size=STEPS) < p for p in (0.02, 0.1, 0.5, 0.9)]
    blocks = [np.arange(STEPS) // length % 2 == 0 for length in (3, 50, 400)]
    wishes = np.stack([np.ones(STEPS, bool), np.zeros(STEPS, bool), *random, *blocks])

    def step(state, wish):
        """A set of everything never misses, and an empty one always does."""
        missed = jnp.where(state.level >= 1, False, jnp.where(state.level <= 0, True, wish))
        return state.update(~missed), missed

    start = conformal.aci(level=level, rate=rate)
    misses = np.asarray(jax.vmap(lambda wishes: jax.lax.scan(step, start, wishes)[1])(wishes))
    times = np.arange(1, STEPS + 1)
    gap = np.abs(np.cumsum(misses, axis=1) / times - (1 - level))
    bound = (max(level, 1 - level) + rate) / (rate * times)
    assert (gap <= bound + 1e-5).all()  # the level is a sum of 2000 rounded steps
    # It is nearly met by the sequence that misses only when it must.
    assert (gap[1] / bound).max() > 0.6


def test_one_step_is_the_formula(tmp_path):
    state = conformal.aci(level=0.9, rate=0.05)
    assert [float(leaf) for leaf in jax.tree.leaves(state)] == pytest.approx([0.9, 0.9, 0.05])
    for covered, change in ((False, 0.9), (jnp.asarray(True), -0.1), (0.5, 0.4)):
        np.testing.assert_allclose(state.update(covered).level, 0.9 + 0.05 * change, rtol=1e-6)
    ee.save(tmp_path / "state", state.update(False))
    assert eqx.tree_equal(ee.load(tmp_path / "state", conformal.aci(level=0.5)), state.update(False))


def test_quantile_at_any_level():
    at = lambda level: eqx.tree_at(lambda s: s.level, conformal.aci(level=0.5), jnp.asarray(level, float))
    quantile = jax.jit(lambda level, scores: at(level).quantile(scores))
    for n in (9, 99):
        for percent in range(1, 100):
            assert quantile(percent / 100, SCORES[:n]) == at_rank(SCORES[:n], percent / 100), (n, percent)
    for level, want in [(1.0, np.inf), (1.3, np.inf), (0.0, -np.inf), (-0.1, -np.inf), (1e-9, SCORES.min())]:
        assert quantile(level, SCORES) == want
    spoilt = np.where(MASK, SCORES, np.nan)
    assert at(0.8).quantile(spoilt, row_weights=MASK) == at_rank(SCORES[MASK], 0.8)
    assert np.isnan(quantile(0.8, spoilt))


@pytest.mark.usefixtures("unhooked")
def test_messages_of_aci():
    with pytest.raises(ValueError, match="`conformal.Aci.update` needs `covered` "):
        conformal.aci(level=0.9).update(np.ones(3, np.float32))
    with pytest.raises(ValueError, match="`covered` from 0 to 1"):
        conformal.aci(level=0.9).update(3.5)
