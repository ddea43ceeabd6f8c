"""Conformal prediction: loops over rows, MAPIE, exact laws of coverage, ties and messages."""

import json
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble import conformal, resample, scores

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
    fitted = conformal.jackknife_plus(resample.out_of_fold(at_rows, folds).mean, targets, folds.in_test, level=level)
    want = _loop(at_rows, new, np.asarray(folds.in_test), targets, level, np.ones(5), kept | True)
    np.testing.assert_allclose(fitted(new), want, rtol=1e-5, atol=1e-5)
    twice = fitted(np.concatenate([new, new]).reshape(10, 2, 4))  # two members of each fold
    np.testing.assert_allclose(np.reshape(twice, (2, -1)), want, rtol=1e-5, atol=1e-5)
    drawn = resample.bootstrap(rows, 12, key=jax.random.key(1))
    weights = RNG.uniform(size=12) * (np.arange(12) != 3)
    at_rows, new = draw(12)
    at_rows[3] = new[3] = np.nan
    held_out = resample.out_of_bag_mean(at_rows, drawn, weights=weights).mean
    unseen = np.asarray(resample.out_of_bag(drawn, rows))
    fitted = conformal.jackknife_plus(
        np.where(kept, held_out, np.nan), targets, unseen, level=level, weights=weights, row_weights=kept
    )
    want = _loop(at_rows, new, unseen, targets, level, weights, kept)
    np.testing.assert_allclose(fitted(new.astype(np.float32)), want, rtol=1e-4, atol=1e-5)
    offset = conformal.jackknife_plus(held_out + 1e4, targets + 1e4, unseen, level=level, weights=weights)
    want = _loop(at_rows, new, unseen, targets, level, weights, kept | True)
    np.testing.assert_allclose(np.subtract(offset(np.float32(new + 1e4)), 1e4), want, atol=5e-3)


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


