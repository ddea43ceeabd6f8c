"""Isotonic calibration and histogram binning: every class against all others."""

import builtins
import json
import pathlib

import jax
import numpy as np
import pytest

from eqx_ensemble import calibrate, combine, scores

STORED = json.loads((pathlib.Path(__file__).parents[1] / "scores" / "figures.json").read_text())
LOGITS, LABELS = (np.asarray(STORED["data"][name]) for name in ("logits", "labels"))
FIGURES = {name: np.asarray(value) for name, value in STORED["figures"].items()}


def test_isotonic_is_scikit_learns():
    pytest.importorskip("sklearn")
    want = FIGURES["isotonic: probabilities"]
    with jax.enable_x64(True):
        fitted = calibrate.isotonic(LOGITS, LABELS, pool="mixture")
        np.testing.assert_allclose(np.exp(fitted(LOGITS)[0]), want, rtol=1e-6, atol=1e-12)
        assert not np.allclose(np.exp(calibrate.isotonic(LOGITS, LABELS, pool="members")(LOGITS)[0]), want, atol=1e-2)
    single = calibrate.isotonic(LOGITS.astype(np.float32), LABELS, pool="mixture")
    # A probability that float32 moves across a step of the function lands on the other side of it.
    assert np.mean(np.abs(np.exp(single(LOGITS)[0]) - want) < 1e-5) > 0.98


def test_isotonic_of_probabilities_that_are_close_is_scikit_learns_in_double_precision():
    regression = pytest.importorskip("sklearn.isotonic").IsotonicRegression(out_of_bounds="clip")
    # 1 - p is 8e-7 and 1e-7; 60 % and 95 % of the rows are of class 1.
    odds = np.repeat(np.float32([14, 16]), 20)
    labels = (np.arange(40) % 20 >= np.where(odds == 14, 8, 1)).astype(int)
    logits = np.stack([-np.logaddexp(0, odds), -np.logaddexp(0, -odds)], axis=-1)
    probabilities = np.exp(logits[:, 1])
    want = regression.fit(np.float64(probabilities), labels).predict(np.float64(probabilities))
    got = np.exp(calibrate.isotonic(logits[None], labels, pool="mixture")(logits[None])[0, :, 1])
    np.testing.assert_allclose(want[[0, -1]], [0.6, 0.95])
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_isotonic_of_two_classes_is_scikit_learns():
    pytest.importorskip("sklearn")
    want = FIGURES["isotonic of two classes: probabilities"]
    with jax.enable_x64(True):
        fitted = calibrate.isotonic(LOGITS[:1, :, :2], LABELS % 2, pool="mixture")
        np.testing.assert_allclose(np.exp(fitted(LOGITS[:1, :, :2])[0]), want, rtol=1e-6, atol=1e-12)
        assert not np.allclose(np.exp(combine.mixture(LOGITS[:1, :, :2])), want, atol=1e-2)


def test_isotonic_beyond_the_rows_it_was_fitted_on():
    pytest.importorskip("sklearn")
    log_p = lambda p: np.log(np.stack([1 - np.asarray(p), p], axis=-1))[None].astype(np.float32)
    fitted = calibrate.isotonic(log_p([0.3, 0.4, 0.4, 0.6, 0.6]), np.array([0, 0, 1, 0, 1]), pool="mixture")
    # Pools: 0 at 0.3, one half at 0.4 and 0.6; straight in between, constant outside.
    got = np.exp(fitted(log_p([0.1, 0.3, 0.35, 0.5, 0.9])))[0, :, 1]
    np.testing.assert_allclose(got, [0, 0, 0.25, 0.5, 0.5], atol=1e-5)


def _loop(p, labels, edges, fitted_on):
    """Histogram binning, one class and one bin after another."""
    values = np.zeros_like(p)
    for c in range(p.shape[1]):
        at_fit = np.searchsorted(edges[c], fitted_on[:, c], side="left")
        for i, k in enumerate(np.searchsorted(edges[c], p[:, c], side="left")):
            inside = at_fit == k
            values[i, c] = np.mean(labels[inside] == c) if inside.any() else p[i, c]
    total = values.sum(-1, keepdims=True)
    return np.where(total == 0, 1 / p.shape[1], values / np.where(total == 0, 1, total))


