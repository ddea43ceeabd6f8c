"""Platt, beta and isotonic calibration compared with SciPy and scikit-learn; what holds for every calibration."""

import inspect
import json
import pathlib

import jax
import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble import calibrate

optimize = pytest.importorskip("scipy.optimize")
pytest.importorskip("sklearn")

STORED = json.loads((pathlib.Path(__file__).parents[1] / "scores" / "figures.json").read_text())
RNG = np.random.default_rng(0)
ODDS = 3 * RNG.normal(size=400) + 1
BINARY = (RNG.uniform(size=400) < 1 / (1 + np.exp(0.3 - 0.4 * ODDS))).astype(int)
LABELS = RNG.integers(3, size=50)
LOGITS = (3 * RNG.normal(size=(2, 50, 3)) + 2 * np.eye(3)[LABELS]).astype(np.float32)
KINDS = ["temperature", "vector", "matrix", "isotonic", "platt", "beta"]


def _logits(odds):
    """One member of two classes."""
    return np.stack([0 * odds, odds], axis=-1)[None].astype(np.float32)


def _binary(kind, odds, labels, **options):
    """The coefficients of the second class."""
    fitted = getattr(calibrate, kind)(_logits(odds), labels, pool="mixture", **options)
    np.testing.assert_allclose(np.exp(fitted(_logits(odds))).sum(-1), 1, rtol=1e-5)
    return np.asarray(fitted.coefficients)[0, 1]


