"""Thresholds for each class and each group: loops over groups, and coverage where one threshold fails."""

import warnings

import equinox as eqx
import jax
import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble import conformal, scores

RNG = np.random.default_rng(0)
LABELS = RNG.integers(3, size=90)
GROUPS = RNG.integers(4, size=90)
LOGITS = (1.5 * RNG.normal(size=(90, 3)) + np.eye(3)[LABELS] * (1 + GROUPS[:, None])).astype(np.float32)
OLD, NEW = slice(0, 80), slice(80, None)
VALUES = RNG.normal(size=80).astype(np.float32)


def test_quantile_of_a_group_is_that_of_its_rows():
    mask = RNG.uniform(size=80) < 0.8
    spoilt, groups = np.where(mask, VALUES, np.nan), np.where(mask, GROUPS[OLD], -1)
    fit = lambda values, groups, mask: conformal.group_quantile(
        values, groups, level=0.7, num_groups=4, row_weights=mask
    )
    want = [conformal.quantile(VALUES[mask & (GROUPS[OLD] == g)], level=0.7) for g in range(4)]
    np.testing.assert_array_equal(fit(spoilt, groups, mask), want)
    np.testing.assert_array_equal(jax.jit(fit)(spoilt, groups, mask), want)
    assert not np.array_equal(fit(VALUES, (GROUPS[OLD] + 1) % 4, mask), want)
    # A NaN spoils its own group only, and a group that is not one takes part in none.
    values = np.where((np.arange(80) == np.flatnonzero(mask & (GROUPS[OLD] == 2))[0]), np.nan, VALUES)
    got = np.asarray(jax.jit(fit)(values, groups, mask))
    assert np.isnan(got[2])
    np.testing.assert_array_equal(np.delete(got, 2), np.delete(want, 2))
    np.testing.assert_array_equal(jax.jit(fit)(VALUES, groups, np.ones(80, bool)), want)


@pytest.mark.parametrize("score", ["lac", "aps", pytest.param("top_k", marks=pytest.mark.slow)])
def test_one_group_is_the_fit_of_its_rows(score):
    fitted = conformal.group_conditional(LOGITS[OLD], LABELS[OLD], GROUPS[OLD], level=0.7, num_groups=4, score=score)
    fit = getattr(conformal, score)
    got = np.asarray(fitted(LOGITS, GROUPS))
    for g in range(4):
        own = GROUPS[OLD] == g
        want = fit(LOGITS[OLD], LABELS[OLD], level=0.7, row_weights=own)(LOGITS)
        np.testing.assert_array_equal(got[GROUPS == g], want[GROUPS == g])
    assert not np.array_equal(fit(LOGITS[OLD], LABELS[OLD], level=0.7)(LOGITS), got)


@pytest.mark.parametrize("score", ["lac", pytest.param("aps", marks=pytest.mark.slow), "top_k"])
def test_a_class_has_the_fit_of_its_rows(score):
    fitted = conformal.class_conditional(LOGITS[OLD], LABELS[OLD], level=0.7, score=score)
    fit = getattr(conformal, score)
    got = np.asarray(fitted(LOGITS))
    for c in range(3):
        own = LABELS[OLD] == c
        want = fit(LOGITS[OLD], LABELS[OLD], level=0.7, row_weights=own)(LOGITS)
        np.testing.assert_array_equal(got[:, c], want[:, c])


def test_rare_classes_are_covered():
    # Class 1 has a tenth of the rows and is recognised less well. One threshold covers it far too seldom.
    rng = np.random.default_rng(0)
    labels = (rng.uniform(size=8000) < 0.1).astype(int)
    score = rng.normal(size=8000) + np.where(labels == 1, -0.5, 1.5)
    logits = np.stack([score, 0 * score], axis=-1).astype(np.float32)
    old, new = slice(0, 4000), slice(4000, None)
    marginal = conformal.lac(logits[old], labels[old], level=0.9)(logits[new])
    own = conformal.class_conditional(logits[old], labels[old], level=0.9)(logits[new])
    by_class = [np.asarray(scores.class_conditional_coverage(sets, labels[new]).mean) for sets in (marginal, own)]
    count = np.asarray(scores.class_conditional_coverage(own, labels[new]).count)
    error = 6 * np.sqrt(0.09 * 2 / count)
    assert abs(scores.set_coverage(marginal, labels[new]) - 0.9) < error[0]
    assert by_class[0][1] < 0.7
    assert (np.abs(by_class[1] - 0.9) < error).all()