@pytest.mark.parametrize("binning", ["mass", "width"])
def test_histogram_is_the_loop(binning):
    with jax.enable_x64(True):
        p = np.asarray(np.exp(combine.mixture(LOGITS)))
        grid = np.arange(1, 6) / 6
        edges = [np.quantile(one, grid, method="lower") if binning == "mass" else grid for one in p.T]
        fitted = calibrate.histogram(LOGITS, LABELS, pool="mixture", num_bins=6, binning=binning)
        np.testing.assert_allclose(np.exp(fitted(LOGITS)[0]), _loop(p, LABELS, edges, p), rtol=1e-9, atol=1e-12)
        new = LOGITS[:, ::-1] * 0.3
        other = np.asarray(np.exp(combine.mixture(new)))
        want = _loop(other, LABELS, edges, p)
        np.testing.assert_allclose(np.exp(fitted(new)[0]), want, rtol=1e-9, atol=1e-12)
        assert not np.allclose(other, want, atol=1e-1)


def test_histogram_of_one_bin_predicts_the_frequencies():
    fitted = calibrate.histogram(LOGITS, LABELS, pool="members", num_bins=1)
    share = np.bincount(LABELS, minlength=4) / 80
    np.testing.assert_allclose(np.exp(fitted(LOGITS)), np.broadcast_to(share, LOGITS.shape), rtol=1e-5)
    finer = calibrate.histogram(LOGITS, LABELS, pool="members", num_bins=4)
    assert not np.allclose(np.exp(finer(LOGITS)), share, atol=0.1)


def test_histogram_of_two_classes():
    p = np.array([0.2, 0.2, 0.2, 0.8, 0.8])
    logits = np.log(np.stack([1 - p, p], axis=-1))[None].astype(np.float32)
    fitted = calibrate.histogram(logits, np.array([0, 0, 1, 1, 1]), pool="mixture", num_bins=2, binning="width")
    np.testing.assert_allclose(np.exp(fitted(logits))[0, :, 1], [1 / 3] * 3 + [1] * 2, rtol=1e-5)


def _logits_of(p):
    return np.log(np.stack([1 - np.asarray(p), p], axis=-1))[None].astype(np.float32)


def test_smoothing_of_a_histogram_is_laplaces_rule():
    """Two bins of three and two rows, of which one and two are of the second class."""
    logits, labels = _logits_of([0.2, 0.2, 0.2, 0.8, 0.8]), np.array([0, 0, 1, 1, 1])
    options = {"pool": "mixture", "num_bins": 2, "binning": "width"}
    for added in (1, 0.5):
        fitted = calibrate.histogram(logits, labels, smoothing=added, **options)
        want = [(1 + added) / (3 + 2 * added)] * 3 + [(2 + added) / (2 + 2 * added)] * 2
        np.testing.assert_allclose(np.exp(fitted(logits))[0, :, 1], want, rtol=1e-5)


def test_smoothing_of_steps_is_laplaces_rule():
    pytest.importorskip("sklearn")
    logits = _logits_of([0.1, 0.2, 0.3, 0.4, 0.4, 0.6, 0.6, 0.9])
    labels = np.array([0, 0, 0, 0, 1, 0, 1, 1])
    fitted = calibrate.isotonic(logits, labels, smoothing=1, pool="mixture")
    # Steps of three, four and one rows, with none, two and one of the second class.
    want = [1 / 5] * 3 + [3 / 6] * 4 + [2 / 3]
    np.testing.assert_allclose(np.exp(fitted(logits))[0, :, 1], want, rtol=1e-5)


