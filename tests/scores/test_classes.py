"""Scores of classes: closed forms, calibration in bins, and what other libraries give."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import scores

metrics = pytest.importorskip("sklearn.metrics")
special = pytest.importorskip("scipy.special")


def _data(shape=(5, 40, 4), seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(shape[-1], size=shape[1:-1])
    logits = 2 * rng.normal(size=shape) + 2 * np.eye(shape[-1])[labels]
    return logits.astype(np.float32), labels


def test_closed_forms():
    logits = jnp.log(jnp.array([[[0.9, 0.1, 0.0]], [[0.3, 0.7, 0.0]]]))
    np.testing.assert_allclose(scores.nll(logits, np.array([1])), -np.log(0.4), rtol=1e-6)
    np.testing.assert_allclose(scores.nll(logits, np.array([1]), weights=np.array([1, 0])), -np.log(0.1), rtol=1e-6)
    np.testing.assert_allclose(scores.brier(logits, np.array([1])), 0.6**2 + 0.6**2, rtol=1e-6)
    np.testing.assert_allclose(scores.brier(logits[:1, :, ::2], np.array([1])), 2, rtol=1e-6)  # the worst there is
    assert scores.nll(logits, np.array([2])) == np.inf


def test_nll_far_below_the_smallest_float():
    logits = np.array([[[0.0, -200.0]], [[0.0, -201.0]]], np.float32)
    want = np.log(2) - np.logaddexp(-200.0, -201.0)
    np.testing.assert_allclose(scores.nll(logits, np.array([1])), want, rtol=1e-6)


def test_ties_go_to_the_lowest_class():
    logits = np.zeros((2, 1, 3), np.float32)
    assert scores.accuracy(logits, np.array([0])) == 1
    assert scores.accuracy(logits, np.array([1])) == 0


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32])
def test_labels_of_any_integer_type(dtype):
    logits, labels = _data((2, 6, 300))
    labels = labels % 100
    for score in (scores.nll, scores.brier, scores.accuracy):
        np.testing.assert_array_equal(score(logits, labels.astype(dtype)), score(logits, labels))


def test_nan_predictions_are_nan_and_not_right_or_wrong():
    logits, labels = _data((3, 4, 3))
    logits[1, 2] = np.nan
    for score in (scores.nll, scores.brier, scores.accuracy, scores.mean_member_accuracy):
        rows = score(logits, labels, reduction="none")
        np.testing.assert_array_equal(np.isnan(rows), [False, False, True, False])


def test_booleans_are_labels_of_two_classes(unhooked):
    logits, labels = jax.random.normal(jax.random.key(0), (3, 6, 2)), np.arange(6) % 2
    np.testing.assert_array_equal(scores.nll(logits, labels == 1), scores.nll(logits, labels))


RNG = np.random.default_rng(0)
LOGITS, LABELS = RNG.normal(size=(1, 60, 5)).astype(np.float32), RNG.integers(5, size=60)


def test_ties_go_to_the_lowest_class_of_top_k():
    logits = np.zeros((1, 4, 4), np.float32)
    got = scores.top_k_accuracy(logits, np.arange(4), k=2, reduction="none")
    np.testing.assert_array_equal(got, [1, 1, 0, 0])


def test_members_are_mixed_before_classes_are_ranked():
    logits = np.log(np.array([[[0.5, 0.4, 0.1]], [[0.1, 0.4, 0.5]]], np.float32))
    np.testing.assert_array_equal(scores.top_k_accuracy(logits, np.array([1]), k=1), 1)
    np.testing.assert_array_equal(scores.top_k_accuracy(logits, np.array([2]), k=1, weights=np.array([0, 1])), 1)


def test_nan_is_nan():
    logits = LOGITS.copy()
    logits[0, 3, 1] = np.nan
    assert np.isnan(scores.top_k_accuracy(logits, LABELS, k=2))
    assert np.isnan(scores.balanced_accuracy(logits, LABELS))
    assert np.isfinite(scores.balanced_accuracy(logits, LABELS, row_weights=np.arange(60) != 3))


def test_worst_bin():
    p = np.asarray(jax.nn.softmax(4 * LOGITS[0]), np.float64)
    confidence, right = p.max(1), p.argmax(1) == LABELS
    index = np.ceil(confidence * 10).astype(int)
    gaps = {i: abs(right[index == i].mean() - confidence[index == i].mean()) for i in np.unique(index)}
    got = scores.mce(4 * LOGITS, LABELS, num_bins=10)
    np.testing.assert_allclose(got, max(gaps.values()), rtol=1e-5)
    assert got > scores.ece(4 * LOGITS, LABELS, num_bins=10) + 0.05
    assert not np.isclose(got, np.mean(list(gaps.values())), rtol=1e-2)
    # One bin has nothing but its mean gap.
    one = scores.ece(4 * LOGITS, LABELS, num_bins=1)
    np.testing.assert_allclose(scores.mce(4 * LOGITS, LABELS, num_bins=1), one, rtol=1e-6)


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
    np.testing.assert_allclose(scores.brier(logits, labels), 2 * (0.5 * 0.16 + 0.5 * 0.2), rtol=1e-5)
    # With all rows in one bin the resolution is zero, and the remainder contains it.
    parts = scores.decompose_brier(logits, labels, num_bins=1)
    np.testing.assert_allclose(parts.resolution, 0, atol=1e-7)
    assert abs(parts.within_bins) > 0.05


def _data_of_calibration(shape=(5, 300, 4), seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(shape[-1], size=shape[1:-1])
    logits = 2 * rng.normal(size=shape) + np.eye(shape[-1])[labels]
    return logits.astype(np.float32), labels


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


def test_gradient_sharpens_or_softens():
    logits, labels = _data_of_calibration((2, 200, 4))
    slope = jax.jit(jax.grad(lambda scale: scores.ece(scale * logits, labels)))
    # Larger logits make an overconfident ensemble worse.
    assert slope(jnp.float32(3.0)) > 0


def _equal_mass(values, num_bins):
    """Bin numbers by the edges that `numpy.quantile` finds, which belong to the bin below."""
    edges = np.quantile(values, np.arange(1, num_bins) / num_bins, method="lower")
    return np.searchsorted(edges, values, side="left")


def _gaps(probability, hits, index, num_bins):
    """Rows, mean probability and frequency of the bins that hold any."""
    found = [k for k in range(num_bins) if (index == k).any()]
    return np.array([[(index == k).sum(), probability[index == k].mean(), hits[index == k].mean()] for k in found]).T


def _mixture(logits):
    exponentials = np.exp(np.asarray(logits, np.float64))
    return (exponentials / exponentials.sum(-1, keepdims=True)).mean(0)


@pytest.mark.parametrize("num_bins", [1, 7, 20])
def test_bins_of_equal_mass(num_bins):
    logits, labels = _data_of_calibration()
    p = _mixture(logits)
    confidence, right = p.max(-1), p.argmax(-1) == labels
    count, sure, accurate = _gaps(confidence, right, _equal_mass(confidence, num_bins), num_bins)
    assert max(count) - min(count) <= 1
    want = np.sum(count * np.abs(accurate - sure)) / count.sum()
    got = scores.ece(logits, labels, num_bins=num_bins, binning="mass")
    np.testing.assert_allclose(got, want, rtol=1e-5)
    if num_bins > 1:
        assert not np.allclose(scores.ece(logits, labels, num_bins=num_bins), want, rtol=1e-3)


def test_rows_of_one_confidence_stay_in_one_bin():
    # Two bins of three rows each would tear 0.7, 0.7 apart: right and wrong ones, whose errors would not cancel.
    confidence = np.array([0.6, 0.7, 0.7, 0.7, 0.7, 0.8])
    labels = np.array([0, 0, 0, 0, 1, 0])
    logits = np.log(np.stack([confidence, 1 - confidence], axis=-1))[None].astype(np.float32)
    first, second = abs(5 * 1 - 1 - (0.6 + 4 * 0.7)), abs(1 - 0.8)
    got = scores.ece(logits, labels, num_bins=2, binning="mass")
    np.testing.assert_allclose(got, (first + second) / 6, rtol=1e-5)
    torn = abs(3 - 2.0) + abs(2 - 2.2)
    assert not np.allclose(got, torn / 6, rtol=1e-2)


def _perfect(num_rows, seed):
    """One member whose probabilities are those that the labels are drawn with."""
    rng = np.random.default_rng(seed)
    p = rng.uniform(0.5, 1, size=num_rows)
    labels = (rng.uniform(size=num_rows) > p).astype(int)
    return np.log(np.stack([p, 1 - p], axis=-1))[None].astype(np.float32), labels


def test_debiased_errors_of_a_perfect_model_are_about_zero():
    # 300 data sets of 200 rows: the plain errors are far above zero, the debiased ones are not.
    repeats = 300
    data = [_perfect(200, seed) for seed in range(repeats)]
    logits, labels = np.stack([one for one, _ in data]), np.stack([two for _, two in data])

    def over_all(score, **options):
        values = np.asarray(jax.vmap(lambda x, y: score(x, y, **options))(logits, labels), np.float64)
        return values.mean(), values.std() / np.sqrt(repeats)

    mean, error = over_all(scores.squared_calibration_error)
    assert abs(mean) < 6 * error  # unbiased but for the bins: a false alarm in a billion
    plain, error = over_all(scores.squared_calibration_error, debiased=False)
    assert plain > 6 * error
    plain, _ = over_all(scores.ece, binning="mass")
    mean, error = over_all(scores.ece, binning="mass", debiased=True)
    # Of the l1 error the excess is known approximately only, and less than all of it is taken off.
    assert 0 < mean < 0.75 * plain - 6 * error


def test_debiased_ece_takes_off_the_mean_over_resampled_frequencies():
    logits, labels = _data_of_calibration()
    p = _mixture(logits)
    confidence, right = p.max(-1), p.argmax(-1) == labels
    index = np.searchsorted(np.arange(1, 10) / 10, confidence, side="left")
    count, sure, accurate = _gaps(confidence, right, index, 10)
    plain = np.sum(count * np.abs(accurate - sure)) / count.sum()
    rng = np.random.default_rng(0)
    drawn = rng.normal(accurate, np.sqrt(accurate * (1 - accurate) / count), size=(200_000, len(count)))
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


@pytest.mark.parametrize("binning", ["width", "mass"])
def test_many_rows_of_one_confidence(binning):
    # 100,000 equal numbers added one after another in float32 have a mean that is wrong by 7e-4.
    logits = np.log(np.tile(np.array([0.97, 0.03], np.float32), (1, 100_000, 1)))
    labels = (np.arange(100_000) % 100 >= 97).astype(int)
    np.testing.assert_allclose(scores.ece(logits, labels, binning=binning), 0, atol=1e-6)
    np.testing.assert_allclose(scores.ece(logits, 1 - labels, binning=binning), 0.94, rtol=1e-6)
    parts = scores.decompose_brier(logits, labels, binning=binning)
    np.testing.assert_allclose(parts, [0, 0, 2 * 0.97 * 0.03, 0], rtol=1e-5, atol=1e-9)
    careless = np.cumsum(np.full(100_000, 0.97, np.float32))[-1] / 100_000
    assert abs(careless - 0.97) > 1e-4


def _classes(shape=(4, 20, 3), seed=0):
    rng = np.random.default_rng(seed)
    return 2 * rng.normal(size=shape).astype(np.float32), rng.integers(shape[-1], size=shape[1:-1])


def _gaussians(shape=(4, 20), seed=0):
    rng = np.random.default_rng(seed)
    mean, targets = rng.normal(size=shape), rng.normal(size=shape[1:])
    return mean.astype(np.float32), rng.uniform(0.1, 3, size=shape).astype(np.float32), targets.astype(np.float32)


@pytest.mark.parametrize("name", ["nll", "brier", "accuracy", "mean_member_accuracy", "ece"])
def test_is_the_loop_over_members(name):
    score, (logits, labels) = getattr(scores, name), _classes()
    got = scores.per_member(score, logits, labels)
    assert got.shape == (4,)
    np.testing.assert_allclose(got, [score(logits[i : i + 1], labels) for i in range(4)], rtol=1e-5)
    assert not np.allclose(got, score(logits, labels), rtol=1e-2)


@pytest.mark.parametrize("name", ["nll_gaussian_mixture", "crps_gaussian_mixture"])
def test_all_arrays_but_the_last_are_predictions(name):
    score, (mean, variance, targets) = getattr(scores, name), _gaussians()
    got = scores.per_member(score, mean, variance, targets)
    want = [score(mean[i : i + 1], variance[i : i + 1], targets) for i in range(4)]
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_options_pass_through():
    logits, labels = _classes()
    rows = scores.per_member(scores.nll, logits, labels, reduction="none")
    assert rows.shape == (4, 20)
    np.testing.assert_allclose(rows[2], scores.nll(logits[2:3], labels, reduction="none"), rtol=1e-5)
    coarse = scores.per_member(scores.ece, logits, labels, num_bins=2)
    np.testing.assert_allclose(coarse[1], scores.ece(logits[1:2], labels, num_bins=2), rtol=1e-5)


@pytest.mark.usefixtures("unhooked")
def test_messages():
    logits, labels = _classes()
    mean, variance, targets = _gaussians()
    with pytest.raises(ValueError, match=r"equally many members, at least one.\n  got shapes \(4, 20\), \(3, 20\)"):
        scores.per_member(scores.nll_gaussian_mixture, mean, variance[:3], targets)
    with pytest.raises(ValueError, match="one weight per member"):
        scores.per_member(scores.nll, logits, labels, weights=np.ones(4))
    # The score's own checks still see the target, which is not traced.
    with pytest.raises(ValueError, match="labels from 0 to 2"):
        scores.per_member(scores.nll, logits, labels + 3)
    with pytest.raises(ValueError, match="`labels` of the rows of"):
        scores.per_member(scores.nll, logits, labels[:, None])


JOINT_LOGITS, JOINT_LABELS, KEY = 2 * RNG.normal(size=(4, 5, 3)), RNG.integers(3, size=5), jax.random.key(0)
JOINT_WEIGHTS = np.array([0.4, 0.1, 0.2, 0.3])
LOG_SCORES = special.log_softmax(JOINT_LOGITS, axis=-1)[:, np.arange(5), JOINT_LABELS]


def joint(rows, log_scores=LOG_SCORES, weights=JOINT_WEIGHTS):
    return -special.logsumexp(log_scores[:, list(rows)].sum(axis=1), b=weights)


def mean_by_all_sets(size, share):
    """The mean over all pairs of anchors and all rows drawn of them, by their probabilities."""
    total = 0.0
    for pair in itertools.product(range(5), repeat=2):
        for rows in itertools.product(pair, repeat=size):
            total += share[pair[0]] * share[pair[1]] * joint(rows) / 2**size
    return total


@pytest.mark.parametrize("row_weights", [None, np.array([1.0, 2.0, 0.0, 3.0, 1.0])])
def test_dyadic_sampling_is_the_sum_over_all_sets(row_weights):
    share = np.full(5, 0.2) if row_weights is None else row_weights / row_weights.sum()
    spoilt = np.where(share > 0, LOG_SCORES, np.nan)
    options = {"num_sets": 40_000, "weights": JOINT_WEIGHTS, "row_weights": row_weights, "key": KEY}
    got = scores.joint_nll(spoilt, size=4, **options)
    values = np.asarray(scores.joint_nll(spoilt, size=4, reduction="none", **options))
    assert values.shape == (40_000,)
    np.testing.assert_allclose(got, values.mean(), rtol=1e-5)
    error = values.std() / 200
    assert abs(got - mean_by_all_sets(4, share)) < 5 * error
    # Neither independent rows, nor members on their own, nor the product of single rows.
    others = scores.joint_nll(spoilt, size=4, num_anchors=1000, **options | {"num_sets": 4000})
    assert abs(others - mean_by_all_sets(4, share)) > 20 * error
    single = 4 * share @ [joint([i]) for i in range(5)]
    assert abs(single - mean_by_all_sets(4, share)) > 20 * error


def test_joint_scores_tell_disagreement_from_noise():
    """Coins that members call alike, and coins that each member is sure of: the same single rows, other sets."""
    sure = np.log(np.float32([[0.9, 0.1], [0.1, 0.9]]))
    log_scores = np.stack([np.repeat(sure[0], 50), np.repeat(sure[1], 50)])
    unsure = np.log(np.full((2, 100), 0.5, np.float32))
    one, other = (scores.joint_nll(x, size=1, key=KEY) for x in (log_scores, unsure))
    np.testing.assert_allclose(one, other, rtol=1e-5)
    one, other = (scores.joint_nll(x, size=10, num_anchors=1, key=KEY) for x in (log_scores, unsure))
    np.testing.assert_allclose(one, -np.log(0.5 * (0.9**10 + 0.1**10)), rtol=1e-5)
    np.testing.assert_allclose(other, 10 * np.log(2), rtol=1e-5)


def test_transforms_and_impossible_labels():
    options = {"num_sets": 50, "weights": JOINT_WEIGHTS, "key": KEY}
    value = scores.joint_nll(LOG_SCORES, **options)
    mapped = jax.jit(jax.vmap(lambda x: scores.joint_nll(x, **options)))(np.stack([LOG_SCORES, LOG_SCORES]))
    np.testing.assert_allclose(mapped, [value, value], rtol=1e-5)
    excluded = LOG_SCORES.copy()
    excluded[0] = -np.inf
    rest = scores.joint_nll(LOG_SCORES, **options | {"weights": JOINT_WEIGHTS * [0, 1, 1, 1]})
    np.testing.assert_allclose(scores.joint_nll(excluded, **options), rest - np.log(0.6), rtol=1e-5)
    slope = jax.grad(lambda x: scores.joint_nll(x, **options))(excluded)
    assert np.isfinite(slope).all()
    shaped = scores.joint_nll(np.stack([LOG_SCORES, LOG_SCORES], axis=-1), **options)
    assert shaped.shape == ()
    with jax.enable_x64(True):
        assert scores.joint_nll(LOG_SCORES, **options).dtype == np.float64