def test_too_few_rows_of_a_class_and_none_of_a_group():
    labels = np.where(np.arange(80) < 4, 2, LABELS[OLD] % 2)
    with pytest.warns(
        UserWarning, match="`conformal.class_conditional`: 1 of 3 classes have too few rows for level 0.9"
    ):
        fitted = conformal.class_conditional(LOGITS[OLD], labels, level=0.9)
    np.testing.assert_array_equal(np.isinf(fitted.threshold), [False, False, True])
    assert np.asarray(fitted(LOGITS[NEW]))[:, 2].all()
    assert not np.asarray(fitted(LOGITS[NEW])).all()
    fit = lambda groups: conformal.group_conditional(LOGITS[OLD], LABELS[OLD], groups, level=0.7, num_groups=5)
    with pytest.warns(UserWarning, match="1 of 5 groups have too few rows for level 0.7, the first is 4 with 0"):
        fitted = fit(GROUPS[OLD])
    assert np.asarray(fitted(LOGITS[NEW], np.full(10, 4))).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        traced = jax.jit(lambda g, new: fit(g)(LOGITS[NEW], new))
        np.testing.assert_array_equal(traced(GROUPS[OLD], GROUPS[NEW]), fitted(LOGITS[NEW], GROUPS[NEW]))
        # While tracing, a row of no group has all classes; negative groups do not count from the end.
        assert np.asarray(traced(GROUPS[OLD], np.where(GROUPS[NEW] > 1, -1, 7))).all()


def test_files_shapes_and_nan(tmp_path):
    fitted = conformal.group_conditional(LOGITS[OLD], LABELS[OLD], GROUPS[OLD], level=0.7, num_groups=4)
    ee.save(tmp_path / "fitted", fitted)
    assert eqx.tree_equal(ee.load(tmp_path / "fitted", jax.tree.map(lambda x: 0 * x, fitted)), fitted)
    new = LOGITS[NEW].copy()
    new[3] = np.nan
    shaped = fitted(new.reshape(2, 5, 3), GROUPS[NEW].reshape(2, 5)).reshape(10, 3)
    assert np.asarray(shaped)[3].all()
    np.testing.assert_array_equal(np.delete(shaped, 3, 0), np.delete(fitted(LOGITS[NEW], GROUPS[NEW]), 3, 0))


@pytest.mark.usefixtures("unhooked")
def test_messages():
    fit = lambda groups, **more: conformal.group_quantile(VALUES, groups, **({"level": 0.7, "num_groups": 4} | more))
    with pytest.raises(ValueError, match="`groups` from 0 to 2, as `num_groups` is 3.\n  got 3 at index"):
        fit(GROUPS[OLD], num_groups=3)
    with pytest.raises(TypeError, match="needs integer `groups`.*\n  got dtype <U1\nNumber the groups"):
        fit(GROUPS[OLD].astype("U1"))
    with pytest.raises(TypeError, match="needs integer `groups`.\n  got dtype float"):
        fit(GROUPS[OLD].astype(np.float32))
    with pytest.raises(ValueError, match=r"one of `groups` per row.\n  expected \(80,\), got \(90,\)"):
        fit(GROUPS)
    with pytest.raises(
        ValueError, match="`conformal.class_conditional` needs `score` to be one of 'lac', 'aps', 'top_k'"
    ):
        conformal.class_conditional(LOGITS, LABELS, level=0.7, score="raps")
    fitted = conformal.class_conditional(LOGITS, LABELS, level=0.7)
    with pytest.raises(ValueError, match="logits of the classes that it was fitted on.\n  expected 3, got 4"):
        fitted(np.zeros((5, 4), np.float32))