def _threshold(values, level):
    rank = -(-(len(values) + 1) * round(100 * level) // 100)
    return np.sort(values)[rank - 1] if rank <= len(values) else np.inf


@pytest.mark.parametrize("level", [0.5, 0.9])
@pytest.mark.parametrize(("kind", "options"), [(k, {}) for k in KINDS] + [("aps", {"penalty": 0.05, "num_free": 2})])
def test_sets_are_those_of_the_definition(kind, options, level):
    own = _scores(kind, X, **options)[np.arange(99), Y]
    new = _scores(kind, LOGITS[0, NEW], **options)
    mask, groups = np.arange(99) % 4 > 0, np.arange(99) % 2
    spoilt, labels = np.where(mask[:, None], X, np.nan), np.where(mask, Y, -7)
    fit = {"level": level, "score": kind, "row_weights": mask} | options
    got = conformal.sets(spoilt, labels, **fit)
    np.testing.assert_array_equal(got(LOGITS[0, NEW]), new <= _threshold(own[mask], level))
    traced = jax.jit(lambda x, y, m: conformal.sets(x, y, **(fit | {"row_weights": m})))(spoilt, labels, mask)
    assert eqx.tree_equal(traced, got)
    each = [_threshold(own[mask & (Y == c)], level) for c in range(4)]
    got = conformal.sets(spoilt, labels, by_class=True, **fit)
    np.testing.assert_array_equal(got(LOGITS[0, NEW].reshape(4, 5, 4)).reshape(20, 4), new <= each)
    each = np.array([_threshold(own[mask & (groups == g)], level) for g in range(2)])
    got = conformal.sets(spoilt, labels, groups=groups, num_groups=2, **fit)
    np.testing.assert_array_equal(got(LOGITS[0, NEW], groups[:20]), new <= each[groups[:20], None])
    assert got(LOGITS[0, NEW], groups[:20] + 2).all()  # of no group that is known


@pytest.mark.parametrize("level", ["0.7", "0.9"])
@pytest.mark.parametrize("kind", ["lac", "top_k"])
def test_sets_are_mapies(kind, level):
    want = np.array(STORED["figures"][kind][level], bool)
    got = conformal.sets(X, Y, level=float(level), score=kind)(LOGITS[0, NEW])
    np.testing.assert_array_equal(got, want)
    other = conformal.sets(X, Y[::-1], level=float(level), score=kind)(LOGITS[0, NEW])
    assert not np.array_equal(other, want)
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


@pytest.mark.parametrize(("kind", "scale"), [("lac", 1.0), ("lac", 1000.0), ("aps", 1000.0)])
def test_coverage_follows_its_beta_binomial_law(kind, scale):
    # At the larger scale nearly all probabilities round to zero or one: as such they would tie.
    stats = pytest.importorskip("scipy.stats")
    held_out, new, repeats = 29, 20, 4000
    rng = np.random.default_rng(0)
    logits = (scale * rng.normal(size=(repeats, held_out + new, 3))).astype(np.float32)
    labels = rng.integers(3, size=(repeats, held_out + new))

    def covered(x, y):
        sets = conformal.sets(x[:held_out], y[:held_out], level=0.8, score=kind)(x[held_out:])
        return jnp.sum(scores.set_coverage(sets, y[held_out:], reduction="none"))

    counts, grid = np.asarray(jax.jit(jax.vmap(covered))(logits, labels)), np.arange(new + 1)
    limit = np.sqrt(np.log(2e6) / (2 * repeats))  # Dvoretzky, Kiefer, Wolfowitz: a false alarm in a million
    empirical = np.searchsorted(np.sort(counts), grid, side="right") / repeats
    gap = empirical - stats.betabinom(new, 24, 6).cdf(grid)
    # The last class of APS always has the same score: ties cover more than is asked for, never less.
    assert gap.max() < limit
    assert kind == "aps" or -gap.min() < limit


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
    with pytest.raises(ValueError, match="`conformal.Sets` needs `groups` if and only if"):
        conformal.sets(X, Y, level=0.8)(X, Y)
    with pytest.raises(ValueError, match='a `penalty` with `score="aps"`'):
        conformal.sets(X, Y, level=0.8, score="lac", penalty=0.1)
    with pytest.raises(ValueError, match="`conformal.sets` needs `penalty` to be at least 0 and finite, got -1"):
        conformal.sets(X, Y, level=0.8, penalty=-1.0)
    with pytest.raises(ValueError, match="`score` to be one of 'lac', 'aps', 'top_k', got 'raps'"):
        conformal.sets(X, Y, level=0.8, score="raps")
    with pytest.raises(ValueError, match="folds that hold out every row once.\n  got 99 others"):
        conformal.cross_conformal(X, Y, IN_TEST | True, level=0.8)
    with pytest.raises(ValueError, match="`groups` from 0 to 1, as `num_groups` is 2"):
        conformal.sets(X, Y, level=0.8, groups=Y, num_groups=2)
    assert resample.folds(9, 3, key=jax.random.key(0)).in_test.shape == (3, 9)


ROWS, ENBPI_NEW, MEMBERS = 40, 12, 6
TARGETS = RNG.normal(size=ROWS + ENBPI_NEW).astype(np.float32)
PREDICTIONS = (TARGETS + RNG.exponential(size=(MEMBERS, ROWS + ENBPI_NEW)) + RNG.normal(size=(MEMBERS, 1))).astype(
    np.float32
)
UNSEEN = np.asarray(resample.out_of_bag(resample.bootstrap(ROWS, MEMBERS, key=jax.random.key(0)), ROWS))
KNOWN = np.arange(ROWS) % 5 > 0


def _loop_of_enbpi(weights):
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


def test_updates_slide_the_window(tmp_path):
    held_out, _, _ = _loop_of_enbpi(np.ones(MEMBERS))
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
    with pytest.raises(ValueError, match="the members that it was fitted on.\n  expected 6 members, got 5"):
        fitted(PREDICTIONS[1:])
    with pytest.raises(ValueError, match="`conformal.Enbpi.update` needs `predictions` "):
        fitted.update(PREDICTIONS.reshape(MEMBERS, 4, 13), TARGETS.reshape(4, 13))


STEPS = 2000
ACI_SCORES = np.random.default_rng(0).normal(size=99).astype(np.float32)


def _wishes():
    """What an adversary would like: misses always, never, at times, in blocks, and just when it hurts."""
    rng = np.random.default_rng(0)
    random = [rng.uniform(size=STEPS) < p for p in (0.02, 0.1, 0.5, 0.9)]
    blocks = [np.arange(STEPS) // length % 2 == 0 for length in (3, 50, 400)]
    return np.stack([np.ones(STEPS, bool), np.zeros(STEPS, bool), *random, *blocks])


def _misses(wishes, level, rate, *, clipped=False):
    """Misses that follow the wishes, except that a set of everything never misses and an empty one always does."""

    def step(state, wish):
        missed = jnp.where(state.level >= 1, False, jnp.where(state.level <= 0, True, wish))
        state = state.update(~missed)
        if clipped:
            state = eqx.tree_at(lambda s: s.level, state, jnp.clip(state.level, 0, 1))
        return state, missed

    start = conformal.aci(level=level, rate=rate)
    return np.asarray(jax.vmap(lambda wishes: jax.lax.scan(step, start, wishes)[1])(wishes))


@pytest.mark.parametrize(("level", "rate"), [(0.9, 0.05), (0.6, 0.3), (0.9, 0.005)])
def test_coverage_of_any_sequence_is_within_the_bound(level, rate):
    misses = _misses(_wishes(), level, rate)
    times = np.arange(1, STEPS + 1)
    gap = np.abs(np.cumsum(misses, axis=1) / times - (1 - level))
    bound = (max(level, 1 - level) + rate) / (rate * times)
    assert (gap <= bound + 1e-5).all()  # the level is a sum of 2000 rounded steps
    # It is nearly met by the sequence that misses only when it must.
    assert (gap[1] / bound).max() > 0.6
    if rate == 0.05:
        wrong = np.abs(np.cumsum(_misses(_wishes(), level, rate, clipped=True), axis=1) / times - (1 - level))
        assert (wrong > 3 * bound).any()


def test_one_step_is_the_formula():
    state = conformal.aci(level=0.9, rate=0.05)
    assert [float(leaf) for leaf in jax.tree.leaves(state)] == pytest.approx([0.9, 0.9, 0.05])
    np.testing.assert_allclose(state.update(False).level, 0.9 + 0.05 * 0.9, rtol=1e-6)
    np.testing.assert_allclose(state.update(jnp.asarray(True)).level, 0.9 - 0.05 * 0.1, rtol=1e-6)
    np.testing.assert_allclose(state.update(0.5).level, 0.9 + 0.05 * 0.4, rtol=1e-6)


def _at(level):
    return eqx.tree_at(lambda s: s.level, conformal.aci(level=0.5), jnp.asarray(level, float))


def test_quantile_at_any_level():
    quantile = jax.jit(lambda level, scores: _at(level).quantile(scores))
    for n in (9, 99):
        for percent in range(1, 100):
            rank = -(-(n + 1) * percent // 100)
            want = np.sort(ACI_SCORES[:n])[rank - 1] if rank <= n else np.inf
            assert quantile(percent / 100, ACI_SCORES[:n]) == want, (n, percent)
    for level, want in [(1.0, np.inf), (1.3, np.inf), (0.0, -np.inf), (-0.1, -np.inf), (1e-9, ACI_SCORES.min())]:
        assert quantile(level, ACI_SCORES) == want
    mask = np.arange(99) % 2 == 0
    spoilt = np.where(mask, ACI_SCORES, np.nan)
    assert _at(0.8).quantile(spoilt, row_weights=mask) == conformal.quantile(ACI_SCORES[mask], level=0.8)
    assert np.isnan(jax.jit(lambda s: _at(0.8).quantile(s))(spoilt))


def test_it_follows_a_change_and_is_stored(tmp_path):
    # The noise grows fivefold: a fixed quantile then covers far too little.
    noise = np.abs(np.random.default_rng(0).normal(size=1200) * np.where(np.arange(1200) < 200, 1, 5)).astype(
        np.float32
    )

    def step(carry, score):
        state, recent = carry
        covered = score <= state.quantile(recent)
        return (state.update(covered), jnp.append(recent[1:], score)), covered

    (state, _), covered = jax.lax.scan(step, (conformal.aci(level=0.8, rate=0.05), noise[:100]), noise[100:])
    bound = (0.8 + 0.05) / (0.05 * 1100)
    assert abs(np.mean(covered) - 0.8) <= bound
    fixed = noise[100:] <= conformal.quantile(noise[:100], level=0.8)
    assert abs(np.mean(fixed) - 0.8) > 10 * bound
    ee.save(tmp_path / "state", state)
    assert eqx.tree_equal(ee.load(tmp_path / "state", conformal.aci(level=0.5)), state)


@pytest.mark.usefixtures("unhooked")
def test_messages_of_aci():
    with pytest.raises(ValueError, match="`conformal.aci` needs `rate` to be above zero, got 0.0"):
        conformal.aci(level=0.9, rate=0.0)
    with pytest.raises(ValueError, match="a `level` between 0 and 1"):
        conformal.aci(level=90)
    state = conformal.aci(level=0.9)
    with pytest.raises(ValueError, match=r"`conformal.Aci.update` needs `covered` .*\n  .*\(3,\)"):
        state.update(np.ones(3, np.float32))
    with pytest.raises(ValueError, match="`covered` from 0 to 1.\n  got 3.5"):
        state.update(3.5)
