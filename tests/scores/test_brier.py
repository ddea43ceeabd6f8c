import jax
import numpy as np
import pytest

from eqx_ensemble import scores


def _binary(probability):
    p = np.asarray(probability, np.float64)
    return np.log(np.stack([1 - p, p], axis=-1))[None].astype(np.float32)


def _random(seed=0, shape=(3, 200, 4)):
    rng = np.random.default_rng(seed)
    labels = rng.integers(shape[-1], size=shape[1:-1])
    return (2 * rng.normal(size=shape) + np.eye(shape[-1])[labels]).astype(np.float32), labels


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


@pytest.mark.parametrize("binning", ["width", "mass"])
@pytest.mark.parametrize("num_bins", [1, 3, 15])
def test_parts_add_up_to_the_score(num_bins, binning):
    logits, labels = _random()
    mask, weights = np.arange(200) % 4 > 0, np.array([2, 0, 1])
    options = {"row_weights": mask, "weights": weights}
    parts = scores.decompose_brier(logits, labels, num_bins=num_bins, binning=binning, **options)
    want = scores.brier(logits, labels, **options)
    np.testing.assert_allclose(parts.reliability - parts.resolution + parts.uncertainty + parts.within_bins, want, 1e-5)
    assert not np.allclose(parts.reliability - parts.resolution + parts.uncertainty, want, rtol=1e-4)
    assert min(parts.reliability, parts.resolution, parts.uncertainty) >= 0


def test_uncertainty_is_that_of_the_frequencies():
    logits, labels = _random()
    share = np.bincount(labels, minlength=4) / len(labels)
    got = scores.decompose_brier(logits, labels).uncertainty
    np.testing.assert_allclose(got, np.sum(share * (1 - share)), rtol=1e-5)
    np.testing.assert_allclose(scores.decompose_brier(logits[:, ::-1], labels).uncertainty, got, rtol=1e-6)
    assert not np.allclose(scores.decompose_brier(logits, labels % 2).uncertainty, got, rtol=1e-2)


def test_climatology_is_all_uncertainty():
    labels = np.array([0, 1, 1, 2] * 10)
    logits = np.log(np.tile([0.25, 0.5, 0.25], (1, 40, 1))).astype(np.float32)
    parts = scores.decompose_brier(logits, labels)
    np.testing.assert_allclose([parts.reliability, parts.resolution], 0, atol=1e-7)
    np.testing.assert_allclose(parts.uncertainty, scores.brier(logits, labels), rtol=1e-6)
    sharper = scores.decompose_brier(2 * logits, labels)
    assert sharper.reliability > 1e-3


def test_jit_vmap_and_nan():
    logits, labels = _random()
    eager = scores.decompose_brier(logits, labels)
    for got in (jax.jit(scores.decompose_brier)(logits, labels), eager):
        np.testing.assert_allclose(got, eager, rtol=1e-5)
    twice = jax.vmap(scores.decompose_brier)(np.stack([logits, logits]), np.stack([labels, labels]))
    np.testing.assert_allclose(twice.resolution, [eager.resolution] * 2, rtol=1e-5)
    logits[0, 3] = np.nan
    assert np.isnan(scores.decompose_brier(logits, labels).reliability)