def test_smoothed_steps_that_would_cross_are_joined():
    pytest.importorskip("sklearn")
    logits = _logits_of([0.1] + [0.5] * 20)
    labels = np.array([0] + [0] * 18 + [1] * 2)
    # Alone: 1/3 for the first row, 3/22 for the others; together: 4/25.
    fitted = calibrate.isotonic(logits, labels, smoothing=1, pool="mixture")
    np.testing.assert_allclose(np.exp(fitted(logits))[0, :, 1], 4 / 25, rtol=1e-5)


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("fit", [calibrate.isotonic, calibrate.histogram])
def test_smoothing_leaves_no_row_impossible(fit, classes):
    if fit is calibrate.isotonic:
        pytest.importorskip("sklearn")
    logits, labels = LOGITS[:, :40, :classes], LABELS[:40] % classes
    new, rest = LOGITS[:, 40:, :classes], LABELS[40:] % classes
    score = lambda fitted: scores.nll(fitted(new), rest)
    plain = fit(logits, labels, pool="mixture")
    assert np.isinf(score(plain))
    np.testing.assert_array_equal(fit(logits, labels, pool="mixture", smoothing=0.0)(new), plain(new))
    smoothed = fit(logits, labels, pool="mixture", smoothing=1.0)
    assert np.isfinite(score(smoothed))
    np.testing.assert_allclose(np.exp(smoothed(new)).sum(-1), 1, rtol=1e-5)
    uniform = fit(logits, labels, pool="mixture", smoothing=1e6)
    np.testing.assert_allclose(np.exp(uniform(new)), 1 / classes, rtol=1e-3)
    nearly = fit(logits, labels, pool="mixture", smoothing=1e-6)
    np.testing.assert_allclose(np.exp(nearly(logits)), np.exp(plain(logits)), atol=1e-4)


@pytest.mark.parametrize("fit", [calibrate.isotonic, calibrate.histogram])
def test_masked_rows_change_nothing(fit):
    if fit is calibrate.isotonic:
        pytest.importorskip("sklearn")
    mask = np.arange(80) % 4 > 0
    spoilt, labels = LOGITS.copy(), LABELS.copy()
    spoilt[:, ~mask], labels[~mask] = np.nan, -7
    got = np.exp(fit(spoilt, labels, pool="members", row_weights=mask)(LOGITS))
    want = np.exp(fit(LOGITS[:, mask], LABELS[mask], pool="members")(LOGITS))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert not np.allclose(np.exp(fit(LOGITS, LABELS, pool="members")(LOGITS)), want, atol=1e-2)


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("fit", [calibrate.isotonic, calibrate.histogram])
def test_nan_stays_nan(fit, classes):
    options = {"num_bins": 2, "binning": "width"} if fit is calibrate.histogram else {}
    if not options:
        pytest.importorskip("sklearn")
    fitted = fit(LOGITS[..., :classes], LABELS % classes, pool="mixture", **options)
    spoilt = LOGITS[..., :classes].copy()
    spoilt[1, 3] = np.nan
    got, want = np.asarray(fitted(spoilt))[0], np.asarray(fitted(LOGITS[..., :classes]))[0]
    assert np.isnan(got[3]).all()
    np.testing.assert_array_equal(np.delete(got, 3, 0), np.delete(want, 3, 0))


@pytest.mark.usefixtures("unhooked")
def test_messages():
    with pytest.raises(TypeError, match="calibrate.isotonic` needs a concrete `logits`"):
        jax.jit(lambda x: calibrate.isotonic(x, LABELS, pool="mixture"))(LOGITS)
    with pytest.raises(ValueError, match="`num_bins` of at least 1"):
        calibrate.histogram(LOGITS, LABELS, pool="mixture", num_bins=0)
    for fit in (calibrate.histogram, calibrate.isotonic):
        with pytest.raises(
            ValueError, match=f"calibrate.{fit.__name__}` needs `smoothing` to be at least 0 and finite"
        ):
            fit(LOGITS, LABELS, pool="mixture", smoothing=-1.0)


def test_without_scikit_learn(monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("sklearn"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"`calibrate.isotonic` needs scikit-learn.\n.*\[sklearn\]"):
        calibrate.isotonic(LOGITS, LABELS, pool="mixture")


def test_smoothing_of_confident_rows():
    pytest.importorskip("sklearn")
    # 200 rows of probability about 1, and 400 of about 0, which differ by less than scikit-learn tells apart in float32
    labels = np.arange(600) % 3
    logits = np.random.default_rng(0).normal(size=(1, 600, 3)) + 18 * np.eye(3)[labels]
    logits = logits.astype(np.float32)
    fitted = calibrate.isotonic(logits, labels, smoothing=1, pool="mixture")
    right = np.take_along_axis(np.exp(np.asarray(fitted(logits)))[0], labels[:, None], axis=-1)
    one, none = 201 / 203, 1 / 403
    np.testing.assert_allclose(right, one / (one + 2 * none), rtol=1e-5)
