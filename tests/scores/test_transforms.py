"""What holds for every score: jit, vmap, gradients, weights and dtypes."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import scores

RNG = np.random.default_rng(0)
LABELS = RNG.integers(4, size=20)
LOGITS = (2 * RNG.normal(size=(3, 20, 4))).astype(np.float32)
MEAN, VARIANCE = RNG.normal(size=(3, 20)).astype(np.float32), RNG.uniform(0.1, 3, size=(3, 20)).astype(np.float32)
TARGETS = RNG.normal(size=20).astype(np.float32)
VECTORS, VECTOR_TARGETS = RNG.normal(size=(3, 20, 2)).astype(np.float32), RNG.normal(size=(20, 2)).astype(np.float32)

MEMBERS = {
    "nll": (LOGITS, LABELS),
    "brier": (LOGITS, LABELS),
    "accuracy": (LOGITS, LABELS),
    "mean_member_accuracy": (LOGITS, LABELS),
    "ece": (LOGITS, LABELS),
    "classwise_ece": (LOGITS, LABELS),
    "squared_calibration_error": (LOGITS, LABELS),
    "ranked_probability": (LOGITS, LABELS),
    "nll_gaussian_mixture": (MEAN, VARIANCE, TARGETS),
    "crps": (MEAN, TARGETS),
    "crps_gaussian_mixture": (MEAN, VARIANCE, TARGETS),
    "rmse": (MEAN, TARGETS),
    "mean_member_rmse": (MEAN, TARGETS),
    "energy_score": (VECTORS, VECTOR_TARGETS),
    "variogram_score": (VECTORS, VECTOR_TARGETS),
    "mce": (LOGITS, LABELS),
    "balanced_accuracy": (LOGITS, LABELS),
    "top_k_accuracy": (LOGITS, LABELS),
    "mae": (MEAN, TARGETS),
    "r2": (MEAN, TARGETS),
    "threshold_weighted_crps": (MEAN, TARGETS),
}
SINGLE = {
    "nll_gaussian": (MEAN[0], VARIANCE[0], TARGETS),
    "crps_gaussian": (MEAN[0], VARIANCE[0], TARGETS),
    "coverage": (MEAN[0] - 1, MEAN[0] + 1, TARGETS),
    "width": (MEAN[0] - VARIANCE[0], MEAN[0] + VARIANCE[1]),
    "interval_score": (MEAN[0] - 1, MEAN[0] + 1, TARGETS),
    "pinball": (MEAN[0], TARGETS),
    "dawid_sebastiani": (MEAN, TARGETS),
    "ence": (MEAN[0], VARIANCE[0], TARGETS),
    "sharpness": (VARIANCE[0],),
    "quantile_calibration_error": (VARIANCE[0] / 3,),
}
ALL = MEMBERS | SINGLE
OTHERS = {"joint_nll", "bootstrap", "decompose_brier", "per_member", "pit", "pit_gaussian_mixture", "pit_histogram"}
OTHERS |= {"rank_histogram", "set_coverage", "set_size"}
OTHERS |= {"by_group", "class_conditional_coverage", "size_stratified_coverage"}
# Of rankings, not of predictions.
OTHERS |= {"roc_curve", "precision_recall_curve", "auroc", "aupr", "fpr_at_tpr", "risk_coverage", "aurc", "excess_aurc"}
STEPS = {"accuracy", "mean_member_accuracy", "coverage", "balanced_accuracy", "top_k_accuracy"}
STEPS |= {"quantile_calibration_error"}
NO_GRADIENT = {"energy_score", "variogram_score"}


def score_of(name):
    if name in ("energy_score", "variogram_score", "interval_score", "pinball", "dawid_sebastiani"):
        pytest.importorskip("scoringrules")
    options = {
        "interval_score": {"level": 0.8},
        "pinball": {"level": 0.8},
        "squared_calibration_error": {"num_bins": 2},
        "top_k_accuracy": {"k": 2},
        "threshold_weighted_crps": {"lower": -0.5},
        "ence": {"num_bins": 3},
    }
    return functools.partial(getattr(scores, name), **options.get(name, {}))


def test_no_score_is_left_out():
    public = {name for name, value in vars(scores).items() if inspect.isfunction(value)}
    assert public == set(ALL) | OTHERS


@pytest.mark.parametrize("name", ALL)
def test_jit_vmap_and_gradient(name):
    score, arguments = score_of(name), ALL[name]
    eager = score(*arguments)
    assert eager.shape == ()
    assert eager.dtype == jnp.float32
    np.testing.assert_allclose(jax.jit(score)(*arguments), eager, rtol=1e-5)
    if name not in NO_GRADIENT:
        value, slope = jax.jit(jax.value_and_grad(score))(*arguments)
        np.testing.assert_allclose(value, eager, rtol=1e-5)
        assert np.isfinite(slope).all()
        assert name in STEPS or np.abs(slope).max() > 0
    twice = jax.vmap(score)(*(np.stack([array, array]) for array in arguments))
    np.testing.assert_allclose(twice, [eager, eager], rtol=1e-5)


@pytest.mark.parametrize("name", MEMBERS)
def test_weights(name):
    score, (*predictions, target) = score_of(name), MEMBERS[name]
    plain = score(*predictions, target)
    np.testing.assert_allclose(score(*predictions, target, weights=np.ones(3)), plain, rtol=1e-5)
    doubled = score(*(array[[0, 0, 1, 2]] for array in predictions), target)
    np.testing.assert_allclose(score(*predictions, target, weights=np.array([2, 1, 1])), doubled, rtol=1e-5)
    alone = score(*(array[1:2] for array in predictions), target)
    np.testing.assert_allclose(score(*predictions, target, weights=np.array([0, 1, 0])), alone, rtol=1e-5, atol=1e-6)
    permuted = score(*(array[[2, 0, 1]] for array in predictions), target, weights=np.array([3, 1, 2]))
    np.testing.assert_allclose(permuted, score(*predictions, target, weights=np.array([1, 2, 3])), rtol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_precisions(name):
    score, arguments = score_of(name), ALL[name]
    half = [array if array.dtype.kind == "i" else jnp.asarray(array, jnp.bfloat16) for array in arguments]
    widened = [array if array.dtype.kind == "i" else array.astype(jnp.float32) for array in half]
    got = score(*half)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, score(*widened), rtol=1e-6)
    with jax.enable_x64(True):
        double = [array if array.dtype.kind == "i" else array.astype(np.float64) for array in arguments]
        wide = score(*double)
        assert wide.dtype == jnp.float64
    np.testing.assert_allclose(score(*arguments), wide, rtol=1e-5)


KEPT = np.arange(20) % 3 > 0


@pytest.mark.parametrize("name", ALL)
def test_masks(name):
    score, arguments = score_of(name), ALL[name]
    before = [int(name in MEMBERS or name == "dawid_sebastiani")] * (len(arguments) - 1) + [0]
    rows_at = lambda array, axis, rows: np.moveaxis(np.moveaxis(array, axis, 0)[rows], 0, axis)
    want = score(*(rows_at(array, axis, KEPT) for array, axis in zip(arguments, before, strict=True)))
    spoilt = []
    for array, axis in zip(arguments, before, strict=True):
        copy = np.array(array)
        np.moveaxis(copy, axis, 0)[~KEPT] = -7 if array.dtype.kind == "i" else np.nan
        spoilt.append(copy)
    np.testing.assert_allclose(score(*spoilt, row_weights=KEPT), want, rtol=1e-5)
    np.testing.assert_allclose(
        jax.jit(lambda mask, *arrays: score(*arrays, row_weights=mask))(KEPT, *spoilt), want, rtol=1e-5
    )
    np.testing.assert_allclose(score(*arguments, row_weights=np.ones(20, bool)), score(*arguments), rtol=1e-5)
    assert not np.allclose(score(*arguments, row_weights=~KEPT), want, rtol=1e-3) or name == "coverage"
    if name not in NO_GRADIENT:
        slope = jax.jit(jax.grad(lambda x: score(x, *spoilt[1:], row_weights=KEPT)))(spoilt[0])
        assert np.isfinite(slope).all()
        assert not np.moveaxis(np.asarray(slope), before[0], 0)[~KEPT].any()
    if "reduction" in inspect.signature(score).parameters:
        rows = np.asarray(score(*spoilt, row_weights=KEPT, reduction="none"))
        assert np.isnan(rows[~KEPT]).all()
        np.testing.assert_allclose(rows[KEPT].mean(), want, rtol=1e-5)


CLASSES = [name for name, (predictions, *_) in MEMBERS.items() if predictions is LOGITS]


@pytest.mark.parametrize("name", [*CLASSES, "decompose_brier"])
@pytest.mark.parametrize("label", [-1, 4])
def test_labels_out_of_range_are_not_taken_for_wrong(name, label):
    # While tracing they cannot be refused.
    score = score_of(name)
    of_labels = jax.jit(lambda labels, mask: score(LOGITS, labels, row_weights=mask))
    labels = jnp.asarray(LABELS).at[3].set(label)
    got = of_labels(labels, jnp.ones(20, bool))
    assert all(np.isnan(part) for part in jax.tree.leaves(got))
    got = of_labels(labels, jnp.arange(20) != 3)
    assert all(np.isfinite(part) for part in jax.tree.leaves(got))
