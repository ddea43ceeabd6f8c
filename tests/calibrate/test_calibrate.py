"""Calibration: SciPy and scikit-learn, closed forms and minima, and what holds for every kind."""

import json
import pathlib

import jax
import numpy as np
import pytest

import eqx_ensemble as ee
from eqx_ensemble import calibrate, combine, scores

optimize = pytest.importorskip("scipy.optimize")
special = pytest.importorskip("scipy.special")
pytest.importorskip("sklearn")

STORED = json.loads((pathlib.Path(__file__).parents[1] / "scores" / "figures.json").read_text())
LOGITS, LABELS = (np.asarray(STORED["data"][name]) for name in ("logits", "labels"))
FIGURES = STORED["figures"]


RNG = np.random.default_rng(0)
ODDS = 3 * RNG.normal(size=400) + 1
BINARY = (RNG.uniform(size=400) < 1 / (1 + np.exp(0.3 - 0.4 * ODDS))).astype(int)
OWN_LABELS = RNG.integers(3, size=50)
OWN_LOGITS = (3 * RNG.normal(size=(2, 50, 3)) + 2 * np.eye(3)[OWN_LABELS]).astype(np.float32)
MEAN = RNG.normal(size=(3, 40)).astype(np.float32)
VARIANCE = RNG.uniform(0.2, 2, size=(3, 40)).astype(np.float32)
TARGETS = 3 * RNG.normal(size=40).astype(np.float32)


@pytest.mark.parametrize(("gap", "share"), [(3.0, 0.75), (40.0, 0.99)])
def test_closed_form_of_two_classes(gap, share):
    # Logits `gap` apart, right with frequency q: the best temperature makes the probability q, so T = gap / logit(q).
    labels = (np.arange(100) >= round(100 * share)).astype(int)
    logits = np.tile(np.array([gap, 0.0], np.float32), (1, 100, 1))
    fitted = calibrate.temperature(logits, labels, pool="mixture")
    np.testing.assert_allclose(fitted.temperature, gap / np.log(share / (1 - share)), rtol=2e-5)
    np.testing.assert_allclose(np.exp(fitted(logits))[0, :, 0], share, rtol=1e-5)


@pytest.mark.slow
def test_is_scikit_learns_temperature_scaling():
    with jax.enable_x64(True):
        fitted = calibrate.temperature(LOGITS, LABELS, pool="mixture")
        got = np.exp(fitted(LOGITS)[0])
        # scikit-learn stops within about 1e-7 of the minimum.
        np.testing.assert_allclose(fitted.temperature, FIGURES["temperature"], rtol=1e-6)
        np.testing.assert_allclose(got, FIGURES["temperature: probabilities"], rtol=1e-5)
    single = calibrate.temperature(LOGITS.astype(np.float32), LABELS, pool="mixture")
    np.testing.assert_allclose(single.temperature, FIGURES["temperature"], rtol=5e-6)


SURE = np.tile(3 * np.eye(4, dtype=np.float32), (2, 1, 1))
SURE[0, 0] = SURE[0, 1]


