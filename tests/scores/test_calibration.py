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
    # 0.5 is an edge of four bins: in (0.25, 0.5] it stands alone, in [0.5, 0.75) the two errors would nearly cancel.
    confidence = np.array([0.5, 0.6], np.float32)
    logits = np.log(np.stack([confidence, 1 - confidence], axis=-1))[None]
    got = scores.ece(logits, np.array([1, 0]), num_bins=4)
    np.testing.assert_allclose(got, (0.5 + 0.4) / 2, rtol=1e-5)


def test_confidence_that_rounds_above_one_stays_in_the_last_bin():
    logits = np.zeros((7, 100, 3), np.float32)
    logits[..., 0] = 40.0
    np.testing.assert_allclose(scores.ece(logits, np.zeros(100, int)), 0, atol=1e-6)
    np.testing.assert_allclose(scores.ece(logits, np.ones(100, int)), 1, rtol=1e-6)


def test_rows_of_any_shape_count_alike():
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


@pytest.mark.usefixtures("unhooked")
def test_unfit_bins():
    logits, labels = _data((2, 30, 4))
    with pytest.raises(
        ValueError, match="`eqx_ensemble.scores.ece` needs `num_bins` of one or more.\n  got 0\n15 is us"
    ):
        scores.ece(logits, labels, num_bins=0)
