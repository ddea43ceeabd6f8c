"""Scores of classes: closed forms, calibration in bins, and what other libraries give."""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import scores

special = pytest.importorskip("scipy.special")


def _data(shape=(5, 40, 4), seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(shape[-1], size=shape[1:-1])
    logits = 2 * rng.normal(size=shape) + 2 * np.eye(shape[-1])[labels]
    return logits.astype(np.float32), labels


def test_ties_go_to_the_lowest_class():
    logits, labels = np.zeros((2, 4, 4), np.float32), np.arange(4)
    for got, want in (
        (scores.accuracy(logits, labels, reduction="none"), [1, 0, 0, 0]),
        (scores.top_k_accuracy(logits, labels, k=2, reduction="none"), [1, 1, 0, 0]),
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [bool, np.uint32])
def test_labels_of_any_integer_type(dtype, unhooked):
    logits, labels = _data((2, 6, 2 if dtype is bool else 300))
    labels = labels % 100
    for score in (scores.nll, scores.brier, scores.accuracy):
        np.testing.assert_array_equal(score(logits, labels.astype(dtype)), score(logits, labels))


def test_nan_predictions_are_nan_and_not_right_or_wrong():
    logits, labels = _data((3, 4, 3))
    logits[1, 2] = np.nan
    top_2 = functools.partial(scores.top_k_accuracy, k=2)
    for score in (scores.nll, scores.brier, scores.accuracy, scores.mean_member_accuracy, top_2):
        rows = score(logits, labels, reduction="none")
        np.testing.assert_array_equal(np.isnan(rows), [False, False, True, False])
    assert np.isnan(scores.balanced_accuracy(logits, labels))
    assert np.isfinite(scores.balanced_accuracy(logits, labels, row_weights=np.arange(4) != 2))


def _binary(probability):
    p = np.asarray(probability, np.float64)
    return np.log(np.stack([1 - p, p], axis=-1))[None].astype(np.float32)


def test_murphys_parts_by_hand():
    # Ten days of rain forecasts: 0.2 on five (one rains), 0.6 on five (four rain). Each part counts for both classes.
    logits = _binary([0.2] * 5 + [0.6] * 5)
    labels = np.array([1, 0, 0, 0, 0, 1, 1, 1, 1, 0])
    parts = scores.decompose_brier(logits, labels, num_bins=10)
    np.testing.assert_allclose(parts.reliability, 2 * (0.5 * 0 + 0.5 * 0.2**2), rtol=1e-5)
    np.testing.assert_allclose(parts.resolution, 2 * (0.5 * 0.3**2 + 0.5 * 0.3**2), rtol=1e-5)
    np.testing.assert_allclose(parts.uncertainty, 2 * 0.25, rtol=1e-6)
    np.testing.assert_allclose(parts.within_bins, 0, atol=1e-7)
    # With all rows in one bin the resolution is zero, and the remainder contains it.
    parts = scores.decompose_brier(logits, labels, num_bins=1)
    np.testing.assert_allclose(parts.resolution, 0, atol=1e-7)
    assert abs(parts.within_bins) > 0.05


def test_edges_belong_to_the_bin_below():
    # 0.5 is an edge of four bins and the only value in (0.25, 0.5]; in [0.5, 0.75) the errors would nearly cancel.
    confidence = np.array([0.5, 0.6], np.float32)
    logits = np.log(np.stack([confidence, 1 - confidence], axis=-1))[None]
    got = scores.ece(logits, np.array([1, 0]), num_bins=4)
    np.testing.assert_allclose(got, (0.5 + 0.4) / 2, rtol=1e-5)


def test_confidence_that_rounds_above_one_stays_in_the_last_bin():
    logits = np.zeros((7, 100, 3), np.float32)
    logits[..., 0] = 40.0
    np.testing.assert_allclose(scores.ece(logits, np.zeros(100, int)), 0, atol=1e-6)
    np.testing.assert_allclose(scores.ece(logits, np.ones(100, int)), 1, rtol=1e-6)


def test_larger_logits_make_an_overconfident_ensemble_worse():
    logits, labels = _data((2, 200, 4))
    assert jax.grad(lambda scale: scores.ece(scale * logits, labels))(jnp.float32(3.0)) > 0


def test_rows_of_one_confidence_stay_in_one_bin():
    # Two bins of three rows each would tear 0.7, 0.7 apart: right and wrong ones, whose errors would not cancel.
    confidence = np.array([0.6, 0.7, 0.7, 0.7, 0.7, 0.8])
    labels = np.array([0, 0, 0, 0, 1, 0])
    logits = np.log(np.stack([confidence, 1 - confidence], axis=-1))[None].astype(np.float32)
    first, second = abs(5 * 1 - 1 - (0.6 + 4 * 0.7)), abs(1 - 0.8)
    got = scores.ece(logits, labels, num_bins=2, binning="mass")
    np.testing.assert_allclose(got, (first + second) / 6, rtol=1e-5)


def test_debiased_ece_takes_off_the_mean_over_resampled_frequencies():
    logits, labels = _data((5, 300, 4))
    p = special.softmax(np.float64(logits), -1).mean(0)
    confidence, right = p.max(-1), p.argmax(-1) == labels
    _, index = np.unique(np.ceil(10 * confidence), return_inverse=True)
    count, sure, accurate = (np.bincount(index, x) for x in (np.ones(300), confidence, right))
    sure, accurate = sure / count, accurate / count
    plain = np.sum(count * np.abs(accurate - sure)) / count.sum()
    noise = np.sqrt(accurate * (1 - accurate) / count)
    drawn = np.random.default_rng(0).normal(accurate, noise, size=(200_000, len(count)))
    resampled = np.sum(count * np.abs(drawn - sure), axis=-1) / count.sum()
    got = scores.ece(logits, labels, num_bins=10, debiased=True)
    assert abs(got - (2 * plain - resampled.mean())) < 6 * resampled.std() / np.sqrt(200_000) + 1e-6
    assert plain - got > 1e-3


def test_bins_of_a_single_row_are_left_out_of_the_debiased_square():
    logits = np.log(np.array([[[0.9, 0.1], [0.6, 0.4], [0.62, 0.38]]], np.float32))
    got = scores.squared_calibration_error(logits, np.array([1, 0, 1]), num_bins=2, binning="width")
    np.testing.assert_allclose(got, 3 / 3 * ((1 / 3 - 2.12 / 3) ** 2 - (1 / 3) * (2 / 3) / 2), rtol=1e-4)
    got = scores.squared_calibration_error(logits, np.array([1, 0, 1]), num_bins=4, binning="width")
    np.testing.assert_allclose(got, 2 / 3 * ((1 / 2 - 1.22 / 2) ** 2 - (1 / 2) * (1 / 2)), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("binning", ["mass"])
def test_many_rows_of_one_confidence(binning):
    # 100,000 equal numbers added one after another in float32 have a mean that is wrong by 7e-4.
    logits = np.log(np.tile(np.array([0.97, 0.03], np.float32), (1, 100_000, 1)))
    labels = (np.arange(100_000) % 100 >= 97).astype(int)
    np.testing.assert_allclose(scores.ece(logits, labels, binning=binning), 0, atol=1e-6)
    np.testing.assert_allclose(scores.ece(logits, 1 - labels, binning=binning), 0.94, rtol=1e-6)
    parts = scores.decompose_brier(logits, labels, binning=binning)
    np.testing.assert_allclose(parts, [0, 0, 2 * 0.97 * 0.03, 0], rtol=1e-5, atol=1e-9)


def _gaussians(shape=(4, 20), seed=0):
    rng = np.random.default_rng(seed)
    mean, targets = rng.normal(size=shape), rng.normal(size=shape[1:])
    return mean.astype(np.float32), rng.uniform(0.1, 3, size=shape).astype(np.float32), targets.astype(np.float32)


@pytest.mark.parametrize("name", ["nll", "ece", "crps_gaussian_mixture"])
@pytest.mark.parametrize("option", [{}, {"reduction": "none"}, {"num_bins": 2}])
def test_per_member_is_the_loop_over_members(name, option):
    score, inputs = getattr(scores, name), _gaussians() if "gaussian" in name else _data((4, 20, 3))
    if not set(option) <= set(inspect.signature(score).parameters):
        return
    *predictions, target = inputs
    got = scores.per_member(score, *inputs, **option)
    alone = [score(*(x[[i]] for x in predictions), target, **option) for i in range(4)]
    np.testing.assert_allclose(got, alone, rtol=1e-5)
    assert not np.allclose(got, score(*inputs, **option), rtol=1e-2)


@pytest.mark.usefixtures("unhooked")
def test_messages():
    (logits, labels), (mean, variance, targets) = _data((4, 20, 3)), _gaussians()
    with pytest.raises(ValueError, match="equally many members, at least one"):
        scores.per_member(scores.nll_gaussian_mixture, mean, variance[:3], targets)
    with pytest.raises(ValueError, match="one weight per member"):
        scores.per_member(scores.nll, logits, labels, weights=np.ones(4))
    # The score's own checks still see the target, which is not traced.
    with pytest.raises(ValueError, match="labels from 0 to 2"):
        scores.per_member(scores.nll, logits, labels + 3)


RNG = np.random.default_rng(0)
JOINT_LOGITS, JOINT_LABELS, KEY = 2 * RNG.normal(size=(4, 5, 3)), RNG.integers(3, size=5), jax.random.key(0)
JOINT_WEIGHTS = np.array([0.4, 0.1, 0.2, 0.3])
LOG_SCORES = special.log_softmax(JOINT_LOGITS, axis=-1)[:, np.arange(5), JOINT_LABELS]


def joint(rows):
    return -special.logsumexp(LOG_SCORES[:, list(rows)].sum(axis=1), b=JOINT_WEIGHTS)


@pytest.mark.slow
@pytest.mark.parametrize("row_weights", [None, np.array([1.0, 2.0, 0.0, 3.0, 1.0])])
def test_dyadic_sampling_is_the_sum_over_all_sets(row_weights):
    share = np.full(5, 0.2) if row_weights is None else row_weights / row_weights.sum()
    # All pairs of anchors and all rows drawn of them, by their probabilities.
    pairs = [(pair, share[pair[0]] * share[pair[1]] / 2**4) for pair in itertools.product(range(5), repeat=2)]
    want = sum(chance * joint(rows) for pair, chance in pairs for rows in itertools.product(pair, repeat=4))
    spoilt = np.where(share > 0, LOG_SCORES, np.nan)
    options = {"num_sets": 40_000, "weights": JOINT_WEIGHTS, "row_weights": row_weights, "key": KEY}
    got = scores.joint_nll(spoilt, size=4, **options)
    values = np.asarray(scores.joint_nll(spoilt, size=4, reduction="none", **options))
    assert values.shape == (40_000,)
    np.testing.assert_allclose(got, values.mean(), rtol=1e-5)
    error = values.std() / 200
    assert abs(got - want) < 5 * error
    # Neither independent rows, nor the product of single rows.
    others = scores.joint_nll(spoilt, size=4, num_anchors=1000, **options | {"num_sets": 4000})
    assert abs(others - want) > 20 * error
    assert abs(4 * share @ [joint([i]) for i in range(5)] - want) > 20 * error


def test_a_member_to_which_all_labels_are_impossible():
    options = {"num_sets": 50, "key": KEY}
    excluded = LOG_SCORES.copy()
    excluded[0] = -np.inf
    rest = scores.joint_nll(LOG_SCORES, **options, weights=JOINT_WEIGHTS * [0, 1, 1, 1])
    of = lambda x: scores.joint_nll(x, **options, weights=JOINT_WEIGHTS)
    np.testing.assert_allclose(of(excluded), rest - np.log(0.6), rtol=1e-5)
    assert np.isfinite(jax.grad(of)(excluded)).all()
