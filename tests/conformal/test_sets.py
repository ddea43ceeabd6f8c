"""Sets of classes: definitions, MAPIE's sets, exact laws of coverage, ties, and classes of tiny probability."""

import json
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble import conformal, resample, scores

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


def test_rare_classes_are_covered():
    rng = np.random.default_rng(0)
    labels = (rng.uniform(size=4000) < 0.1).astype(int)
    logits = np.stack([np.zeros(4000), 1.5 * labels - 2 + rng.normal(size=4000)], -1).astype(np.float32)
    covered = {}
    for by_class in (False, True):
        fitted = conformal.sets(logits[:2000], labels[:2000], level=0.9, score="lac", by_class=by_class)
        inside = np.asarray(scores.set_coverage(fitted(logits[2000:]), labels[2000:], reduction="none"))
        covered[by_class] = inside[labels[2000:] == 1].mean()
    assert covered[False] < 0.8 < 0.84 < covered[True]


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
def test_messages():
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
