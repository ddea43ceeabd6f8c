"""Least ambiguous sets and the likeliest `k` classes: definitions, MAPIE's sets, the law of coverage, empty sets."""

import json
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble import conformal, scores

STORED = json.loads((pathlib.Path(__file__).parent / "figures.json").read_text())
LOGITS = np.asarray(STORED["data"]["logits"], np.float32)[0]
LABELS = np.asarray(STORED["data"]["labels"])
OLD, NEW = slice(0, 99), slice(99, None)
KINDS = ["lac", "top_k"]


def _definition(kind, logits):
    """Scores, class by class."""
    p = np.exp(np.float64(logits))
    p /= p.sum(-1, keepdims=True)
    return 1 - p if kind == "lac" else (p[..., None, :] >= p[..., :, None]).sum(-1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", [0.5, 0.9])
def test_sets_are_those_of_the_definition(kind, level):
    fitted = getattr(conformal, kind)(LOGITS[OLD], LABELS[OLD], level=level)
    each = _definition(kind, LOGITS[OLD])[np.arange(99), LABELS[OLD]]
    threshold = np.sort(each)[round(100 * level) - 1]
    got = np.asarray(fitted(LOGITS[NEW]))
    np.testing.assert_array_equal(got, _definition(kind, LOGITS[NEW]) <= threshold)
    if kind == "lac":
        np.testing.assert_allclose(jax.nn.sigmoid(fitted.threshold), threshold, rtol=1e-5)
    else:
        assert float(fitted.k) == threshold
        assert (got.sum(-1) == threshold).all()
    # A plain quantile of the level, without the row that is new.
    plain = np.sort(each)[round(98 * level) - 3]
    assert not np.array_equal(got, _definition(kind, LOGITS[NEW]) <= plain) or kind == "top_k"


@pytest.mark.parametrize("level", ["0.7", "0.9"])
@pytest.mark.parametrize("kind", KINDS)
def test_sets_are_mapies(kind, level):
    fitted = getattr(conformal, kind)(LOGITS[OLD], LABELS[OLD], level=float(level))
    want = np.array(STORED["figures"][kind][level], bool)
    np.testing.assert_array_equal(fitted(LOGITS[NEW]), want)
    other = getattr(conformal, kind)(LOGITS[OLD], LABELS[OLD][::-1], level=float(level))
    assert not np.array_equal(other(LOGITS[NEW]), want)


@pytest.mark.parametrize("scale", [1.0, pytest.param(1000.0, marks=pytest.mark.slow)])
def test_coverage_of_lac_follows_its_beta_binomial_law(scale):
    # At the larger scale nearly all probabilities round to zero or one: as such they would tie.
    stats = pytest.importorskip("scipy.stats")
    held_out, new, repeats = 29, 20, 6000
    rng = np.random.default_rng(0)
    logits = (scale * rng.normal(size=(repeats, held_out + new, 3))).astype(np.float32)
    labels = rng.integers(3, size=(repeats, held_out + new))

    def covered(x, y):
        sets = conformal.lac(x[:held_out], y[:held_out], level=0.8)(x[held_out:])
        return jnp.sum(scores.set_coverage(sets, y[held_out:], reduction="none"))

    counts = np.asarray(jax.jit(jax.vmap(covered))(logits, labels))
    limit = np.sqrt(np.log(2e6) / (2 * repeats))  # Dvoretzky, Kiefer, Wolfowitz: a false alarm in a million
    grid = np.arange(new + 1)
    empirical = np.searchsorted(np.sort(counts), grid, side="right") / repeats
    distance = lambda k: np.abs(empirical - stats.betabinom(new, k, held_out + 1 - k).cdf(grid)).max()
    assert distance(24) < limit
    assert min(distance(23), distance(25)) > 2 * limit


def test_a_model_that_is_always_right_has_empty_sets():
    # At level 0.7 the k-th smallest score is that of the label in 70 % of the rows; nothing else is likelier.
    rng = np.random.default_rng(0)
    labels = rng.integers(4, size=4000)
    logits = (3 + rng.uniform(size=(4000, 1))) * np.eye(4, dtype=np.float32)[labels]
    sizes = {
        name: np.asarray(scores.set_size(fit(logits[:2000], labels[:2000], level=0.7)(logits[2000:]), reduction="none"))
        for name, fit in {"lac": conformal.lac, "aps": conformal.aps}.items()
    }
    assert abs(np.mean(sizes["lac"] == 0) - 0.3) < 6 * np.sqrt(0.21 * 2 / 2000)
    assert (sizes["lac"] <= 1).all()
    added = np.eye(4, dtype=bool)[logits[2000:].argmax(-1)] | (sizes["lac"] > 0)[:, None] & (logits[2000:] > 1)
    assert scores.set_coverage(added, labels[2000:]) == 1


def test_log_odds_of_confident_and_of_equal_classes():
    logits = np.float32([200.0, 0.0, -np.inf, -300.0])
    np.testing.assert_allclose(conformal.lac(np.tile(logits, (9, 1)), np.zeros(9, int), level=0.8).threshold, -200)
    for label, want in [(0, [1, 0, 0, 0]), (1, [1, 1, 0, 0]), (3, [1, 1, 0, 1]), (2, [1, 1, 1, 1])]:
        fitted = conformal.lac(np.tile(logits, (9, 1)), np.full(9, label), level=0.8)
        np.testing.assert_array_equal(fitted(logits), want)
    equal = conformal.lac(np.zeros((9, 2), np.float32), np.zeros(9, int), level=0.8)
    np.testing.assert_array_equal(equal(np.zeros(2, np.float32)), [True, True])


def test_ties_for_the_last_place():
    logits = np.log(np.array([[0.2, 0.3, 0.2, 0.3]], np.float32))
    fitted = conformal.top_k(np.tile(logits, (9, 1)), np.full(9, 1), level=0.8)
    assert fitted.k == 2
    np.testing.assert_array_equal(fitted(logits), [[False, True, False, True]])
    # One class of the tie alone would be chosen by its index.
    np.testing.assert_array_equal(fitted(np.float32([3.0, 1.0, 1.0, 0.0])), [True, False, False, False])


@pytest.mark.parametrize("kind", KINDS)
def test_masks_jit_files_nan_and_few_rows(kind, tmp_path):
    fit = getattr(conformal, kind)
    mask = np.arange(99) % 4 > 0
    spoilt, labels = np.where(mask[:, None], LOGITS[OLD], np.nan), np.where(mask, LABELS[OLD], -7)
    got = fit(spoilt, labels, level=0.8, row_weights=mask)
    want = fit(LOGITS[OLD][mask], LABELS[OLD][mask], level=0.8)
    assert eqx.tree_equal(got, want)
    traced = jax.jit(lambda x, y, mask: fit(x, y, level=0.8, row_weights=mask))
    assert eqx.tree_equal(traced(spoilt, labels, mask), want)
    assert np.isnan(jax.tree.leaves(traced(LOGITS[OLD], labels, mask | True))[0])
    assert np.asarray(traced(LOGITS[OLD], labels, mask | True)(LOGITS[NEW])).all()
    new = LOGITS[NEW].copy()
    new[3] = np.nan
    sets = np.asarray(jax.jit(lambda fitted, x: fitted(x))(got, new))
    assert sets[3].all()
    np.testing.assert_array_equal(np.delete(sets, 3, 0), np.delete(got(LOGITS[NEW]), 3, 0))
    np.testing.assert_array_equal(got(LOGITS[NEW].reshape(4, 5, 4)).reshape(20, 4), got(LOGITS[NEW]))
    ee.save(tmp_path / "fitted", got)
    assert eqx.tree_equal(ee.load(tmp_path / "fitted", jax.tree.map(lambda x: 0 * x, got)), got)
    with pytest.warns(UserWarning, match=f"`conformal.{kind}`: 9 rows are too few for level 0.95"):
        few = fit(LOGITS[:9], LABELS[:9], level=0.95)
    assert np.isinf(jax.tree.leaves(few)[0])
    assert np.asarray(few(LOGITS[NEW])).all()
    with pytest.raises(ValueError, match=f"`conformal.{kind}` needs `logits` without NaN"):
        fit(spoilt, LABELS[OLD], level=0.8)
