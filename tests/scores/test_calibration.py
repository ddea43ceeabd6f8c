import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqx_ensemble import scores


def _data(shape=(5, 300, 4), seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(shape[-1], size=shape[1:-1])
    logits = 2 * rng.normal(size=shape) + np.eye(shape[-1])[labels]
    return logits.astype(np.float32), labels


def _loop(logits, labels, num_bins, weights=None):
    """One bin after another, `lower < confidence <= upper`, as in the paper."""
    exponentials = np.exp(np.asarray(logits, np.float64))
    p = np.average(exponentials / exponentials.sum(-1, keepdims=True), axis=0, weights=weights)
    confidence, right, total = p.max(-1), p.argmax(-1) == labels, 0.0
    for lower, upper in zip(np.arange(num_bins) / num_bins, np.arange(1, num_bins + 1) / num_bins, strict=True):
        inside = (confidence > lower) & (confidence <= upper)
        if inside.any():
            total += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return total


@pytest.mark.parametrize("weights", [None, np.array([0.1, 0.4, 0.2, 0.2, 0.1])])
@pytest.mark.parametrize("num_bins", [1, 10, 15, 100])
def test_is_the_loop_over_bins(num_bins, weights):
    logits, labels = _data()
    want = _loop(logits, labels, num_bins, weights)
    np.testing.assert_allclose(scores.ece(logits, labels, num_bins=num_bins, weights=weights), want, rtol=1e-4)
    shifted = scores.ece(logits, (labels + 1) % 4, num_bins=num_bins, weights=weights)
    assert not np.allclose(shifted, want, rtol=1e-2)
    if num_bins > 1:
        assert not np.allclose(scores.ece(logits, labels, num_bins=num_bins + 7, weights=weights), want, rtol=1e-3)


def test_fifteen_bins_are_the_default():
    logits, labels = _data()
    assert scores.ece(logits, labels) == scores.ece(logits, labels, num_bins=15)


def test_worked_by_hand():
    # Ten bins. (0.5, 0.6]: 0.55 right, 0.60 wrong; (0.6, 0.7]: 0.65 wrong; (0.9, 1.0]: 0.95 right, 1.00 right.
    confidence = np.array([0.55, 0.60, 0.65, 0.95, 1.00])
    labels = np.array([0, 1, 1, 0, 0])
    logits = jnp.log(jnp.stack([confidence, 1 - confidence], axis=-1))[None]
    want = (abs(1 - 1.15) + 0.65 + abs(2 - 1.95)) / 5
    np.testing.assert_allclose(scores.ece(logits, labels, num_bins=10), want, rtol=1e-5)


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


def test_rows_of_any_shape_have_equal_weight():
    logits, labels = _data((3, 6, 5, 4))
    flat = scores.ece(logits.reshape(3, 30, 4), labels.reshape(30))
    np.testing.assert_allclose(scores.ece(logits, labels), flat, rtol=1e-6)


def test_nan_is_nan():
    logits, labels = _data((2, 30, 4))
    logits[0, 3] = np.nan
    assert np.isnan(scores.ece(logits, labels))
    assert np.isfinite(scores.ece(logits, labels, weights=np.array([0, 1])))


def test_gradient_sharpens_or_softens():
    logits, labels = _data((2, 200, 4))
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
    logits, labels = _data()
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


def test_classwise_is_the_mean_over_classes():
    logits, labels = _data()
    p, each = _mixture(logits), []
    for c in range(4):
        index = np.searchsorted(np.arange(1, 10) / 10, p[:, c], side="left")
        count, probability, frequency = _gaps(p[:, c], labels == c, index, 10)
        each.append(np.sum(count * np.abs(frequency - probability)) / count.sum())
    got = scores.classwise_ece(logits, labels, num_bins=10)
    np.testing.assert_allclose(got, np.mean(each), rtol=1e-5)
    assert not np.allclose(scores.ece(logits, labels, num_bins=10), got, rtol=1e-2)


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
    logits, labels = _data()
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


@pytest.mark.usefixtures("unhooked")
def test_invalid_bins():
    logits, labels = _data((2, 30, 4))
    with pytest.raises(ValueError, match="`scores.ece` needs `num_bins` of at least 1, got 0"):
        scores.ece(logits, labels, num_bins=0)
    with pytest.raises(TypeError, match="an integer `num_bins`, got 15.0"):
        scores.ece(logits, labels, num_bins=15.0)
    with pytest.raises(ValueError, match="`binning` to be one of 'width', 'mass', got 'equal'"):
        scores.classwise_ece(logits, labels, binning="equal")


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
