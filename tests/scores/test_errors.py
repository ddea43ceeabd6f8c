import jax
import numpy as np
import pytest

from eqx_ensemble import combine, scores

RNG = np.random.default_rng(0)
PREDICTIONS, TARGETS = RNG.normal(size=(3, 30)).astype(np.float32), RNG.normal(size=30).astype(np.float32)
ROWS = RNG.exponential(size=30)


@pytest.mark.parametrize("weighted", [False, True])
def test_scikit_learn_agrees(weighted):
    metrics = pytest.importorskip("sklearn.metrics")
    rows = ROWS if weighted else None
    members = np.array([0.5, 0.0, 0.5])
    mean = PREDICTIONS[[0, 2]].mean(0)
    for name, oracle in (("mae", metrics.mean_absolute_error), ("r2", metrics.r2_score)):
        got = getattr(scores, name)(PREDICTIONS, TARGETS, weights=members, row_weights=rows)
        np.testing.assert_allclose(got, oracle(TARGETS, mean, sample_weight=rows), rtol=1e-5)
        assert not np.allclose(got, oracle(TARGETS, PREDICTIONS.mean(0), sample_weight=rows), rtol=1e-2)
        assert not np.allclose(got, oracle(mean, TARGETS, sample_weight=rows), rtol=1e-2) or name == "mae"


def test_the_mean_target_explains_nothing():
    np.testing.assert_allclose(scores.r2(np.full((1, 30), TARGETS.mean()), TARGETS), 0, atol=1e-6)
    mean = np.average(TARGETS, weights=ROWS).astype(np.float32)
    np.testing.assert_allclose(scores.r2(np.full((1, 30), mean), TARGETS, row_weights=ROWS), 0, atol=1e-6)
    assert scores.r2(TARGETS[None], TARGETS) == 1


def test_equal_targets_have_no_variance_to_explain():
    same = np.full(7, 0.1, np.float32)
    assert scores.r2(same[None] + 1, same) == -np.inf
    assert np.isnan(scores.r2(same[None], same))


def test_a_common_offset_costs_no_precision():
    offset = np.float32(2**12)
    targets, predictions = (np.round(x * 2**8).astype(np.float32) / 2**8 for x in (TARGETS, PREDICTIONS))
    got = scores.r2(predictions + offset, targets + offset)
    np.testing.assert_allclose(got, scores.r2(predictions, targets), rtol=1e-5)


def test_median_of_members():
    got = scores.mae(combine.median(PREDICTIONS)[None], TARGETS, reduction="none")
    np.testing.assert_allclose(got, np.abs(np.median(PREDICTIONS, axis=0) - TARGETS), rtol=1e-5)


def test_one_per_output():
    predictions, targets = np.stack([PREDICTIONS, 5 + PREDICTIONS], -1), np.stack([TARGETS, 5 - TARGETS], -1)
    got = jax.vmap(scores.r2, in_axes=-1)(predictions, targets)
    np.testing.assert_allclose(got, [scores.r2(predictions[..., i], targets[..., i]) for i in range(2)], rtol=1e-5)
    # Around one common mean, two outputs far from each other are explained by their offset.
    assert scores.r2(predictions, targets) > got.max()