def test_platt_is_scikit_learns():
    from sklearn.calibration import _SigmoidCalibration

    for odds, labels in [(ODDS, BINARY), (ODDS, np.arange(400) % 3 // 2), (ODDS[:5], np.array([0, 1, 1, 0, 1]))]:
        want = _SigmoidCalibration().fit(odds, labels)
        # scikit-learn stops within about 1e-6 of the minimum.
        np.testing.assert_allclose(_binary("platt", odds, labels), [-want.a_, -want.b_], rtol=1e-4, atol=1e-5)
    half = _binary("platt", ODDS[:200], BINARY[:200], row_weights=np.full(200, 2))
    np.testing.assert_allclose(half, _binary("platt", np.tile(ODDS[:200], 2), np.tile(BINARY[:200], 2)), rtol=1e-4)
    np.testing.assert_allclose(_binary("platt", 1e3 * ODDS, BINARY) * [1e3, 1], _binary("platt", ODDS, BINARY), 1e-3)


def test_platt_of_separable_rows_and_of_one_class():
    # Symmetric and separable: smoothed targets 4/5 and 1/5; the loss of raw ones has no minimum.
    odds = np.array([-2.0, -2, -2, 2, 2, 2])
    np.testing.assert_allclose(_binary("platt", odds, (odds > 0).astype(int)), [np.log(4) / 2, 0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(_binary("platt", np.array([1.0, 2, 3]), np.ones(3, int)), [0, np.log(4)], atol=1e-3)


def _beta_loss(params, odds, labels):
    a, b, c = params
    margin = -a * np.logaddexp(0, -odds) + b * np.logaddexp(0, odds) + c
    return np.mean(np.logaddexp(0, np.where(labels == 1, -margin, margin)))


def test_beta_is_scipys_minimum():
    want = optimize.minimize(_beta_loss, [1, 1, 0], (ODDS, BINARY), tol=1e-10).x
    assert (want[:2] > 0).all()
    np.testing.assert_allclose(_binary("beta", ODDS, BINARY), want, rtol=1e-3, atol=1e-3)
    # Frequencies that fall everywhere leave the rate alone.
    falling = (RNG.uniform(size=400) < 1 / (1 + np.exp(ODDS))).astype(int)
    rate = falling.mean()
    np.testing.assert_allclose(_binary("beta", ODDS, falling), [0, 0, np.log(rate / (1 - rate))], atol=1e-4)
    bounds = [(0, None), (0, None), (None, None)]
    for labels in ((ODDS > 0) * BINARY, np.maximum(BINARY, ODDS < 0)):
        want = optimize.minimize(_beta_loss, [1, 1, 0], (ODDS, labels), bounds=bounds, method="L-BFGS-B").fun
        np.testing.assert_allclose(_beta_loss(_binary("beta", ODDS, labels), ODDS, labels), want, rtol=1e-5)
    with pytest.warns(UserWarning, match="`calibrate.beta`: no minimum was reached"):
        calibrate.beta(_logits(ODDS), (ODDS > 0).astype(int), pool="mixture")


def test_isotonic_is_scikit_learns():
    logits, labels = (np.asarray(STORED["data"][name]) for name in ("logits", "labels"))
    want = np.asarray(STORED["figures"]["isotonic: probabilities"])
    with jax.enable_x64(True):
        got = np.exp(calibrate.isotonic(logits, labels, pool="mixture")(logits)[0])
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-12)
        two = logits[:1, :, :2]
        got = np.exp(calibrate.isotonic(two, labels % 2, pool="mixture")(two)[0])
        np.testing.assert_allclose(
            got, STORED["figures"]["isotonic of two classes: probabilities"], rtol=1e-6, atol=1e-12
        )


def test_isotonic_beyond_the_rows_it_was_fitted_on():
    log_p = lambda p: np.log(np.stack([1 - np.asarray(p), p], axis=-1))[None].astype(np.float32)
    fitted = calibrate.isotonic(log_p([0.3, 0.4, 0.4, 0.6, 0.6]), np.array([0, 0, 1, 0, 1]), pool="mixture")
    # Pools: 0 at 0.3, one half at 0.4 and 0.6; straight in between, constant outside.
    got = np.exp(fitted(log_p([0.1, 0.3, 0.35, 0.5, 0.9])))[0, :, 1]
    np.testing.assert_allclose(got, [0, 0, 0.25, 0.5, 0.5], atol=1e-5)


def test_no_kind_is_left_out():
    functions = {name for name, value in vars(calibrate).items() if inspect.isfunction(value)}
    assert functions == {*KINDS, "variance"}


@pytest.mark.parametrize("pool", ["members", "mixture"])
@pytest.mark.parametrize("kind", KINDS)
def test_calling(kind, pool, tmp_path):
    fit = getattr(calibrate, kind)
    fitted = fit(LOGITS, LABELS, pool=pool)
    eager = np.asarray(fitted(LOGITS))
    assert eager.shape == ((2 if pool == "members" else 1), 50, 3)
    assert eager.dtype == np.float32
    np.testing.assert_allclose(np.exp(eager).sum(-1), 1, rtol=1e-5)
    traced = jax.jit(lambda fitted, x: fitted(x))(fitted, LOGITS)
    np.testing.assert_allclose(np.exp(traced), np.exp(eager), rtol=1e-4, atol=1e-6)
    shaped = fitted(LOGITS.reshape(2, 5, 10, 3))
    np.testing.assert_allclose(np.exp(shaped).reshape(eager.shape), np.exp(eager), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(np.exp(fitted(LOGITS[:, 7])), np.exp(eager[:, 7]), rtol=1e-4, atol=1e-6)
    before = LOGITS if pool == "members" else ee.combine.mixture(LOGITS)[None]
    likelier = [ee.scores.per_member(ee.scores.nll, x, LABELS) for x in (eager, before)]
    assert (likelier[0] < likelier[1] - 1e-3).all()
    ee.save(tmp_path / "fitted", fitted)
    loaded = ee.load(tmp_path / "fitted", jax.tree.map(jax.numpy.ones_like, fitted))
    np.testing.assert_array_equal(loaded(LOGITS), eager)
    mask = np.arange(50) % 5 > 0  # rows that do not count
    spoilt = fit(np.where(mask[:, None], LOGITS, np.nan), np.where(mask, LABELS, -7), pool=pool, row_weights=mask)
    want = fit(LOGITS[:, mask], LABELS[mask], pool=pool)(LOGITS)
    np.testing.assert_allclose(np.exp(spoilt(LOGITS)), np.exp(want), atol=2e-4)


@pytest.mark.usefixtures("unhooked")
def test_messages():
    with pytest.raises(ValueError, match="`weights` only with `pool"):
        calibrate.beta(LOGITS, LABELS, pool="members", weights=np.ones(2))
    with pytest.raises(ValueError, match="`calibrate.platt` needs finite `logits`"):
        calibrate.platt(np.where(LOGITS > 5, np.inf, LOGITS), LABELS, pool="mixture")
    with pytest.raises(ValueError, match="`calibrate.Calibration` needs predictions of the members"):
        calibrate.platt(LOGITS, LABELS, pool="mixture")(LOGITS[:1])
    with pytest.raises(TypeError, match="`calibrate.isotonic` needs a concrete `logits`.\n  got a traced array"):
        jax.jit(lambda x: calibrate.isotonic(x, LABELS, pool="mixture").values)(LOGITS)
