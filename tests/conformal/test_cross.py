"""Cross-conformal sets: p-values counted in a loop, MAPIE's sets, split-conformal sets as a special case."""

import json
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ensemble as ee
from eqx_ensemble import conformal, resample, scores

STORED = json.loads((pathlib.Path(__file__).parent / "figures.json").read_text())
LOGITS, LABELS = np.asarray(STORED["data"]["logits"], np.float32), np.asarray(STORED["data"]["labels"])
FOLD = np.asarray(STORED["data"]["fold"])[:99]
FOLDS = resample.from_splits([(np.flatnonzero(FOLD != i), np.flatnonzero(FOLD == i)) for i in range(3)], 99)
OLD, NEW = slice(0, 99), slice(99, None)
HELD_OUT = resample.out_of_fold(LOGITS[:, OLD], FOLDS).mean


def _p_values(held_out, logits, fold, labels, kept):
    """The definition with `1 - p` as score, row by row."""
    score = lambda x: 1 - np.exp(np.float64(x)) / np.exp(np.float64(x)).sum(-1, keepdims=True)
    rows = np.flatnonzero(kept)
    stranger = sum(score(held_out[i])[labels[i]] >= score(logits[fold[i]]) for i in rows)
    return (1 + stranger) / (len(rows) + 1)


@pytest.mark.parametrize("level", [0.5, 0.77, 0.9])
def test_sets_are_those_of_the_p_values(level):
    mask = np.arange(99) % 7 > 0
    for kept in (np.ones(99, bool), mask):
        spoilt = np.where(kept[:, None], HELD_OUT, np.nan)
        fitted = conformal.cross_conformal(spoilt, LABELS[OLD], FOLDS, level=level, score="lac", row_weights=kept)
        p = _p_values(np.asarray(HELD_OUT), LOGITS, FOLD, LABELS[OLD], kept)
        np.testing.assert_array_equal(fitted(LOGITS), p > 1 - level + 1e-12)
        rolled = _p_values(np.asarray(HELD_OUT), LOGITS[[1, 2, 0]], FOLD, LABELS[OLD], kept)
        assert not np.array_equal(rolled > 1 - level, fitted(LOGITS))


@pytest.mark.parametrize("level", ["0.7", "0.9"])
def test_sets_are_mapies(level):
    # MAPIE asks for `count >= (1 - level) (n - 1)`, which is the same number of rows for these levels and 99 rows.
    fitted = conformal.cross_conformal(HELD_OUT, LABELS[OLD], FOLDS, level=float(level), score="lac")
    want = np.array(STORED["figures"]["cross: lac"][level], bool)
    np.testing.assert_array_equal(fitted(LOGITS[:, NEW]), want)
    assert not np.array_equal(STORED["figures"]["lac"][level], want)


@pytest.mark.parametrize("score", ["lac", "aps", "top_k"])
def test_folds_of_one_model_are_split_conformal(score):
    same = np.tile(LOGITS[:1], (3, 1, 1))
    fitted = conformal.cross_conformal(same[0, OLD], LABELS[OLD], FOLDS, level=0.8, score=score)
    want = getattr(conformal, score)(same[0, OLD], LABELS[OLD], level=0.8)(same[0, NEW])
    np.testing.assert_array_equal(fitted(same[:, NEW]), want)
    again = fitted(np.concatenate([same, same])[:, NEW].reshape(6, 4, 5, 4))  # two members of each fold
    np.testing.assert_array_equal(again.reshape(20, 4), want)


def test_jit_files_nan_and_few_rows(tmp_path):
    fitted = conformal.cross_conformal(HELD_OUT, LABELS[OLD], FOLDS, level=0.9)
    ee.save(tmp_path / "fitted", fitted)
    assert eqx.tree_equal(ee.load(tmp_path / "fitted", jax.tree.map(lambda x: 0 * x, fitted)), fitted)
    new = LOGITS[:, NEW].copy()
    new[1, 3] = np.nan
    traced = jax.jit(lambda y, x: conformal.cross_conformal(HELD_OUT, y, FOLDS, level=0.9)(x))
    sets = np.asarray(traced(LABELS[OLD], new))
    assert sets[3].all()
    np.testing.assert_array_equal(np.delete(sets, 3, 0), np.delete(fitted(LOGITS[:, NEW]), 3, 0))
    assert np.asarray(traced(np.where(np.arange(99) == 5, -1, LABELS[OLD]), new)).all()
    with pytest.warns(UserWarning, match="99 rows are too few for level 0.995"):
        few = conformal.cross_conformal(HELD_OUT, LABELS[OLD], FOLDS, level=0.995)
    assert np.asarray(few(LOGITS[:, NEW])).all()


@pytest.mark.slow
def test_straight_from_a_run():
    x = jax.random.normal(jax.random.key(0), (300, 2))
    labels = jnp.where(x[:, 0] + 0.5 * jax.random.normal(jax.random.key(1), (300,)) > 0, 1, 0)

    def loss(model, batch, key):
        x, y = batch
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y))

    ensemble = ee.build(lambda key: eqx.nn.MLP(2, 2, 8, 1, key=key), 10, key=jax.random.key(2))
    folds = resample.folds(200, 5, key=jax.random.key(3))
    data = x[:200], labels[:200]
    run, held_out = ee.methods.cross_fit(
        ensemble, loss, optax.adam(1e-2), data, folds, x=x[:200], epochs=20, batch_size=16, key=jax.random.key(4)
    )
    fitted = conformal.cross_conformal(held_out.mean, labels[:200], folds, level=0.8)
    covered = scores.set_coverage(fitted(ee.predict(run.ensemble, x[200:])), labels[200:])
    # Hoeffding, at the guarantee of 0.6 less its small term: a false alarm in a million.
    assert covered > 0.6 - 2 * 4 / 205 - np.sqrt(np.log(1e6) / 200)


@pytest.mark.usefixtures("unhooked")
def test_messages():
    fit = lambda held_out, folds: conformal.cross_conformal(held_out, LABELS[OLD], folds, level=0.8)
    with pytest.raises(ValueError, match="`held_out` without NaN"):
        fit(np.where(np.arange(99)[:, None] == 4, np.nan, HELD_OUT), FOLDS)
    with pytest.raises(ValueError, match=r"`held_out` of shape \(rows, classes\)"):
        fit(LOGITS[:, OLD], FOLDS)
    twice = resample.from_splits([(np.arange(50), np.arange(50, 99)), (np.arange(50), np.arange(51, 99))], 99)
    with pytest.raises(
        ValueError, match="hold out every row once.\n  got 98 others, the first is row 0, which 0 folds"
    ):
        fit(HELD_OUT, twice)
    with pytest.raises(ValueError, match="expected 99 rows, got 3|predictions of all rows of the folds"):
        conformal.cross_conformal(HELD_OUT[:50], LABELS[:50], FOLDS, level=0.8)
    with pytest.raises(ValueError, match="equally many members for each fold"):
        fit(HELD_OUT, FOLDS)(LOGITS[:2, NEW])
