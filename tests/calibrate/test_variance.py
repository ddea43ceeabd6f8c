import jax
import numpy as np
import pytest

from eqx_ensemble import calibrate, combine, scores

RNG = np.random.default_rng(0)
MEAN = RNG.normal(size=(3, 40)).astype(np.float32)
VARIANCE = RNG.uniform(0.2, 2, size=(3, 40)).astype(np.float32)
TARGETS = 3 * RNG.normal(size=40).astype(np.float32)


def test_closed_form_and_its_minimum():
    fitted = calibrate.variance(MEAN, VARIANCE, TARGETS, pool="members")
    want = np.mean((np.float64(TARGETS) - MEAN) ** 2 / VARIANCE, axis=1)
    np.testing.assert_allclose(fitted.scale, want, rtol=1e-5)
    np.testing.assert_allclose(fitted(MEAN, VARIANCE).variance, VARIANCE * want[:, None], rtol=1e-5)
    np.testing.assert_array_equal(fitted(MEAN, VARIANCE).mean, MEAN)
    for i in range(3):
        at = lambda factor, i=i: scores.nll_gaussian(MEAN[i], VARIANCE[i] * np.float32(factor * want[i]), TARGETS)
        assert at(1) < min(at(0.8), at(1.25))
    assert (np.abs(want - 1) > 0.5).all()


def test_of_the_combination():
    weights = np.array([2, 0, 1])
    spoilt = MEAN.copy()
    spoilt[1] = np.nan
    fitted = calibrate.variance(spoilt, VARIANCE, TARGETS, pool="mixture", weights=weights)
    combined = combine.gaussian(MEAN, VARIANCE, weights=weights)
    want = np.mean((TARGETS - np.float64(combined.mean)) ** 2 / combined.variance)
    np.testing.assert_allclose(fitted.scale, [want], rtol=1e-5)
    got = fitted(spoilt, VARIANCE)
    assert got.mean.shape == got.variance.shape == (1, 40)
    np.testing.assert_allclose(got.variance[0], combined.variance * want, rtol=1e-5)
    assert not np.allclose(fitted.scale, calibrate.variance(MEAN, VARIANCE, TARGETS, pool="mixture").scale, rtol=1e-2)


def test_an_offset_costs_no_precision():
    mean, targets = np.round(MEAN, 2) + np.float32(1e4), np.round(TARGETS, 2) + np.float32(1e4)
    want = np.mean((np.float64(targets) - np.float64(mean).mean(0)) ** 2
                   / (VARIANCE.mean(0) + np.float64(mean).var(0)))  # fmt: skip
    np.testing.assert_allclose(calibrate.variance(mean, VARIANCE, targets, pool="mixture").scale, want, rtol=1e-3)
    careless = (mean**2).mean(0) - mean.mean(0) ** 2
    assert np.abs(careless - np.float64(mean).var(0)).max() > 1


def test_masks_and_shapes():
    mask = np.arange(40) % 3 > 0
    spoilt = np.where(mask, VARIANCE, -1)
    got = calibrate.variance(MEAN, spoilt, TARGETS, pool="members", row_weights=mask)
    want = calibrate.variance(MEAN[:, mask], VARIANCE[:, mask], TARGETS[mask], pool="members")
    np.testing.assert_allclose(got.scale, want.scale, rtol=1e-5)
    square = (x.reshape(*x.shape[:-1], 5, 8) for x in (MEAN, VARIANCE, TARGETS))
    flat = calibrate.variance(MEAN, VARIANCE, TARGETS, pool="members")
    np.testing.assert_allclose(calibrate.variance(*square, pool="members").scale, flat.scale, rtol=1e-5)
    assert not np.allclose(flat.scale, want.scale, rtol=1e-2)


def test_fits_inside_jit():
    traced = jax.jit(lambda *x: calibrate.variance(*x, pool="mixture"))(MEAN, VARIANCE, TARGETS)
    eager = calibrate.variance(MEAN, VARIANCE, TARGETS, pool="mixture")
    np.testing.assert_allclose(traced.scale, eager.scale, rtol=1e-5)


@pytest.mark.usefixtures("unhooked")
def test_messages():
    with pytest.raises(ValueError, match="the predicted means.\n  member 0: the factor would be 0"):
        calibrate.variance(MEAN, VARIANCE, MEAN[0], pool="members")
    with pytest.raises(ValueError, match="variances above zero"):
        calibrate.variance(MEAN, 0 * VARIANCE, TARGETS, pool="members")
    fitted = calibrate.variance(MEAN, VARIANCE, TARGETS, pool="mixture")
    with pytest.raises(ValueError, match="expected 3 members, got 1"):
        fitted(MEAN[:1], VARIANCE[:1])


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_targets_that_are_not_finite_are_refused(wrong):
    mean, variance, targets = np.zeros((1, 3), np.float32), np.ones((1, 3), np.float32), np.array([1, wrong, 2])
    with pytest.raises(ValueError, match=r"finite `targets`.\n  got (nan|inf) at index \(1,\)"):
        calibrate.variance(mean, variance, targets, pool="mixture")
    fitted = calibrate.variance(mean, variance, targets, pool="mixture", row_weights=np.isfinite(targets))
    np.testing.assert_allclose(fitted.scale, 2.5)
    with pytest.raises(ValueError, match="finite means and variances, and .*\n  .*nan"):
        calibrate.variance(mean * np.nan, variance, np.ones(3), pool="mixture")