@pytest.mark.slow
@pytest.mark.usefixtures("unhooked")
def test_messages():
    temperature, labels, variance = calibrate.temperature, np.arange(4), calibrate.variance
    for call, message in [
        (lambda: temperature(SURE, labels, pool="members"), "member 1: every label already is the most likely"),
        (lambda: temperature(-SURE, labels, pool="mixture"), "the labels are no more likely than by chance"),
        (lambda: temperature(np.log(SURE + 1e-9), labels - 9, pool="mixture"), "labels from 0 to 3"),
        (lambda: temperature(np.where(SURE == 0, -np.inf, SURE), labels, pool="mixture"), "finite `logits`"),
        (lambda: temperature(SURE, labels, pool="members", weights=np.ones(2)), "`weights` only with `pool"),
        (lambda: jax.jit(lambda y: temperature(SURE, y, pool="mixture"))(labels), "a concrete `labels`"),
        (lambda: temperature(LOGITS, LABELS, pool="members")(LOGITS[:2]), "the members that it was fitted on"),
        (lambda: variance(MEAN, VARIANCE, MEAN[0], pool="members"), "member 0: the factor would be 0"),
        (lambda: variance(MEAN, 0 * VARIANCE, TARGETS, pool="members"), "variances above zero"),
        (lambda: variance(MEAN, VARIANCE, TARGETS, pool="mixture")(MEAN[:1], VARIANCE[:1]), "expected 3 members"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            call()


@pytest.mark.slow
def test_logits_of_any_size_have_their_temperature():
    # A search between fixed ends would return one of them.
    logits = OWN_LOGITS[:1] - 2 * np.eye(3, dtype=np.float32)[OWN_LABELS] / 3
    fit = lambda scale: calibrate.temperature((scale * logits).astype(np.float32), OWN_LABELS, pool="mixture")
    for scale in (1e-2, 1e10, 1e30):
        # Log-probabilities of small logits are rounded.
        np.testing.assert_allclose(fit(scale).temperature / scale, fit(1).temperature, rtol=1e-4)


# Log-probabilities that are not far apart: many steps of an optimiser are not the matter here.


@pytest.mark.slow
def test_matrix_is_scikit_learns_logistic_regression():
    with jax.enable_x64(True):
        fitted = calibrate.matrix(LOGITS, LABELS, pool="mixture")
        want = np.asarray(FIGURES["matrix: probabilities"])
        np.testing.assert_allclose(np.exp(fitted(LOGITS)[0]), want, rtol=1e-4, atol=1e-6)
        lowest = -np.log(np.take_along_axis(want, LABELS[:, None], -1)).mean()
        np.testing.assert_allclose(scores.nll(fitted(LOGITS), LABELS), lowest, rtol=1e-8)
        vector = calibrate.vector(LOGITS, LABELS, pool="mixture")(LOGITS)
        assert scores.nll(vector, LABELS) > lowest + 1e-3
    single = calibrate.matrix(LOGITS.astype(np.float32), LABELS, pool="mixture")
    np.testing.assert_allclose(scores.nll(single(LOGITS), LABELS), lowest, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("off_diagonal", [10.0])
def test_penalties_are_those_of_the_definition(off_diagonal):
    # Log-probabilities that are not far apart: many steps of an optimiser are not the matter here.
    log_p, off = np.float64(combine.mixture(LOGITS / 4)), ~np.eye(4, dtype=bool)

    def loss(params):
        matrix, offset = params[:16].reshape(4, 4), params[16:]
        nll = -special.log_softmax(log_p @ matrix.T + offset, axis=-1)[np.arange(len(LABELS)), LABELS].mean()
        return nll + off_diagonal * np.mean(matrix[off] ** 2) + 0.3 * np.mean(offset**2)

    start = np.r_[np.eye(4).ravel(), np.zeros(4)]
    want = optimize.minimize(loss, start, method="BFGS", options={"gtol": 1e-7, "maxiter": 2000})
    penalties = {"off_diagonal_penalty": off_diagonal, "bias_penalty": 0.3}
    with jax.enable_x64(True):
        found = np.asarray(calibrate.matrix(LOGITS / 4, LABELS, pool="mixture", **penalties).coefficients)[0]
    got = np.r_[np.ravel(found[:, :4]), found[:, 4]]
    np.testing.assert_allclose(loss(got), want.fun, rtol=1e-7)
    np.testing.assert_allclose(got, want.x, atol=1e-3)


@pytest.mark.slow
def test_warns_where_there_is_no_minimum():
    with pytest.warns(UserWarning, match="`calibrate.vector`: no minimum was reached"):
        calibrate.vector(SURE, np.arange(4), pool="members")


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_a_penalty_gives_a_minimum_where_rows_can_be_separated():
    # Every class is predicted as the next one: no scales and offsets separate them, a matrix does so without error.
    labels = np.arange(30) % 3
    logits = np.log(np.full((1, 30, 3), 0.1) + 0.7 * np.eye(3)[(labels + 1) % 3]).astype(np.float32)
    fitted = calibrate.matrix(logits, labels, pool="mixture", off_diagonal_penalty=0.01, bias_penalty=0.01)
    np.testing.assert_array_equal(np.argmax(fitted(logits)[0], axis=-1), labels)


def _logits(odds):
    """One member of two classes."""
    return np.stack([0 * odds, odds], axis=-1)[None].astype(np.float32)


def _binary(kind, odds, labels, **options):
    """The coefficients of the second class."""
    fitted = getattr(calibrate, kind)(_logits(odds), labels, pool="mixture", **options)
    np.testing.assert_allclose(np.exp(fitted(_logits(odds))).sum(-1), 1, rtol=1e-5)
    return np.asarray(fitted.coefficients)[0, 1]


@pytest.mark.slow
def test_platt_is_scikit_learns():
    from sklearn.calibration import _SigmoidCalibration

    for odds, labels in [(ODDS, BINARY), (ODDS, np.arange(400) % 3 // 2), (ODDS[:5], np.array([0, 1, 1, 0, 1]))]:
        want = _SigmoidCalibration().fit(odds, labels)
        # scikit-learn stops within about 1e-6 of the minimum.
        np.testing.assert_allclose(_binary("platt", odds, labels), [-want.a_, -want.b_], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(_binary("platt", 1e3 * ODDS, BINARY) * [1e3, 1], _binary("platt", ODDS, BINARY), 1e-3)


def test_platt_of_separable_rows_and_of_one_class():
    # Symmetric and separable: smoothed targets 4/5 and 1/5; the loss of raw ones has no minimum.
    odds = np.array([-2.0, -2, -2, 2, 2, 2])
    np.testing.assert_allclose(_binary("platt", odds, (odds > 0).astype(int)), [np.log(4) / 2, 0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(_binary("platt", np.array([1.0, 2, 3]), np.ones(3, int)), [0, np.log(4)], atol=1e-3)


def test_beta_is_scipys_minimum():
    def loss(params, labels):
        margin = -params[0] * np.logaddexp(0, -ODDS) + params[1] * np.logaddexp(0, ODDS) + params[2]
        return np.mean(np.logaddexp(0, np.where(labels == 1, -margin, margin)))

    # Frequencies that rise, fall (which leaves the rate alone), and reach zero or one.
    falling = (RNG.uniform(size=400) < 1 / (1 + np.exp(ODDS))).astype(int)
    bounds = [(0, None), (0, None), (None, None)]
    for labels in (BINARY, falling, (ODDS > 0) * BINARY, np.maximum(BINARY, ODDS < 0)):
        want = optimize.minimize(loss, [1, 1, 0], labels, bounds=bounds, method="L-BFGS-B").fun
        found = _binary("beta", ODDS, labels)
        assert (found[:2] >= 0).all()
        np.testing.assert_allclose(loss(found, labels), want, rtol=1e-5)
    with pytest.warns(UserWarning, match="`calibrate.beta`: no minimum was reached"):
        calibrate.beta(_logits(ODDS), (ODDS > 0).astype(int), pool="mixture")


def test_isotonic_is_scikit_learns():
    with jax.enable_x64(True):
        for logits, labels, name in (
            (LOGITS, LABELS, "isotonic: probabilities"),
            (LOGITS[:1, :, :2], LABELS % 2, "isotonic of two classes: probabilities"),
        ):
            got = np.exp(calibrate.isotonic(logits, labels, pool="mixture")(logits)[0])
            np.testing.assert_allclose(got, FIGURES[name], rtol=1e-6, atol=1e-12)


def test_isotonic_beyond_the_rows_it_was_fitted_on():
    log_p = lambda p: np.log(np.stack([1 - np.asarray(p), p], axis=-1))[None].astype(np.float32)
    fitted = calibrate.isotonic(log_p([0.3, 0.4, 0.4, 0.6, 0.6]), np.array([0, 0, 1, 0, 1]), pool="mixture")
    # Pools: 0 at 0.3, one half at 0.4 and 0.6; straight in between, constant outside.
    got = np.exp(fitted(log_p([0.1, 0.3, 0.35, 0.5, 0.9])))[0, :, 1]
    np.testing.assert_allclose(got, [0, 0, 0.25, 0.5, 0.5], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["members", "mixture"])
@pytest.mark.parametrize("kind", ["temperature", "vector", "matrix", "isotonic", "platt", "beta"])
def test_calling(kind, pool, tmp_path):
    fit = getattr(calibrate, kind)
    fitted = fit(OWN_LOGITS, OWN_LABELS, pool=pool)
    eager = np.asarray(fitted(OWN_LOGITS))
    assert eager.shape == ((2 if pool == "members" else 1), 50, 3)
    assert eager.dtype == np.float32
    np.testing.assert_allclose(np.exp(eager).sum(-1), 1, rtol=1e-5)
    traced = jax.jit(lambda fitted, x: fitted(x))(fitted, OWN_LOGITS)
    np.testing.assert_allclose(np.exp(traced), np.exp(eager), rtol=1e-4, atol=1e-6)
    shaped = fitted(OWN_LOGITS.reshape(2, 5, 10, 3))
    np.testing.assert_allclose(np.exp(shaped).reshape(eager.shape), np.exp(eager), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(np.exp(fitted(OWN_LOGITS[:, 7])), np.exp(eager[:, 7]), rtol=1e-4, atol=1e-6)
    before = OWN_LOGITS if pool == "members" else ee.combine.mixture(OWN_LOGITS)[None]
    likelier = [ee.scores.per_member(ee.scores.nll, x, OWN_LABELS) for x in (eager, before)]
    assert (likelier[0] < likelier[1] - 1e-3).all()
    ee.save(tmp_path / "fitted", fitted)
    loaded = ee.load(tmp_path / "fitted", jax.tree.map(jax.numpy.ones_like, fitted))
    np.testing.assert_array_equal(loaded(OWN_LOGITS), eager)


def test_an_offset_costs_no_precision():
    mean, targets = np.round(MEAN, 2) + np.float32(1e4), np.round(TARGETS, 2) + np.float32(1e4)
    want = np.mean((np.float64(targets) - np.float64(mean).mean(0)) ** 2
                   / (VARIANCE.mean(0) + np.float64(mean).var(0)))  # fmt: skip
    np.testing.assert_allclose(calibrate.variance(mean, VARIANCE, targets, pool="mixture").scale, want, rtol=1e-3)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_targets_that_are_not_finite_are_refused(wrong):
    mean, variance, targets = np.zeros((1, 3), np.float32), np.ones((1, 3), np.float32), np.array([1, wrong, 2])
    with pytest.raises(ValueError, match=r"finite `targets`.\n  got (nan|inf) at index \(1,\)"):
        calibrate.variance(mean, variance, targets, pool="mixture")
    fitted = calibrate.variance(mean, variance, targets, pool="mixture", row_weights=np.isfinite(targets))
    np.testing.assert_allclose(fitted.scale, 2.5)
    with pytest.raises(ValueError, match="finite means and variances, and .*\n  .*nan"):
        calibrate.variance(mean * np.nan, variance, np.ones(3), pool="mixture")
